"""Guards: plain values that the recorded Python reads from modules: ``self.temperature``, ``self.config.scale``.

In a graph they are constants. So a trace remembers which it has read and with what value, and is used only while they are the
same; otherwise a callback that anneals a temperature would anneal nothing. Modules that stay whole read theirs anew each time.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MappingProxyType
from typing import Any, Protocol

import numpy as np
from torch import nn

from lightning_fxpipe._compat.lightning import watched_trainer_counters
from lightning_fxpipe._compat.torch import patched_attributes, registries
from lightning_fxpipe.metrics.metric_calls import METRICS
from lightning_fxpipe.user_code.code_contents import contents_of_function
from lightning_fxpipe.user_code.code_names import is_own_code


class AttributeWatch(Protocol):
    """Sees all uses of modules' attributes."""

    def note_read(self, module: nn.Module, name: str) -> None:
        """Code reads an attribute."""

    def note_write(self, module: nn.Module, name: str) -> None:
        """Code sets an attribute."""


class StepWatch(Protocol):
    """Sees what the step's own code sets."""

    read_after_set: set[GuardKey]

    def has_set_by_now(self) -> bool:
        """True where that code runs, and has set something since the region began."""

    def note_write(self) -> None:
        """Recorded code is about to set an attribute of a module."""

    def is_for_another(self, path: str) -> bool:
        """True where the forward of a module is recorded, and not that of the module at this path."""


class OtherKey(Protocol):
    """Something that is no attribute of a module."""

    def value(self, root: nn.Module) -> Any:
        """What it is now."""


@dataclass(frozen=True)
class AttributeOfOther:
    """A plain attribute of a module that is none of the root's: it lies in a list, or in an object that is no module."""

    module: nn.Module
    name: str

    def value(self, root: nn.Module) -> Any:
        """Returns its present value."""
        return getattr(self.module, self.name, _ABSENT)

    def __str__(self) -> str:
        return f"{type(self.module).__name__}.{self.name}"


# (path of the module, name of the attribute); the Trainer's counters have None as path.
GuardKey = tuple[str | None, str] | OtherKey
# Steps from what a guard names to something inside: entries of containers and attributes of objects.
Steps = tuple[tuple[str, Any], ...]
ITEM, ATTRIBUTE = "item", "attribute"
# By guard, steps to numbers that are inputs of a graph.
Varying = Mapping[GuardKey, Collection[Steps]]
NOTHING_VARIES: Varying = MappingProxyType({})

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Attributes that each module has from torch.
TORCHS_OWN = frozenset({*vars(nn.Module()), "training", "T_destination", "dump_patches", "call_super_init"})
_NO_SETTINGS = ("torch", "lightning", "builtins", "lightning_fxpipe", "pytorch_lightning", "logging")
_LOOKS_INTO_ALL = (nn.Module.__module__, "lightning_fxpipe.")
_DEPTHS = (6, 3, 1)
_MAX_ENTRIES = 256
_MAX_ARRAY_BYTES = 2**20
# Where the numbers lie that a module is called with (``tracing.number_arguments``).
NUMBER_ARGUMENTS = "_fxpipe_number_arguments"
# Values of an attribute that a module does not have, and of one that is a tensor now: code may set None.
_ABSENT = ("no such attribute",)
_NOT_PLAIN = ("no plain value",)


class Unplain(Exception):
    """A value is nothing that can be compared."""


