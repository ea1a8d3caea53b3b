"""Notices values that a module leaves for those of other ranks only after the region was recorded.

    if self.num_calls > 1000:
        self.config.is_warm = True      # which a module of another stage reads

What modules exchange while they are recorded is found there (``tracing.shared_state``). What they may begin to exchange later
is looked for in their code: attributes and variables that it assigns and code of other ranks reads, in objects that both reach;
and shared containers, if it changes any. These few places, most often none, are compared around each run of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, TypeVar

from torch import nn

from lightning_fxpipe._compat.torch import modules_inside
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.tracing.reachable import has_own_code, is_plain_value, is_same_value, reaches, written_place
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

    def changed(self, before: Any, known: Collection[Path]) -> Path | None:
        """Returns the place of a plain value that was another one before; None for those that are ``known`` to change."""
        now = self.take()
        if before is ABSENT or now is ABSENT or is_same_value(now, before):
            return None
        if self.names is None and any(place[:-1] == self.path for place in known):  # such as a cache, which has another entry
            return None
        if not isinstance(now, dict):
            return self.path if is_plain_value(now) else None
        keys = (key for key in changed_keys(before, now) if not is_same_value(before.get(key, ABSENT), now.get(key, ABSENT)))
        places = ((*self.path, (self.kind.name, key)) for key in keys if is_plain_value(now.get(key)))
        return next((each for each in places if each not in known and (self.names is None or each[-1][1] in self.names)), None)


class LateExchanges:
    """Watches the places where this rank's stages may begin to leave values for those of other ranks.

    Args:
        root: The LightningModule.
        own: Paths of the modules that this rank's stages call as a whole.
        changed: Places that have changed in a recording, which is no late change; more may come.
    """

    def __init__(self, root: nn.Module, own: Collection[str], changed: Collection[Path]) -> None:
        self._watched: list[_Watched] = []
        self._changed = changed
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

    def watching(self, stage: int, run: Callable[[], _T]) -> _T:
        """Runs a stage.

        Raises:
            UnsupportedError: It has left something for others that it had not left when it was recorded.
        """
        before = [each.take() for each in self._watched]
        result = run()
        for each, contents in zip(self._watched, before, strict=True):
            if (place := each.changed(contents, self._changed)) is not None:
                raise UnsupportedError(
                    f"Modules exchange a value through a shared object: {written_place(place)}.",
                    where=f"stage {stage}",
                    observed="a module changed it for the first time in this step, and code on other ranks reads it",
                    expected="arguments and results: another rank has a separate copy of the object, which does not change",
                    todo="Return the value from the forward that computes it, and pass it to the other modules as an argument.",
                )
        return result


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
