"""One recorded region, cut into stages: this rank's part of it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fxpipe.stages.build import Stage
from lightning_fxpipe.tracing.step_record import Span
from lightning_fxpipe.tracing.trace import TracedRegion
from lightning_fxpipe.user_code.step import StepKind


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTrace:
    """A trace and this rank's stages of it; ``span`` is None where the region is a single call, which other steps may make.

    ``stages_with_inputs`` are the stages, of all ranks, that compute with a tensor that the region is called with. ``number``
    counts the traces: every rank makes the same ones.
    """

    number: int
    kind: StepKind
    span: Span | None
    traced: TracedRegion
    stages: tuple[Stage, ...]
    stages_with_inputs: frozenset[int]

    @property
    def is_for_one_step(self) -> bool:
        """True if it has only what the step that it was made for uses."""
        return self.span is not None or len(self.traced.wanted) < self.traced.output_structure.num_tensors

    @property
    def set_on_last_rank(self) -> frozenset[str]:
        """Paths of the modules whose attributes only the last stage's rank sets: their forward counts as the step's own code,
        or is recorded, and leaves tensors.
        """
        if self.span is None or self.traced.record is None:
            return frozenset({self.traced.signature.path or ""} if self.traced.left else ())
        leaving = {path for call in self.traced.record.calls for path, *_ in call.sides}
        return self.span.transparent.union(leaving.intersection(self.traced.opened))

    def input_numbers(self) -> list[int | float]:
        """Returns the values of the numbers that are inputs, in the batch that ran last."""
        return [*self.traced.numbers.now.values()]