@contextmanager
def noted_guards(
    root: nn.Module,
    is_recording: Callable[[], bool],
    names_read: set[str] | None = None,
    attributes_read: set[GuardKey] | None = None,
    watch: AttributeWatch | None = None,
    instead: Mapping[GuardKey, Any] = MappingProxyType({}),
    between: StepWatch | None = None,
) -> Iterator[dict[GuardKey, Any]]:
    """Yields a mapping that fills with the plain values that code reads from modules while ``is_recording()``.

    Args:
        root: The module.
        is_recording: Whether what is read now is noted.
        names_read: Gets the names of all attributes that are read, whether that is noted or not.
        attributes_read: Gets what is noted, and attributes that are not plain.
        watch: Sees all reads and writes.
        instead: What reads return in place of the values that guards name.
        between: Knows what the step's own code has set since the region began; what it reads then is no guard.
    """
    all_names: set[str] = set() if names_read is None else names_read
    all_attributes: set[GuardKey] = set() if attributes_read is None else attributes_read
    # Metrics are read by whoever asks for their hash, such as `named_modules`; what they have counted is no setting.
    modules = [(path, module) for path, module in root.named_modules() if not isinstance(module, METRICS)]
    paths = {id(module): path for path, module in reversed(modules)}
    guards: dict[GuardKey, Any] = {}
    read_after_set = set[GuardKey]() if between is None else between.read_after_set
    is_nested = False

    def note(key: GuardKey, value: Any) -> None:
        if key not in guards and key not in read_after_set:  # what it was when it was read first
            with suppress(Unplain):
                found = snapshot(value)
                if between is not None and between.has_set_by_now():
                    read_after_set.add(key)
                else:
                    guards[key] = found

    def noted(key: GuardKey, value: Any) -> Any:
        """Returns what code gets for a value that it reads."""
        value = instead.get(key, value)
        note(key, value)
        return value

    def read(module: nn.Module, name: str) -> Any:
        nonlocal is_nested
        # torch's own code looks there for each parameter, and so do we.
        if name != "__dict__" or not str(sys._getframe(1).f_globals.get("__name__")).startswith(_LOOKS_INTO_ALL):
            all_names.add(name)
            if watch is not None:
                watch.note_read(module, name)
        if is_nested or name in TORCHS_OWN or name.startswith("__") or not is_recording():
            return object.__getattribute__(module, name)
        path = paths.get(id(module))
        is_nested = not _is_own_property((type(module), name))  # what a property of a library's reads is not the user's
        try:
            value = object.__getattribute__(module, name)
        except AttributeError:
            home = str(sys._getframe(1).f_globals.get("__name__")).split(".")[0]
            if path is not None and home not in _NO_SETTINGS and not any(name in registry for registry in registries(module)):
                note((path, name), _ABSENT)  # as `hasattr` finds it
            raise
        finally:
            is_nested = False
        if path is not None:
            all_attributes.add((path, name))
            return noted((path, name), value)
        if not isinstance(module, METRICS):
            note(AttributeOfOther(module, name), value)
        return value

    def read_counter(name: str, value: Any) -> Any:
        return value if is_nested or not is_recording() else noted((None, name), value)

    set_attribute = nn.Module.__setattr__

    def write(module: nn.Module, name: str, value: Any) -> None:
        if watch is not None:
            watch.note_write(module, name)
        path = paths.get(id(module))
        if between is not None and path is not None and is_recording():
            between.note_write()
            if name in vars(module) and between.is_for_another(path):
                note((path, name), vars(module)[name])  # it is not set again in a stage
        set_attribute(module, name, value)

    patches = (nn.Module, "__getattribute__", read), (nn.Module, "__setattr__", write)
    with watched_trainer_counters(root, read_counter), patched_attributes(*patches):
        yield guards


@lru_cache(maxsize=4096)
def _is_own_property(place: tuple[type, str]) -> bool:
    """True for a property, by class and name, whose code is the user's."""
    cls, name = place
    found = inspect.getattr_static(cls, name, None)
    return isinstance(found, property) and is_own_code(getattr(found.fget, "__module__", ""))


def guarded_values(root: nn.Module, keys: Iterable[GuardKey], varying: Varying = NOTHING_VARIES) -> dict[GuardKey, Any]:
    """Returns what guards name now.

    Args:
        root: The module.
        keys: The guards.
        varying: What of it does not count.
    """
    found: dict[GuardKey, Any] = {}
    for key in keys:
        try:
            found[key] = snapshot(value_of(root, key), varying.get(key, ()))
        except Unplain:
            found[key] = _NOT_PLAIN
    return found


