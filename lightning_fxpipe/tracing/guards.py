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
from types import FrameType, MappingProxyType, MethodType
from typing import Any, Protocol

from torch import nn

from lightning_fxpipe._compat.lightning import trainer_value, watched_trainer
from lightning_fxpipe._compat.torch import patched_attributes, registries
from lightning_fxpipe.metrics.metric_calls import METRICS
from lightning_fxpipe.tracing.comparable import NO_SETTINGS, Steps, Unplain, comparable
from lightning_fxpipe.user_code.code_names import is_own_code
from lightning_fxpipe.user_code.frames import is_framework


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
        """Returns the present value."""


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
# By guard, steps to numbers that are inputs of a graph.
Varying = Mapping[GuardKey, Collection[Steps]]
NOTHING_VARIES: Varying = MappingProxyType({})

# Attributes that each module has from torch.
TORCHS_OWN = frozenset({*vars(nn.Module()), "training", "T_destination", "dump_patches", "call_super_init"})
_LOOKS_INTO_ALL = (nn.Module.__module__, "lightning_fxpipe.")
# Where the numbers lie that a module is called with (``tracing.number_arguments``).
NUMBER_ARGUMENTS = "_fxpipe_number_arguments"
# Values of an attribute that a module does not have, and of one that is a tensor now: code may set None.
_ABSENT = ("no such attribute",)
_NOT_PLAIN = ("no plain value",)


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
                found = comparable(value)
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
        if is_nested or name in TORCHS_OWN or not is_recording():
            return object.__getattribute__(module, name)
        path = paths.get(id(module))
        if name.startswith("__"):
            if name == "__dict__" and path is not None and not is_framework(str(sys._getframe(1).f_globals.get("__name__"))):
                note((path, name), _of_all(path, vars(module)))
            return object.__getattribute__(module, name)
        is_nested = not _is_own_property((type(module), name))  # what a property of a library's reads is not the user's
        try:
            value = object.__getattribute__(module, name)
        except AttributeError:
            home = str(sys._getframe(1).f_globals.get("__name__")).split(".")[0]
            if path is not None and home not in NO_SETTINGS and not any(name in registry for registry in registries(module)):
                note((path, name), _ABSENT)  # as `hasattr` finds it
            raise
        finally:
            is_nested = False
        if isinstance(value, MethodType) and name not in vars(module):
            return value  # a method of its class
        if path is not None:
            all_attributes.add((path, name))
            return noted((path, name), value)
        if not isinstance(module, METRICS):
            note(AttributeOfOther(module, name), value)
        return value

    def read_counter(name: str, value: Any) -> Any:
        return value if is_nested or not is_recording() else noted((None, name), value)

    def read_from_trainer(name: str, value: Any, reader: FrameType) -> Any:
        if is_nested or not is_recording() or is_framework(str(reader.f_globals.get("__name__"))):
            return value
        value = instead.get((None, name), value)
        note((None, name), trainer_value(name, value))
        return value

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
    with watched_trainer(root, read_counter, read_from_trainer), patched_attributes(*patches):
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
            found[key] = comparable(value_of(root, key), varying.get(key, ()))
        except Unplain:
            found[key] = _NOT_PLAIN
    return found


def value_of(root: nn.Module, key: GuardKey) -> Any:
    """Returns what a guard names now; None where there is nothing."""
    if not isinstance(key, tuple):
        return key.value(root)
    path, name = key
    if path is None:
        found = getattr(root.trainer, name, _ABSENT)
        return found if found is _ABSENT else trainer_value(name, found)
    owner = root.get_submodule(path)
    return _of_all(path, vars(owner)) if name == "__dict__" else getattr(owner, name, _ABSENT)


def _of_all(path: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """All attributes of a module, as code finds them in its ``__dict__``, but for torch's and Lightning's own.

    A forward that was set there is compared by ``tracing.structure_guards``.
    """
    own = TORCHS_OWN | {"forward"}
    return {name: value for name, value in attributes.items() if name not in own and (path or not name.startswith("_"))}


def failed_guards(root: nn.Module, guards: Mapping[GuardKey, Any], varying: Varying = NOTHING_VARIES) -> list[GuardKey]:
    """Returns those that have another value now, but for what is ``varying``."""
    now = guarded_values(root, guards, varying)
    return [key for key, value in guards.items() if now[key] != value]


def name_of_guard(key: GuardKey) -> str:
    """Returns the expression that reads a guarded value."""
    if not isinstance(key, tuple):
        return str(key)
    path, name = key
    if name == NUMBER_ARGUMENTS:
        return f"the arguments of {path or 'the module'}"
    return f"trainer.{name}" if path is None else f"{path}.{name}".lstrip(".")
