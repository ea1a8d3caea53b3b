"""Contents of classes, functions, caches and the global variables of modules; ``user_code.contents`` has those of other
objects.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache, partial, partialmethod
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType
from typing import Any

from lightning_fxpipe.pytree.structure import closure_of
from lightning_fxpipe.user_code.code_names import function_of, is_own_code, names_of
from lightning_fxpipe.user_code.contents import ABSENT, fixed_kind, kind_by_name, set_key


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


CACHED: type = type(lru_cache(len))  # of functions with a cache

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


def contents_of_function(function: FunctionType) -> dict[str, Any]:
    """Its attributes, what its closure holds, and its default values, which may be containers; nothing that is our own."""
    has_none = function.__closure__ is None and function.__defaults__ is None and function.__kwdefaults__ is None
    if has_none and not function.__dict__:
        return {}  # as most have nothing
    if str(function.__globals__.get("__name__")).startswith("lightning_fxpipe."):
        return {}
    found = {name: value for name, value in function.__dict__.items() if not name.startswith("__")} | closure_of(function)
    if function.__defaults__ is not None or function.__kwdefaults__ is not None:
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        found |= {f" default {index}": value for index, value in enumerate(defaults)}
    return found


def _set_cell(function: FunctionType, name: str, value: Any) -> None:
    if name in function.__code__.co_freevars and function.__closure__ is not None:
        cell = function.__closure__[function.__code__.co_freevars.index(name)]
        if value is not ABSENT:
            cell.cell_contents = value
    elif not name.startswith(" "):
        set_key(function.__dict__, name, value)


CLASS = kind_by_name("class", _take_class, _set_class_attribute)
_GLOBALS = kind_by_name(
    "global",
    lambda owner: {name: owner.values[name] for name in owner.names if name in owner.values},
    lambda owner, name, value: set_key(owner.values, name, value),
    lambda owner, name: owner.values[name],
)
_FUNCTION = kind_by_name("function", contents_of_function, _set_cell)
_PARTIAL = fixed_kind("partial", lambda value: {"func": value.func, "args": value.args, "keywords": value.keywords})
_METHOD = fixed_kind("method", lambda value: {"self": value.__self__, "func": value.__func__})

# The classes of objects with such contents.
OF_CODE = ((partial, _PARTIAL), (MethodType, _METHOD), (FunctionType, _FUNCTION), (type, CLASS), (Globals, _GLOBALS))


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
        parts = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (function_of(value),)
        found += [part for part in parts if isinstance(part, (FunctionType, CACHED))]
    return found