def value_of(root: nn.Module, key: GuardKey) -> Any:
    """Returns what a guard names now; None where there is nothing."""
    if not isinstance(key, tuple):
        return key.value(root)
    path, name = key
    owner: Any = root.trainer if path is None else root.get_submodule(path)
    return getattr(owner, name, _ABSENT)


def failed_guards(root: nn.Module, guards: Mapping[GuardKey, Any], varying: Varying = NOTHING_VARIES) -> list[GuardKey]:
    """Returns those that have another value now, but for what is ``varying``."""
    now = guarded_values(root, guards, varying)
    return [key for key, value in guards.items() if now[key] != value]


def name_of_guard(key: GuardKey) -> str:
    """As code would write it."""
    if not isinstance(key, tuple):
        return str(key)
    path, name = key
    if name == NUMBER_ARGUMENTS:
        return f"the arguments of {path or 'the module'}"
    return f"trainer.{name}" if path is None else f"{path}.{name}".lstrip(".")


def snapshot(value: Any, varying: Collection[Steps] = ()) -> Any:
    """A value that can be compared and hashed: of containers and plain objects, what is in them, as deep as it is not too much.

    Args:
        value: The value.
        varying: Steps to what stands as None in it.

    Raises:
        Unplain: It is none, or too large.
    """
    for depth in _DEPTHS[:-1]:
        with suppress(Unplain):
            return _snapshot(value, depth, varying)
    return _snapshot(value, _DEPTHS[-1], varying)


def _snapshot(value: Any, max_depth: int, varying: Collection[Steps]) -> Any:
    left = [_MAX_ENTRIES]

    def taken(value: Any, depth: int, steps: Steps = ()) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise Unplain
        if varying and steps in varying:
            return None
        if isinstance(value, _PLAIN):
            return value if value == value else "nan"
        if isinstance(value, (np.ndarray, np.generic)):
            return _of_array(np.asarray(value))
        if depth == max_depth:
            return None
        if isinstance(value, (list, tuple)):
            return tuple(taken(item, depth + 1, (*steps, (ITEM, index))) for index, item in enumerate(value))
        if isinstance(value, dict):
            return entries(value, depth, steps, ITEM)
        if isinstance(value, FunctionType):
            held = contents_of_function(value) if is_own_code(value.__module__ or "") else {}
            return value.__code__, entries(held, depth + 1, steps, ATTRIBUTE)
        if isinstance(value, BuiltinFunctionType):
            return value
        # What modules hold is read from them, and compared by itself.
        is_open = _is_settings(value) and not isinstance(value, nn.Module)
        return entries(vars(value), depth + 1, steps, ATTRIBUTE) if is_open else None

    def entries(values: Mapping[Any, Any], depth: int, steps: Steps, kind: str) -> Any:
        return tuple((str(key), taken(item, depth + 1, (*steps, (kind, key)))) for key, item in values.items())

    if isinstance(value, (*_PLAIN, list, tuple, dict, np.ndarray, np.generic, FunctionType, BuiltinFunctionType)):
        return taken(value, 0)
    if _is_settings(value):
        return entries(vars(value), 0, (), ATTRIBUTE)
    raise Unplain


def _of_array(value: np.ndarray) -> Any:
    if value.dtype.hasobject or value.nbytes > _MAX_ARRAY_BYTES:
        raise Unplain
    return value.dtype.str, value.shape, value.tobytes()


def _is_settings(value: Any) -> bool:
    """Whether an object is one that holds settings: of a user's or library's own class, with attributes."""
    home = type(value).__module__.split(".")[0]
    return hasattr(value, "__dict__") and home not in _NO_SETTINGS
