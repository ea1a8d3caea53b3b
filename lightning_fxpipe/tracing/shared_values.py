"""Finds numbers that modules leave for each other in an object that both know.

Blocks may count in a dict that all of them have, one leaves a norm in a global list that another one reads, or the step; or the
code around them says there which of them comes next. In another stage the object is another one, and stays what it is there. So
where numbers change while whole modules are recorded that know the object, it is looked who else does:

1. What has changed is given to a second recording, which shows who changes what. What is set once and for all, such as a flag
   that says that somebody was warned, has its value then.
2. Where a module changes a number that is another one's attribute, the model is refused.
3. Else a third recording shows each whole module, and the code that is recorded, what it would find if nobody else changed it.
   A model is refused whose torch calls, results or logged values are others then; lists that only grow and counters that nobody
   reads are not.

Tensors are not looked at here, see ``tracing.state_reads``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from lightning_fxpipe._compat.torch import SYMBOLIC_TYPES, modules_inside, tree_leaves
from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.tracing.first_call import place_value
from lightning_fxpipe.tracing.guards import GuardKey, name_of_guard
from lightning_fxpipe.tracing.recorder_settings import RecorderSettings
from lightning_fxpipe.tracing.signals import Lesson
from lightning_fxpipe.tracing.torch_calls import is_query
from lightning_fxpipe.user_code.code_contents import CLASS, Globals
from lightning_fxpipe.user_code.contents import Kind
from lightning_fxpipe.user_code.kinds import is_users, kinds_of
from lightning_fxpipe.user_code.paths import CONTENTS, Difference, Path, at_path
from lightning_fxpipe.user_code.snapshot import Snapshot, roots_of

_AROUND = "the code around them"
_NEW = "new"  # last step of a place in a list that has grown
_SOME_NUMBER = 3
_NUMBERS = (bool, int, float, complex, np.generic, *SYMBOLIC_TYPES)


class SharedValues:
    """Which numbers whole modules change outside of themselves, in one recording.

    Args:
        settings: What the recorder knows.
        lessons: Gets what else is to be known.

    Attributes:
        is_watching: Whether it matters what each module does, so that each has to run.
    """

    def __init__(self, settings: RecorderSettings, lessons: list[Lesson]) -> None:
        self._learned, self._modules, self._before = settings.learned, settings.modules, settings.before
        self._lessons = lessons
        self._ran: dict[str, nn.Module] = {}  # whole modules
        self._writers: dict[Path, set[str]] = {}  # their paths, by what they have changed
        self._calls: list[str] = []  # torch calls in them
        self._inside: str | None = None  # the one that runs
        self._for_a_while: dict[Path, Difference] = {}  # changed in runs on made-up data, which leave nothing behind
        self._given_floats: dict[Path, tuple[float, Any]] = {}  # with what was there
        self.is_watching = bool(self._learned.values_changed)
        self._alone: _Alone | None = None
        if self.is_watching:
            roots = roots_of(self._modules[""])[0]
            for place in self._learned.values_changed:
                with suppress(KeyError, IndexError, AttributeError):  # an object that another call has made
                    value = _without_symbols(place.value)
                    if isinstance(value, float):  # an object of its own: code that sets the same again sets another one
                        value = float.fromhex(value.hex())
                        self._given_floats[place.path] = value, at_path(roots, place.path)
                    place_value(roots, replace(place, value=value))
            if self._learned.calls_together is not None:
                self._alone = _Alone(roots, [each.path for each in self._learned.values_changed])

    @contextmanager
    def of(self, path: str, module: nn.Module) -> Iterator[None]:
        """The block runs a whole module, at this path."""
        self._ran[path] = module
        if not self.is_watching:
            yield
            return
        with self._alone.running(path) if self._alone is not None else nullcontext():
            before = self._changed()
            self._inside, self._for_a_while = path, {}
            yield
            self._inside = None
            for place, now in self._changed().items():
                if place not in before or not is_same_value(before[place].value, now.value):
                    self._writers.setdefault(place, set()).add(path)

    def noting(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls what leaves nothing behind; what it changes in between counts."""
        result = call(*args, **kwargs)
        self._for_a_while |= self._changed()
        return result

    def note(self, func: Any, arguments: tuple[Any, ...]) -> None:
        """A torch call is made, inside a whole module or by the code that is recorded."""
        if self.is_watching and not is_query(func):
            self._calls.append(f"{self._inside}: {getattr(func, '__qualname__', type(func).__name__)} {_plain(arguments)}")

    def note_given(self, value: Any) -> None:
        """Code that is recorded returns or logs a value."""
        if self.is_watching:
            self._calls.append(f"gives {_plain(value)}")

    def check(
        self, read: Collection[GuardKey], opened: Iterable[str], function: Any, label: str, *, is_forward: bool = False
    ) -> None:
        """Refuses modules that leave numbers for each other, or for recorded code. Where more must be seen, a lesson says so.

        Args:
            read: The attributes of modules that recorded code has read.
            opened: Paths of the modules whose code is recorded.
            function: What is recorded.
            label: Its name.
            is_forward: Whether it is a module's forward, which no stage runs; a step's own code runs.

        Raises:
            FxPipeError: They do.
        """
        changed = self._changed() | self._given()
        if self._learned.values_are_settled or not (self.is_watching or changed):
            return
        known = _Known(self._modules, self._ran, read, opened, function)
        if not self.is_watching:
            shared = tuple(each for place, each in changed.items() if known.is_shared(place))
            if shared:
                self._lessons.append(partial(self._learned.watch_values, shared))
            return
        if is_forward:
            self._note_set_again(roots_of(self._modules[""])[0])
        watched = {place_of(each) for each in self._learned.values_changed}
        # What code sets on modules is read from them, and seen so.
        places = {*self._writers, *(place for place in watched if not known.is_attribute(place))}
        written = [place for place in sorted(places, key=str) if known.is_shared(place)]
        together, calls = self._learned.calls_together, tuple(self._calls)
        for place in written:
            if known.is_attribute(place) or together not in (None, calls):
                raise self._refusal(place, known, label)
        if written and together is None:
            self._lessons.append(partial(self._learned.compare_calls, calls))
        else:
            self._lessons.append(self._learned.settle_values)

    def _note_set_again(self, roots: Mapping[str, Any]) -> None:
        """Numbers that were given, and that code has set to the same again, have a writer, and are given no more."""
        before: dict[Path, Any] = {}
        for place, (given, original) in self._given_floats.items():
            with suppress(KeyError, IndexError, AttributeError):
                if at_path(roots, place) is not given:
                    self._writers.setdefault(place, {_AROUND})
                    before[place] = original
        changed = (replace(each, value=before.get(each.path, each.value)) for each in self._learned.values_changed)
        self._learned.values_changed = tuple(changed)

    def _refusal(self, place: Path, known: _Known, label: str) -> FxPipeError:
        writers = self._writers.get(place, {_AROUND})
        return FxPipeError(
            f"Modules exchange a number through a shared object: {written_place(place)}.",
            where=label,
            observed=f"changed by {_listed(writers)}; accessible to {_listed(known.by(place) - writers or writers)}",
            expected="arguments and results: another stage has a separate copy of the object, which does not change",
            todo="Return the number from the forward that computes it, and pass it to the other modules as an argument.",
        )

    def _given(self) -> dict[Path, Difference]:
        """Numbers that the model was given, as what recorded code sets once: it may set others before."""
        roots, found = roots_of(self._modules[""])[0] if self._learned.given else {}, {}
        for path in self._learned.given:
            with suppress(KeyError, IndexError, AttributeError):
                value = at_path(roots, path)
                if _has_number(value) and not isinstance(path[-1][1], tuple):
                    found[path] = Difference(path, None, value)
        return found

    def _changed(self) -> dict[Path, Difference]:
        """Where there is another number than when the recording began."""
        found = dict(self._for_a_while)
        for each in self._before.differences() if self._before is not None else ():
            if each.path[0] == "self" and not isinstance(each.path[-1][1], tuple) and _has_number(each.value):
                found[place_of(each)] = each
        return found


