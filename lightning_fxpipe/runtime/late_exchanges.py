"""Notices values that a module leaves for those of other ranks only after the region was recorded.

    if self.num_calls > 1000:
        self.config.is_warm = True      # which a module of another stage reads

What modules exchange while they are recorded is found there (``tracing.shared_state``). What they may begin to exchange later
is looked for in their code: attributes and variables that it assigns and code of other ranks reads, in objects that both reach;
and shared containers, if it changes any. These few places, most often none, are compared around each run of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_fxpipe._compat.torch import modules_inside, version_of
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.tracing.reachable import has_own_code, is_plain_value, is_same_value, reaches, written_place
from lightning_fxpipe.tracing.trace import TracedRegion
from lightning_fxpipe.user_code.bytecode import assigned_names, changes_containers, names_used
from lightning_fxpipe.user_code.code_contents import Globals, functions_of
from lightning_fxpipe.user_code.code_names import is_own_code
from lightning_fxpipe.user_code.contents import ABSENT, ATTRIBUTES, Kind, changed_keys
from lightning_fxpipe.user_code.kinds import is_users
from lightning_fxpipe.user_code.paths import Path
from lightning_fxpipe.user_code.snapshot import Snapshot
from lightning_fxpipe.user_code.step import StepKind
from lightning_fxpipe.user_code.step_code import code_of, codes_called

_T = TypeVar("_T")
_BY_NAME = ("attribute", "slot", "class", "global", "function")  # kinds of contents whose keys are names in code


@dataclass(frozen=True)
class _Watched:
    """An object that modules of this rank may change and others read.

    Attributes:
        owner, kind: The object, and how its contents are taken.
        path: Where it is.
        names: Those of its entries that others read; None for all.
    """

    owner: Any
    kind: Kind
    path: Path
    names: frozenset[str] | None

    def take(self) -> Any:
        """Returns its contents."""
        return self.kind.take(self.owner)

    def changed(self, before: Any) -> Iterator[_Change]:
        """Yields what is in the object and was not there before."""
        now = self.take()
        if before is ABSENT or now is ABSENT or is_same_value(now, before):
            return
        if not isinstance(now, dict):
            yield _Change(self.path, now, had_other=True)
            return
        for key in changed_keys(before, now):
            value, other = now.get(key, ABSENT), before.get(key, ABSENT)
            if (self.names is None or key in self.names) and not is_same_value(other, value):
                yield _Change((*self.path, (self.kind.name, key)), value, had_other=other is not ABSENT)


@dataclass(frozen=True)
class _Change:
    """A value that a run of a stage has left.

    Attributes:
        place, value: Where, and what.
        had_other: Whether another one was there.
    """

    place: Path
    value: Any
    had_other: bool


class ChangedPlaces:
    """Places in user state that have changed while code was recorded: a cache that is filled in one step is known in all.

    Attributes:
        live: Those in which anything may be.
        settled: Those in which a second run leaves what the first has left, and that; others read it.
    """

    def __init__(self) -> None:
        self.live: set[Path] = set()
        self.settled: dict[Path, Any] = {}

    def add(self, traced: TracedRegion) -> None:
        """Adds the places of a recording."""
        self.live |= traced.recording.learned.changed
        self.settled |= traced.recording.learned.settled

    def has(self, change: _Change, container: Path | None) -> bool:
        """True for a change that a recording has found and tried.

        Args:
            change: The change.
            container: The list or dict that has changed, which may be a cache with another entry now; None for attributes.
        """
        if change.place in self.settled:
            return is_same_value(self.settled[change.place], change.value)
        if change.place in self.live or container is None:
            return change.place in self.live
        is_new = not change.had_other or change.place == container
        return _is_in(container, self.live) or (is_new and _is_in(container, self.settled))


def _is_in(container: Path, places: Iterable[Path]) -> bool:
    return any(place[:-1] == container for place in places)


class LateExchanges:
    """Watches the places where this rank's stages may begin to leave values for those of other ranks.

    Numbers and the like are compared with what has changed in recordings. Of tensors, those that a stage's first run changes in
    place, or exchanges, were seen there.

    Args:
        root: The LightningModule.
        own: Paths of the modules that this rank's stages call as a whole.
        changed: Places that have changed in a recording, which is no late change; more may come.
    """

    def __init__(self, root: nn.Module, own: Collection[str], changed: ChangedPlaces) -> None:
        self._watched: list[_Watched] = []
        self._tensors: list[tuple[Tensor, str]] = []
        self._changed = changed
        self._ran: set[int] = set()  # stages
        self._changed_first: set[Any] = set()
        called = {path: root.get_submodule(path) for path in own}
        called = {path: module for path, module in called.items() if has_own_code(module)}
        if not called:
            return
        here = {f"{path}.{inside}": each for path, module in called.items() for inside, each in modules_inside(module).items()}
        ids = set(map(id, here.values()))
        there = {path: module for path, module in root.named_modules() if path and id(module) not in ids}
        writers, readers = Snapshot(here, enters_modules=False), Snapshot(there, enters_modules=False)
        step, everything = Snapshot({"self": root}, enters_modules=False), Snapshot({"self": root})
        writing, reading = _codes(here.values(), writers), [*_codes(there.values(), readers), *_step_codes(root)]
        assigned, changes, read = (
            _names(writing, assigned_names),
            any(map(changes_containers, writing)),
            _names(reading, names_used),
        )
        for record, path in everything.records_with_paths():
            if id(record.owner) in ids or record.is_large:
                continue
            kind = ATTRIBUTES if isinstance(record.owner, nn.Module) else record.kind
            names = assigned & read if kind.name in _BY_NAME else None
            is_candidate = changes if names is None else bool(names)
            if is_candidate and _reaches((writers,), record.owner, names) and _reaches((readers, step), record.owner, names):
                self._watched.append(_Watched(record.owner, kind, path, names))
        self._tensors += _shared_tensors(here, there, writers, everything)

    def watching(self, stage: int, run: Callable[[], _T]) -> _T:
        """Runs a stage.

        Raises:
            UnsupportedError: It has left something for others that it had not left when it was recorded.
        """
        before = [each.take() for each in self._watched]
        versions = [version_of(tensor) for tensor, _ in self._tensors]
        result = run()
        is_first = stage not in self._ran
        self._ran.add(stage)
        for each, contents in zip(self._watched, before, strict=True):
            for change in each.changed(contents):
                if self._is_late(change, each, is_first=is_first):
                    raise _exchanged(written_place(change.place), stage)
        for (tensor, name), version in zip(self._tensors, versions, strict=True):
            if version_of(tensor) != version and self._is_new(id(tensor), is_first=is_first):
                raise _exchanged(name, stage)
        return result

    def _is_late(self, change: _Change, watched: _Watched, *, is_first: bool) -> bool:
        if is_plain_value(change.value):
            return not self._changed.has(change, watched.path if watched.names is None else None)
        return self._is_new(change.place, is_first=is_first) and change.had_other  # a cache may have another entry

    def _is_new(self, what: Any, *, is_first: bool) -> bool:
        """True for a change that a first run of a stage has not made."""
        if is_first:
            self._changed_first.add(what)
        return what not in self._changed_first


def _exchanged(place: str, stage: int) -> UnsupportedError:
    return UnsupportedError(
        f"Modules exchange a value through a shared object: {place}.",
        where=f"stage {stage}",
        observed="a module changed it for the first time in this step, and code on other ranks reads it",
        expected="arguments and results: another rank has a separate copy of the object, which does not change",
        todo="Return the value from the forward that computes it, and pass it to the other modules as an argument.",
    )


def _shared_tensors(
    here: Mapping[str, nn.Module], there: Mapping[str, nn.Module], writers: Snapshot, everything: Snapshot
) -> Iterator[tuple[Tensor, str]]:
    """Yields the tensors, except parameters, that modules here and there reach, with names for messages."""
    around = {id(parent) for parent in there.values() if any(inside in here.values() for inside in parent.modules())}
    elsewhere = {path: module for path, module in there.items() if id(module) not in around}
    own = {id(buffer) for module in here.values() for buffer in module.buffers(recurse=False)}
    for path, module in elsewhere.items():
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) in own and not buffer.is_inference():
                yield buffer, f"{path}.{name}"
    tensors = list(everything.tensors_reached_from("self"))
    if tensors:
        readers = Snapshot(elsewhere, enters_modules=False)  # without the modules around those here, whose code is no stage's
        for tensor in tensors:
            if writers.has_reached(tensor) and readers.has_reached(tensor):
                yield tensor, written_place(everything.place_of(tensor) or ("a tensor",))


def _codes(modules: Iterable[nn.Module], reached: Snapshot) -> list[CodeType]:
    """The code of modules' classes, and of functions of the user's own that were reached, but for constructors.

    Configurations of libraries have much code that no module calls.
    """
    kinds = {base for kind in set(map(type, modules)) for base in kind.__mro__ if is_users(base)}
    functions = [function for kind in kinds for function in functions_of(kind) if isinstance(function, FunctionType)]
    others = (record.owner for record in reached.records() if isinstance(record.owner, FunctionType))
    functions += [function for function in others if is_own_code(function.__module__ or "")]
    return [function.__code__ for function in functions if function.__name__ != "__init__"]


def _step_codes(root: nn.Module) -> list[CodeType]:
    """The code of the root's steps and its forward, and of the methods that these call."""
    begins = (code_of(getattr(root, name, None)) for name in ("forward", *(kind.value for kind in StepKind)))
    return [code for begin in begins if begin is not None for code in codes_called(type(root), begin)]


def _names(codes: Iterable[CodeType], names_of_code: Callable[[CodeType], Iterable[str]]) -> frozenset[str]:
    return frozenset(name for code in codes for name in names_of_code(code))


def _reaches(snapshots: Collection[Snapshot], owner: Any, names: frozenset[str] | None) -> bool:
    if isinstance(owner, Globals):
        return any(reaches(snapshot, owner, name) for snapshot in snapshots for name in names or ())
    return any(snapshot.has_reached(owner) for snapshot in snapshots)
