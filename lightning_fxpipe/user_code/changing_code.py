"""Which attributes code may change, or change something in, as far as its names tell."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from lightning_fxpipe.user_code.bytecode import assigned_names, changes_containers, names_used
from lightning_fxpipe.user_code.code_contents import functions_of
from lightning_fxpipe.user_code.kinds import is_users, kinds_of

_CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})


def assigned_by(codes: Collection[CodeType]) -> frozenset[str]:
    """Returns the names of attributes and variables that code assigns."""
    return frozenset(name for code in codes for name in _names(code)[0])


def may_change_inside(name: str, value: Any, codes: Collection[CodeType]) -> bool:
    """True for an object that code may change from within.

    Args:
        name: The attribute in which the object is.
        value: The object.
        codes: The code.
    """
    using = [code for code in codes if name in _names(code)[1]]
    if not using or isinstance(value, (nn.Module, nn.Parameter)):
        return False
    if isinstance(value, Tensor):
        return True
    if not kinds_of(value):
        return False
    kind: Any = type(value)
    named = frozenset(each for code in using for each in _names(code)[1])
    own = [code for code in codes_of_class(kind) if code.co_name in named]
    attributes = vars(value) if hasattr(value, "__dict__") else {}
    if assigned_by([*codes, *own]) & attributes.keys():
        return True
    if is_users(kind):  # what changes in it are the lists, dicts and tensors that it has
        held = {name for name, each in attributes.items() if kinds_of(each) or isinstance(each, Tensor)}
        using = [code for code in using if _names(code)[1] & held] if held else []
    return any(changes_containers(code) or _writes(code) for code in (*using, *own))


def _writes(code: CodeType) -> bool:
    """True for code with one of torch's methods that write to a tensor, or one that is named so."""
    return any(name.endswith("_") and not name.startswith("_") for name in _names(code)[1])


@lru_cache(maxsize=4096)
def codes_of_class(kind: type[Any]) -> tuple[CodeType, ...]:
    """The code of a class's functions, and of the user's classes that it follows from, but for constructors."""
    functions = (function for base in kind.__mro__ if is_users(base) for function in functions_of(base))
    codes = (each.__code__ for each in functions if isinstance(each, FunctionType) and each.__name__ not in _CONSTRUCTORS)
    return tuple(codes)


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names that code assigns, and those that it uses."""
    return frozenset(assigned_names(code)), frozenset(names_used(code))