class _Alone:
    """Shows each whole module, and the code around them, what it would find in some objects if nobody else changed them.

    Args:
        roots: Where paths begin.
        paths: Places in the objects.
    """

    def __init__(self, roots: Mapping[str, Any], paths: Iterable[Path]) -> None:
        owners = {id(owner): owner for path in paths for owner in _objects(roots, path)}
        self._kinds = [(owner, kind) for owner in owners.values() for kind in _kinds(owner)]
        self._start: list[Any] | None = None  # when the first of them runs: every rank does what comes before
        self._left: dict[str, list[Any]] = {}

    def _contents(self) -> list[Any]:
        return [kind.take(owner) for owner, kind in self._kinds]

    @contextmanager
    def running(self, path: str) -> Iterator[None]:
        """The block runs a module, which finds what it has left itself, or what was there at the start."""
        around = self._contents()
        self._start = self._start or around
        self._put(self._left.get(path, self._start))
        try:
            yield
        finally:
            self._left[path] = self._contents()
            self._put(around)

    def _put(self, contents: list[Any]) -> None:
        for (owner, kind), own in zip(self._kinds, contents, strict=True):
            kind.put(owner, own)


class _Known:
    """Which code knows what, in a recording; arguments as those of :meth:`SharedValues.check`."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        ran: Mapping[str, nn.Module],
        read: Collection[GuardKey],
        opened: Iterable[str],
        function: Any,
    ) -> None:
        self._roots = roots_of(modules[""])[0]
        self._ran = ran
        self._whole = {path: reached_from(module) for path, module in ran.items()}
        kinds = {str(base): base for path in opened for base in type(modules[path]).__mro__ if is_users(base)}
        self._others = {_AROUND: Snapshot({**kinds, "function": function}, enters_modules=False)}
        for key in read:
            if isinstance(key, tuple) and key[0] in modules:
                value = vars(modules[str(key[0])]).get(key[1])
                self._others[name_of_guard(key)] = Snapshot({"value": value}, enters_modules=False)

    def by(self, place: Path) -> set[str]:
        """Who knows the object that has a place: whole modules, and what code that is recorded has read."""
        owner = self._owner(place)
        if owner is None:
            return set()
        if isinstance(owner, nn.Module):  # what it changes on itself is a matter of attributes
            strangers = {path for path, module in self._ran.items() if owner not in modules_inside(module).values()}
            return {path for path in strangers if self._whole[path].has_reached(owner)}
        everybody = {**self._whole, **self._others}
        return {name for name, reached in everybody.items() if reaches(reached, owner, str(place[-1][1]))}

    def is_attribute(self, place: Path) -> bool:
        """Whether a place is an attribute of a module."""
        return isinstance(self._owner(place), nn.Module)

    def _owner(self, place: Path) -> Any:
        with suppress(KeyError, IndexError, AttributeError):  # it is gone
            return at_path(self._roots, place[:-1])

    def is_shared(self, place: Path) -> bool:
        """Whether a whole module knows a place that is not its own alone."""
        known = self.by(place)
        return bool(known & self._whole.keys()) and (self.is_attribute(place) or len(known) > 1)


def reached_from(module: nn.Module, arguments: Any = None) -> Snapshot:
    """What a module's code knows: attributes of other modules, too, as where a hook has the LightningModule."""
    inside = {**modules_inside(module), "arguments": arguments}
    found = Snapshot(inside, enters_modules=False)
    others = {f"other {number}": each for number, each in enumerate(found.modules_met)}
    return Snapshot({**inside, **others}, enters_modules=False) if others else found


