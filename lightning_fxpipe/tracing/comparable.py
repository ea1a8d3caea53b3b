"""Turns values that recorded code has read into a form that can be compared with their later values.

    comparable(Config(scale=2.0, names=["a"]))  ->  Held(Config, ((("attribute", "scale"), 2.0),
                                                                  (("attribute", "names"), Held(list, ((("index", 0), "a"),)))))

Plain values stand for themselves, and so do objects that cannot change. Of containers, functions and objects of a user's or a
library's class it is what they hold, as deep as it is not too much, by the steps that lead there, as in ``user_code.paths``.
Tensors and modules are compared elsewhere: ``tracing.held_tensors``, and the attributes that are read from modules.
"""

from __future__ import annotations

import array
import logging
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import FunctionType
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_fxpipe._compat.torch import SYMBOLIC_TYPES
from lightning_fxpipe.user_code.code_contents import CLASS
from lightning_fxpipe.user_code.code_names import is_own_code
from lightning_fxpipe.user_code.contents import ABSENT, ATTRIBUTES, CONTEXT, MAX_ARRAY_BYTES, Kind
from lightning_fxpipe.user_code.kinds import is_unchanging, is_users, kinds_of_class

_logger = logging.getLogger("lightning_fxpipe")

# From a value to something inside it: (name of a kind of contents, key) for each step.
Steps = tuple[tuple[str, Any], ...]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum)
_PLAIN_TYPES = frozenset(_PLAIN)
# Top-level packages whose objects hold no settings of the user's.
NO_SETTINGS = frozenset({"torch", "lightning", "builtins", "lightning_fxpipe", "pytorch_lightning", "logging"})
_OBJECTS = frozenset({"attribute", "slot"})
_COMPARED = _OBJECTS | {"key", "index", "function", "partial", "method", "class"}
_SIZED = (list, tuple, dict, set, frozenset, deque)
_DEPTHS = (6, 3, 1)
_MAX_ENTRIES = 1024
_OTHER = "something else"


class _Symbol:
    """In the place of a number that is an input: guards of all objects that reach it leave its value to whoever reads it."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


_SYMBOL = _Symbol()


class Unplain(Exception):
    """A value is nothing that can be compared."""


class _TooMuch(Exception):
    pass


@dataclass(frozen=True)
class Held:
    """The contents of an object.

    Attributes:
        what: Its class, or the code of a function.
        entries: The values in it, in the same form, with the last step to each.
    """

    what: Any
    entries: tuple[tuple[tuple[str, Any], Any], ...]


@dataclass(frozen=True, eq=False)
class _Itself:
    """An object that cannot change. It may compare in ways of its own."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Itself) or type(self.value) is not type(other.value):
            return False
        try:
            return self.value is other.value or bool(self.value == other.value)
        except Exception:
            _logger.debug("%s cannot be compared, and counts as another value", type(self.value), exc_info=True)
            return False

    def __hash__(self) -> int:
        return hash(self.value)


@dataclass(frozen=True, eq=False)
class _Large:
    """The contents of an object that holds too much to look into.

    Attributes:
        kind: How they are taken.
        contents: A copy.
    """

    kind: Kind
    contents: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Large) or self.kind is not other.kind:
            return False
        is_same = self.kind.can_change and self.kind.is_same(self.contents, other.contents)
        return is_same or self.contents is other.contents or list(self._flat()) == list(other._flat())

    def __hash__(self) -> int:
        return hash(self.kind.name)

    def _flat(self) -> Iterator[tuple[Any, Any]]:
        return ((key, _comparable(item, 0, ())) for key, item in self.kind.entries(self.contents))


def comparable(value: Any, varying: Collection[Steps] = ()) -> Any:
    """Returns a form of a value that equals another one as long as nothing in the value changes.

    Args:
        value: The value.
        varying: Steps to numbers in it that do not count.

    Raises:
        Unplain: It is a tensor, a module, or an object of torch or Lightning; or far too large.
    """
    found: Any = _OTHER
    for depth in _DEPTHS:
        with suppress(_TooMuch):
            found = _comparable(value, depth, varying)
            break
    else:
        found = _large(value)
    if found is _OTHER:
        raise Unplain
    return found


