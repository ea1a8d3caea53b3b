"""Where a stage of this rank is on the way forward and on the way back, and what comes to it and leaves it there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from lightning_fxpipe.distributed.topology import Placement
from lightning_fxpipe.planner.skips import Skip
from lightning_fxpipe.runtime.region_pass import Crossing, gradient_specs
from lightning_fxpipe.schedules.places import Place, SkipEnd
from lightning_fxpipe.stages.build import Stage, TensorSpec


@dataclasses.dataclass(frozen=True)
class StagePlaces:
    """One stage, and microbatches of one size.

    Attributes:
        stage: The stage.
        crossing: What crosses its boundaries.
        placement: Which rank has which stages.
    """

    stage: Stage
    crossing: Crossing
    placement: Placement

    @property
    def _last(self) -> int:
        return self.placement.num_stages - 1

    def onward(self, carried: tuple[TensorSpec, ...] = ()) -> Place:
        """On the way forward; ``carried`` crosses each boundary besides."""
        index, crossing, (num_in, num_out) = self.stage.index, self.crossing, self._num_skips
        return Place(
            stage=index,
            index=index,
            received=crossing.received[num_in:] + (carried if index else ()),
            sent=None if index == self._last else crossing.sent[num_out:] + carried,
            skips_in=self._ends(crossing.received, [(skip, skip.source) for skip in self.stage.skips_in]),
            skips_out=self._ends(crossing.sent, [(skip, skip.destination) for skip in self.stage.skips_out]),
        )

    def backward(self) -> Place:
        """On the way back, where stages are numbered from the last one."""
        place, index, (num_in, num_out) = self.onward(), self.stage.index, self._num_skips
        # In the group of the way back, ranks are numbered as stages are.
        on_way_back = {
            self.placement.rank_of(stage): self.placement.rank_of(self._last - stage) for stage in range(self._last + 1)
        }
        return Place(
            stage=index,
            index=self._last - index,
            received=() if index == self._last else gradient_specs(self.crossing.sent[num_out:]),
            sent=gradient_specs(self.crossing.received[num_in:]) if index else None,
            skips_in=_of_gradients(place.skips_out, on_way_back),
            skips_out=_of_gradients(place.skips_in, on_way_back),
        )

    @property
    def _num_skips(self) -> tuple[int, int]:
        return len(self.stage.skips_in), len(self.stage.skips_out)

    def _ends(self, specs: Sequence[TensorSpec], skips: Sequence[tuple[Skip, int]]) -> tuple[SkipEnd, ...]:
        rank_of, own = self.placement.rank_of, self.placement.rank_of(self.stage.index)
        ranks = [None if rank_of(other) == own else rank_of(other) for _, other in skips]
        return tuple(
            SkipEnd(number=skip.number, rank=rank, spec=spec)
            for (skip, _), rank, spec in zip(skips, ranks, specs, strict=False)
        )


def _of_gradients(ends: Sequence[SkipEnd], rank_of: Mapping[int, int]) -> tuple[SkipEnd, ...]:
    return tuple(
        dataclasses.replace(
            end, rank=None if end.rank is None else rank_of[end.rank], spec=dataclasses.replace(end.spec, requires_grad=False)
        )
        for end in ends
        if end.spec.requires_grad
    )
