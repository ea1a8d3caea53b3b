"""What classes, functions, caches and the global variables of modules hold; as ``user_code.contents`` for other
objects.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache, partial, partialmethod
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType
from typing import Any

from lightning_fxpipe.user_code.code_names import is_own_code, names_of
from lightning_fxpipe.user_code.contents import ABSENT, Kind, leave, nothing, put_named, same_mapping


@dataclass(frozen=True)
class Globals:
    """The global variables of a module that some functions name.

    Attributes:
        module: The module's name.
        values: Its dictionary.
        names: The variables.
    """

    module: str
    values: dict[str, Any]
    names: frozenset[str]


_NOT_STATE = (FunctionType, staticmethod, classmethod, property, partialmethod, MemberDescriptorType, GetSetDescriptorType)


def _take_class(cls: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(cls).items()
        if not (name.startswith("__") or name.startswith("_abc_") or isinstance(value, _NOT_STATE))
        and not hasattr(type(value), "__get__")
    }


def _set_class_attribute(cls: type, name: str, value: Any) -> None:
    if value is ABSENT:
        type.__delattr__(cls, name)
    else:
        type.__setattr__(cls, name, value)


def _take_globals(owner: Globals) -> dict[str, Any]:
    return {name: owner.values[name] for name in owner.names if name in owner.values}


def _set_global(owner: Globals, name: str, value: Any) -> None:
    if value is ABSENT:
        owner.values.pop(name, None)
    else:
        owner.values[name] = value


def _take_function(function: FunctionType) -> dict[str, Any]:
    """What its closure holds, and its default values, which may be containers; nothing of our own watches over user code."""
    found: dict[str, Any] = {}
    if str(function.__globals__.get("__name__")).startswith("lightning_fxpipe."):
        return found
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue  # empty
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    found.update({f" default {index}": value for index, value in enumerate(defaults)})
    return found


def _set_cell(function: FunctionType, name: str, value: Any) -> None:
    if name in function.__code__.co_freevars and function.__closure__ is not None:
        cell = function.__closure__[function.__code__.co_freevars.index(name)]
        if value is not ABSENT:
            cell.cell_contents = value


def _forget(cached: Any, before: Any) -> None:
    """A cache that has been asked meanwhile may hold what was made in a dry run; without, it makes its values anew."""
    if cached.cache_info() != before:
        cached.cache_clear()


def _take_partial(value: partial[Any]) -> dict[str, Any]:
    return {"func": value.func, "args": value.args, "keywords": value.keywords}


def _take_method(value: MethodType) -> dict[str, Any]:
    return {"self": value.__self__, "func": value.__func__}


CLASS = Kind(
    "class",
    _take_class,
    put_named(_take_class, _set_class_attribute),
    lambda contents: contents.items(),
    lambda value, key: vars(value)[key],
    _set_class_attribute,
    same_mapping,
)
GLOBALS = Kind(
    "global",
    _take_globals,
    put_named(_take_globals, _set_global),
    lambda contents: contents.items(),
    lambda value, key: value.values[key],
    _set_global,
    same_mapping,
)
FUNCTION = Kind(
    "function",
    _take_function,
    put_named(_take_function, _set_cell),
    lambda contents: contents.items(),
    lambda value, key: _take_function(value)[key],
    _set_cell,
    same_mapping,
)
CACHED = Kind("cache", lambda value: value.cache_info(), _forget, nothing, nothing, leave, lambda one, other: True)
PARTIAL = Kind(
    "partial", _take_partial, leave, lambda c: c.items(), lambda v, k: _take_partial(v)[k], leave, lambda one, other: True
)
METHOD = Kind(
    "method", _take_method, leave, lambda c: c.items(), lambda v, k: _take_method(v)[k], leave, lambda one, other: True
)


def globals_of(function: FunctionType) -> list[Globals]:
    """The global variables that a function of user code names: of its own module, and of modules that it names."""
    if not is_own_code(function.__module__ or ""):
        return []
    values = function.__globals__
    named, stored = names_of(function.__code__)
    own = frozenset(name for name in named if name in values) | stored
    found = [Globals(str(values.get("__name__", "")), values, own)] if own else []
    for name in own:
        other = values.get(name)
        module = getattr(other, "__name__", "") if isinstance(other, type(sys)) else ""
        if module and is_own_code(module):
            inside = frozenset(attribute for attribute in named if attribute in vars(other))
            found.append(Globals(module, vars(other), inside))
    return found


def functions_of(cls: type) -> list[Any]:
    """The functions in the body of a class of user code, those of properties, class and static methods, and caches of them."""
    found: list[Any] = []
    for value in vars(cls).values():
        parts = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (getattr(value, "__func__", value),)
        found += [part for part in parts if isinstance(part, _FUNCTIONS)]
    return found


_FUNCTIONS = (FunctionType, type(lru_cache(len)))