def _large(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return _Itself(frozenset(value))
    cls: Any = type(value)
    for kind in _kinds_in(cls):
        if (contents := kind.take(value)) is not ABSENT:
            return _Large(kind, contents)
    return _OTHER


def parts_of(value: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    """Yields the values in an object that are compared, with the step to each; none of an object with too many."""
    with suppress(_TooMuch):
        yield from _parts(value)


def _parts(value: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    cls: Any = type(value)
    for kind in (CLASS,) if isinstance(value, type) and is_users(value) else _kinds_in(cls):
        contents = (kind.peek or kind.take)(value)
        if contents is ABSENT:
            raise _TooMuch
        yield from (((kind.name, key), item) for key, item in kind.entries(contents))


def _comparable(value: Any, max_depth: int, varying: Collection[Steps]) -> Any:
    left = [_MAX_ENTRIES]

    def taken(value: Any, depth: int, steps: Steps) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise _TooMuch
        if varying and steps in varying:
            return _OTHER if steps else None
        cls: Any = type(value)
        if cls in _PLAIN_TYPES or isinstance(value, _PLAIN):
            return value if value == value else "nan"
        if isinstance(value, SYMBOLIC_TYPES):
            return _SYMBOL if depth else _OTHER
        if isinstance(value, (np.ndarray, np.generic)):
            return _of_array(np.asarray(value))
        if isinstance(value, (bytearray, array.array)):
            return cls, bytes(value)
        if isinstance(value, weakref.ref):
            return cls, taken(value(), depth + 1, ())
        if isinstance(value, FunctionType) and not is_own_code(value.__module__ or ""):
            return value.__code__
        if isinstance(value, (Tensor, nn.Module)) or depth >= max_depth:
            return _OTHER
        if isinstance(value, _SIZED) and len(value) > _MAX_ENTRIES:
            return _large(value)
        if isinstance(value, (set, frozenset)):
            return cls, frozenset(taken(member, depth + 1, ()) for member in value)
        if isinstance(value, type) and not is_users(value):
            return value
        if not isinstance(value, type) and not _kinds_in(cls):
            return _Itself(value) if _stands_for_itself(cls) else _OTHER
        entries = []
        for (name, key), item in _parts(value):
            inside = (*steps, (name, key)) if varying else ()
            entries.append(((name, key if isinstance(key, _PLAIN) else _of_key(key)), taken(item, depth + 1, inside)))
        return Held(_what(value), tuple(entries))

    return taken(value, 0, ())


@lru_cache(maxsize=4096)
def _kinds_in(cls: type) -> tuple[Kind, ...]:
    """How the parts of an object of a class are taken; none where it has no parts that count."""
    if issubclass(cls, (Tensor, nn.Module, type)):
        return ()
    if issubclass(cls, ContextVar):
        return (CONTEXT,)
    of_class: Any = cls
    found = kinds_of_class(of_class)
    is_settings = str(cls.__module__).partition(".")[0] not in NO_SETTINGS
    if not found and is_settings and cls.__dictoffset__ and not is_unchanging(cls):
        return (ATTRIBUTES,)
    return tuple(kind for kind in found if kind.name in _COMPARED and (is_settings or kind.name not in _OBJECTS))


@lru_cache(maxsize=4096)
def _stands_for_itself(cls: type) -> bool:
    """True for what cannot change: it is another object then, which tells whether it is equal."""
    is_torchs = str(cls.__module__).partition(".")[0] in NO_SETTINGS - {"builtins"}
    is_value = cls.__hash__ is not None and any("__eq__" in vars(base) for base in cls.__mro__[:-1])
    return is_unchanging(cls) or (is_value and not is_torchs)


def _of_key(key: Any) -> Any:
    """An object without a value is the same key as long as it is the same object; its words may be long."""
    hash_of: Any = type(key).__hash__
    return id(key) if hash_of in (object.__hash__, Tensor.__hash__, nn.Module.__hash__) else str(key)


def _what(value: Any) -> Any:
    if isinstance(value, FunctionType):
        return value.__code__
    return value if isinstance(value, type) else type(value)


def _of_array(value: np.ndarray) -> Any:
    if value.dtype.hasobject or value.nbytes > MAX_ARRAY_BYTES:
        return _OTHER
    return value.dtype.str, value.shape, value.tobytes()