def reaches(snapshot: Snapshot, owner: Any, name: str) -> bool:
    """True if code from which ``snapshot`` was taken knows an object; of global variables, the one with this name."""
    if isinstance(owner, Globals):
        found = (record.owner for record in snapshot.records() if isinstance(record.owner, Globals))
        return any(each.values is owner.values and name in each.names for each in found)
    return snapshot.has_reached(owner)


def _objects(roots: Mapping[str, Any], place: Path) -> Iterator[Any]:
    """The object that has a place, or the variable that is one, and what is there; modules are read and seen so."""
    for path in (place[:-1], place):
        with suppress(KeyError, IndexError, AttributeError):
            found = at_path(roots, path)
            if isinstance(found, Globals):
                yield replace(found, names=frozenset([str(place[-1][1])]))
            elif not isinstance(found, nn.Module):
                yield found


def place_of(difference: Difference) -> Path:
    """Returns where something has changed; of a list that has grown, with its former length."""
    return difference.path if difference.start is None else (*difference.path, (_NEW, difference.start))


def _plain(value: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, (*_NUMBERS, str))]


def _kinds(owner: Any) -> tuple[Kind, ...]:
    return (CLASS,) if isinstance(owner, type) else kinds_of(owner)


def written_place(place: Path) -> str:
    """A place as code would write it."""
    name = str(place[0])
    for kind, key in place[1:]:
        if kind == "globals":
            name = str(key)
        elif kind == "mro":
            name = f"type({name})"
        elif kind in ("attribute", "slot", "global", "class", "function"):
            name = f"{name}.{key if isinstance(key, str) else key[-1]}"
        elif kind not in ("code", CONTENTS, _NEW):
            name = f"{name}[{key!r}]"
    return name


def _without_symbols(value: Any) -> Any:
    """A value, with some number in the place of each that belongs to a recording."""
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(_without_symbols, value))
    if type(value) is dict:
        return {key: _without_symbols(entry) for key, entry in value.items()}
    return _SOME_NUMBER if isinstance(value, SYMBOLIC_TYPES) else value


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names))


def _has_number(value: Any) -> bool:
    """Whether a value is a number, or such as has any in it."""
    if isinstance(value, (list, tuple, set, dict)):
        return any(map(_has_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (_NUMBERS, np.ndarray))


def is_same_value(one: Any, other: Any) -> bool:
    """True for the same object, equal numbers, and lists of such."""
    if one is other:
        return True
    if isinstance(one, list) and isinstance(other, list):  # new entries
        return len(one) == len(other) and all(map(is_same_value, one, other))
    is_plain = all(isinstance(value, (bool, int, float, complex)) for value in (one, other))
    return is_plain and one == other
