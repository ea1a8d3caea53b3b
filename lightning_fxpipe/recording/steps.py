"""A recorded step of all ranks: its timeline, and what is measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_fxpipe.distributed.agreement import gather_values
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.recording.alignment import ClockOffset, clock_offsets
from lightning_fxpipe.recording.recorder import RankStep
from lightning_fxpipe.simulation.actions import Action
from lightning_fxpipe.simulation.timeline import Span, Timeline


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A step of all ranks.

    Attributes:
        timeline: What they did when.
        peak_bytes: The most memory that a rank took.
        clock_error_seconds: By how much the ranks' spans may be shifted against each other.
    """

    timeline: Timeline
    peak_bytes: int
    clock_error_seconds: float

    @property
    def bubble_fraction(self) -> float | None:
        """Share of the pipeline's time that ranks do nothing: from the first action to the end of the last; None without any.

        What is no action, as the loss of a whole batch, is something, too.
        """
        ranks = self.timeline.ranks
        actions = [span for spans in ranks for span in spans if isinstance(span.work, Action)]
        if not actions:
            return None
        start, end = min(a.start_seconds for a in actions), max(a.end_seconds for a in actions)
        inside = (min(s.end_seconds, end) - max(s.start_seconds, start) for spans in ranks for s in spans)
        return 1 - sum(seconds for seconds in inside if seconds > 0) / (len(ranks) * (end - start)) if end > start else 0.0


def gathered(own: RankStep, topology: Topology, label: str) -> MeasuredStep | None:
    """The step of all ranks, on the last stage's rank; None elsewhere. Called by every rank.

    Args:
        own: This rank's part.
        topology: This rank's place.
        label: What the step is called.
    """
    offsets = clock_offsets(topology)
    parts = gather_values(topology.control_group, own)
    by_place = [parts[topology.global_rank(place) - topology.first_rank] for place in range(topology.num_ranks)]
    return put_together(by_place, offsets, label) if topology.is_last else None


def put_together(parts: Sequence[RankStep], offsets: Sequence[ClockOffset], label: str) -> MeasuredStep:
    """The step of all ranks, counted from its first beginning.

    Args:
        parts: What each rank has done, by its own clock.
        offsets: The ranks' clocks.
        label: What the step is called.
    """
    starts = [s.start_seconds - offset.seconds for part, offset in zip(parts, offsets, strict=True) for s in part.spans]
    begin = min(starts, default=0.0)
    spans, kept = [], []
    for part, offset in zip(parts, offsets, strict=True):
        less = offset.seconds + begin
        spans.append(tuple(Span(s.work, s.start_seconds - less, s.end_seconds - less) for s in part.spans))
        kept.append(tuple((seconds - less, num_bytes) for seconds, num_bytes in part.kept_bytes))
    return MeasuredStep(
        timeline=Timeline(label, tuple(spans), tuple(kept) if any(kept) else ()),
        peak_bytes=max(part.peak_bytes for part in parts),
        clock_error_seconds=max(offset.error_seconds for offset in offsets),
    )
