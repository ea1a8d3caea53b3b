"""Gives every rank what modules of the stages leave on themselves, where code that runs on every rank reads it.

    class Block(nn.Module):
        def forward(self, x):
            self.stats["mean"] = x.mean().detach()          # on the rank of the block's stage
            return self.linear(x)

    def on_train_batch_end(self, *args):                     # on every rank
        self.log("mean", self.blocks[0].stats["mean"])

Attributes are compared that a module's code changes and such code names: most often there are none. They are taken when the
first stage of a rank runs, and what differs is sent when the region's call is over. Where samples are computed in several
microbatches, a tensor would be that of the last: such batches are not cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import nn

from lightning_fxpipe._compat.torch import hooks_of
from lightning_fxpipe.distributed.agreement import any_rank, gather_values
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.metrics.metric_calls import METRICS
from lightning_fxpipe.runtime.attributes import Change, change_of, take_over
from lightning_fxpipe.runtime.submodule_values import SubmoduleValues, stands_for_data
from lightning_fxpipe.tracing.guards import TORCHS_OWN
from lightning_fxpipe.tracing.reachable import is_plain_value, names_on_the_way, written_place
from lightning_fxpipe.user_code.changing_code import assigned_by, codes_of_class, may_change_inside
from lightning_fxpipe.user_code.contents import ABSENT
from lightning_fxpipe.user_code.kinds import is_users, kinds_of
from lightning_fxpipe.user_code.paths import Difference, Path
from lightning_fxpipe.user_code.snapshot import Snapshot
from lightning_fxpipe.user_code.step import StepKind
from lightning_fxpipe.user_code.step_code import code_of, codes_called, names_in_hooks, names_in_step


class LeftState:
    """Sends what this rank's stages leave in the running call of the region. Made by every rank of the pipeline.

    Args:
        root: The LightningModule.
        topology: This rank's place.
        readers: Names in the code that every rank runs.
        warn: Tells the user.
    """

    def __init__(self, root: nn.Module, topology: Topology, readers: frozenset[str], warn: Callable[[str], None]) -> None:
        self._root, self._topology, self._warn = root, topology, warn
        places = places_left(root, readers) if topology.num_ranks > 1 else {}
        self._values, self._since_first = (
            SubmoduleValues(root, places, lambda name, value: bool(kinds_of(value))) if places else None for _ in range(2)
        )
        self._is_taken = self._has_first = self._is_cut = False
        self._carried: frozenset[Path] = frozenset()
        self._is_needed: bool | None = None
        self._unsent: set[str] = set()
        self._hooks: Snapshot | None = None  # what forward hooks reach, until the first call is over

    def begin_stage(self, *, is_cut: bool, carried: frozenset[Path]) -> None:
        """A stage is about to run.

        Args:
            is_cut: Whether on one of several microbatches.
            carried: Places of tensors that are results of the region: the last stage's rank has those of the whole batch.
        """
        if self._is_needed is None and self._hooks is None:
            self._hooks = Snapshot(_reached_by_hooks(self._root), enters_modules=False)
        if self._values is not None and not self._is_taken:
            self._values.take()
            self._is_taken = True
        self._is_cut, self._carried = is_cut, carried

    def note_first(self) -> None:
        """The first microbatch of several has gone through a stage."""
        if self._since_first is not None:
            self._since_first.take()
            self._has_first = True

    def obstacle(self) -> str | None:
        """Why batches must not be cut: what a stage has left in this call is not what it would leave on one device."""
        tensors = self._tensors(each for each, _ in self._differences())
        counts = self._since_first.differences() if self._since_first is not None and self._has_first else iter(())
        place = next(chain(tensors, (each.path for each in counts if each.path not in self._carried)), None)
        if place is None:
            return None
        return f"the model's forward sets {written_place(place)} anew with each call, which hooks read"

    def share(self, sent: Iterable[Change] = ()) -> None:
        """The region's call is over: every rank gets what the others have left. Called by every rank.

        Args:
            sent: What the last stage's rank has sent already.

        Raises:
            UnsupportedError: A microbatch has left a tensor, or two ranks something else in the same place.
        """
        if self._topology.num_ranks == 1:
            return
        if self._is_needed is None:
            self._is_needed = any_rank(self._values is not None, self._topology)
            self._tell_of_hooks()
        if not self._is_needed:
            return
        known = {change.path for change in sent}
        left = [(each, is_in_place) for each, is_in_place in self._differences() if each.path not in known]
        tensors = self._tensors(each for each, _ in left) if self._is_cut else iter(())
        of_microbatch = next(map(written_place, tensors), None)
        changes, unsent = self._changes(left)
        self._forget()
        every = gather_values(self._topology.control_group, (changes, unsent, of_microbatch))
        self._check([each for *_, each in every])
        if news := {name for _, names, _ in every for name in names} - self._unsent:
            self._unsent |= news
            self._warn(
                f"Modules leave values that cannot be pickled: {', '.join(sorted(news))}. Hooks read those of their own rank. "
                "Store tensors or plain values instead."
            )
        found: dict[Path, Change] = {}
        for theirs, *_ in every:
            for change in theirs:
                if found.setdefault(change.path, change) is not change:
                    raise _two_ranks(written_place(change.path))
        own = {change.path for change in changes}
        take_over(self._root, [each for path, each in found.items() if path not in own], self._topology.device)

    def _forget(self) -> None:
        self._is_taken = self._has_first = False
        for values in (self._values, self._since_first):
            if values is not None:
                values.forget()

    def _tell_of_hooks(self) -> None:
        """Warns of what forward hooks have left outside of modules, where it is not the same on all ranks."""
        left = () if self._hooks is None else self._hooks.differences()
        found = (each for each in left if each.value is not ABSENT and not callable(each.value))
        mine = {(".".join(names_on_the_way(each.path)), repr(each.path), repr(each.value)) for each in found}
        every = gather_values(self._topology.control_group, mine)
        self._hooks = None
        if names := sorted({name for theirs in every for name, *_ in theirs ^ mine if name}):
            self._warn(
                f"Forward hooks leave values outside of the modules: {', '.join(names)}. Each rank has those of its stages. "
                "To read them in hooks or after the run, store them as attributes of the module: module.activation = ..."
            )

    def _differences(self) -> list[tuple[Difference, bool]]:
        """Returns what differs, each with whether it is a tensor that has got other values."""
        if self._values is None or not self._is_taken:
            return []
        others = frozenset() if self._topology.is_last else self._carried
        assigned = (each for each in self._values.differences() if each.path not in others and not stands_for_data(each.value))
        return [*((each, False) for each in assigned), *((each, True) for each in self._values.written(()))]

    def _tensors(self, differences: Iterable[Difference]) -> Iterator[Path]:
        """Yields the places among differences that have tensors, but for results of the region."""
        return (each.path for each in differences if each.path not in self._carried and not is_plain_value(each.value))

    def _changes(self, left: Iterable[tuple[Difference, bool]]) -> tuple[list[Change], list[str]]:
        """Returns differences as they are sent, and the names of those that cannot be."""
        changes, unsent = [], []
        for each, is_in_place in left:
            try:
                changes.append(change_of(self._root, Snapshot({}), each, is_in_place=is_in_place))
            except UnsupportedError:
                unsent.append(written_place(each.path))
        return changes, unsent

    def _check(self, of_microbatches: Iterable[str | None]) -> None:
        for place in filter(None, of_microbatches):
            raise UnsupportedError(
                f"A module leaves a tensor of a single microbatch, which hooks read: {place}.",
                observed="a tensor that is set for the first time in this step",
                expected="a batch that is not split into microbatches, or no tensor",
                todo="Set FxPipeStrategy(num_microbatches=1), or return the tensor from the model's forward.",
            )


def read_by_all(root: nn.Module, runs_steps: bool) -> frozenset[str]:
    """Returns the names in code that every rank runs: hooks, and what they call of the modules' methods.

    Args:
        root: The LightningModule.
        runs_steps: Whether every rank runs the steps, too.
    """
    kinds = {type(module) for module in root.modules() if is_users(type(module))}
    steps = (getattr(root, kind.value, None) for kind in StepKind) if runs_steps else ()
    return names_in_hooks(root, *kinds).union(*(names_in_step(root, step) for step in steps if step is not None))


def places_left(root: nn.Module, readers: frozenset[str]) -> Mapping[str, frozenset[str]]:
    """Returns the attributes that submodules' code may change and other code names, by the modules' paths.

    Args:
        root: The LightningModule.
        readers: Names in the other code.
    """
    found = {}
    kinds = {type(module) for module in root.modules() if is_users(type(module))}
    forwards = filter(None, (code_of(kind.forward) for kind in kinds))
    running = {code for forward in forwards for code in codes_called(tuple(kinds), forward)}
    for path, module in root.named_modules():
        if not path or isinstance(module, METRICS) or not (is_users(type(module)) or hooks_of(module)):
            continue
        kind: Any = type(module)
        codes = [*running.intersection(codes_of_class(kind)), *filter(None, map(code_of, hooks_of(module)))]
        held = {name for name in readers & vars(module).keys() if may_change_inside(name, vars(module)[name], codes)}
        if names := (assigned_by(codes) & readers | held) - TORCHS_OWN:
            found[path] = frozenset(names)
    return found


def _reached_by_hooks(root: nn.Module) -> Mapping[str, Any]:
    """Returns what forward hooks begin from: themselves, and the root where one is a method of it."""
    hooks = {f"hook {number}": hook for number, hook in enumerate(hook for m in root.modules() for hook in hooks_of(m))}
    return {**hooks, "self": root} if hooks else {}


def _two_ranks(place: str) -> UnsupportedError:
    return UnsupportedError(
        f"Modules of several stages change the same object: {place}.",
        observed="changes on several ranks, in a place that hooks read",
        expected="a place that modules of a single stage change",
        todo="Give each module an object of its own, or return the value from the model's forward.",
    )
