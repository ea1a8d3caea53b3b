"""The trace that a batch runs with: found anew where the batch's shapes or constants are, or what the step reads before the
model's call; and which stages need the values of a step's batches.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

from torch import nn

from lightning_fxpipe.data.skip_loading import Sparing, without_values
from lightning_fxpipe.distributed.decisions import Decisions
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.pytree.containers import fingerprint
from lightning_fxpipe.pytree.shapes import Shapes
from lightning_fxpipe.runtime.lru import LruCache
from lightning_fxpipe.runtime.stage_trace import StageTrace
from lightning_fxpipe.runtime.stage_traces import StageTraces, ValuesNeeded
from lightning_fxpipe.tracing.guards import guarded_values
from lightning_fxpipe.tracing.region import NoModelCall, StepCall
from lightning_fxpipe.user_code.members import Members
from lightning_fxpipe.user_code.step import Step, StepKind

_logger = logging.getLogger("lightning_fxpipe")

_MAX_FOUND = 128

# A trace, and the shapes of the tensors that the region gets.
Found = tuple[StageTrace, Shapes]


class BatchTraces:
    """Finds them. Made by every rank.

    Args:
        root: The LightningModule.
        members: Its members, listed anew for each batch.
        topology: This rank's place.
        traces: The traces of its steps.
        sparing: Knows the ranks that get batches without values; None where all have them.
        decisions: Has the ranks agree on recording a step.
    """

    def __init__(
        self,
        root: nn.Module,
        members: Members,
        topology: Topology,
        traces: StageTraces,
        sparing: Sparing | None,
        decisions: Decisions,
    ) -> None:
        self._root = root
        self._members = members
        self._topology = topology
        self._traces = traces
        self._found: LruCache[Hashable, Found] = LruCache(_MAX_FOUND)
        self._sparing = sparing
        self._decisions = decisions
        self._reading: dict[StepKind, frozenset[int]] = {}  # stages that compute with tensors of the batch

    def forget(self) -> None:
        """Forgets which batches have been met."""
        self._found = LruCache(_MAX_FOUND)

    def find(self, step: Step, batch: Any, size: int) -> tuple[Found | None, Any]:
        """The trace, None for a batch that skips the model; and the batch, which has its values wherever that needs them."""
        with self._decisions.batch():
            found, batch = self._find_by_values(step, batch, size)
        self._decisions.note(None if found is None else found[0])
        return found, batch

    def _find_by_values(self, step: Step, batch: Any, size: int) -> tuple[Found | None, Any]:
        spared = self._sparing.ranks(step.kind) if self._sparing is not None else frozenset[int]()
        try:
            try:
                found = self._lookup(step, batch, size, has_values=not spared)
                needs_values = any(self._topology.placement.rank_of(stage) in spared for stage in found[0].stages_with_inputs)
            except ValuesNeeded:
                needs_values = True
            if needs_values:
                assert self._sparing is not None
                batch = self._sparing.with_values(step.kind, batch)
                found = self._lookup(step, batch, size, has_values=True)
        except NoModelCall:
            return None, batch
        if self._traces.count_use(found[0]):
            if spared and not needs_values:
                assert self._sparing is not None
                batch = self._sparing.with_values(step.kind, batch)
            with step.context():
                self._traces.recheck(found[0], _call(step, batch), size)
        self._learn_needs(step, batch, size, found)
        return found, batch

    def _learn_needs(self, step: Step, batch: Any, size: int, found: Found) -> None:
        if self._topology.num_ranks < 3:
            return
        reading = found[0].stages_with_inputs
        # A step that looks at values is not even tried: on zeros a loop may have no end.
        if step.kind not in self._reading and (
            self._traces.needs_values(step.kind) or not self._is_found_without_values(step, batch, size, found)
        ):
            reading = frozenset(range(self._topology.num_stages))
        self._reading[step.kind] = self._reading.get(step.kind, frozenset()) | reading

    def _is_found_without_values(self, step: Step, batch: Any, size: int, expected: Found) -> bool:
        """Returns True if what comes before the model's call runs on zeros, too, and calls it in the same way."""
        try:
            found = self._find(step, without_values(batch, self._topology.device), size, has_values=False)
        except Exception:  # zeros may be what the step cannot do with, as a division by them
            _logger.debug(
                "Every rank loads the batches of the %s, because it does not run on zeros", step.kind.words, exc_info=True
            )
            return False
        return found[0].traced is expected[0].traced and found[1] == expected[1]

    def free_ranks(self, kind: StepKind) -> frozenset[int]:
        """The pipeline ranks, but for the last stage's, that a step's batches so far have shown to need no values of them."""
        if kind not in self._reading or self._traces.needs_values(kind):
            return frozenset()
        placement = self._topology.placement
        needed = {self._topology.last_place, *map(placement.rank_of, self._reading[kind])}
        return frozenset(range(placement.num_ranks)) - needed

    def _lookup(self, step: Step, batch: Any, size: int, *, has_values: bool) -> Found:
        # What the model is called with follows from the batch's shapes and constants and what the prelude reads; where those
        # cannot be compared, and where they are new, such as the names of the samples, the step tells.
        if self._traces.have_held_tensors_changed():
            self.forget()
        constants = fingerprint((batch, step.rest[1:]))
        if constants is None or not self._traces.is_fixed(step.kind):
            return self._find(step, batch, size, has_values=has_values)

        def key() -> Hashable:
            return (
                step.kind,
                size,
                constants,
                self._members.flags(),
                tuple(guarded_values(self._root, self._traces.guard_keys, self._traces.varying()).values()),
            )

        num_guards = len(self._traces.guard_keys)
        found = self._found.get(key(), lambda: self._find(step, batch, size, has_values=has_values))
        if len(self._traces.guard_keys) > num_guards:  # the next batch like it will be looked for with the new ones, too
            self._found.get(key(), lambda: found)
        # Numbers that are inputs are no part of the key, and a trace may hold for some of their values only: `if alpha < 1`.
        if self._traces.varying() and not found[0].traced.holds_now():
            found = self._find(step, batch, size, has_values=has_values)
            self._found.put(key(), found)
        return found

    def _find(self, step: Step, batch: Any, size: int, *, has_values: bool) -> Found:
        with step.context():
            return self._traces.find(step.kind, _call(step, batch), size, has_values=has_values)


def _call(step: Step, batch: Any) -> StepCall:
    return StepCall(function=step.function, args=(batch, *step.rest), kwargs={})
