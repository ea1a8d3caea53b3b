"""Timelines of the actions of each rank, simulated or measured: the data of all pictures."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_fxpipe.reporting.table import human_bytes
from lightning_fxpipe.simulation.actions import Action, running_ranks
from lightning_fxpipe.simulation.costs import Link
from lightning_fxpipe.simulation.simulator import Simulation

# What a rank does after an average where replicas share out the optimizer.
OTHERS_STEP = "parameters that others step"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a rank does, and when.

    Attributes:
        work: An action; or words for what is none, such as "optimizer step".
        start_seconds, end_seconds: From when to when, since the step began.
    """

    work: Action | str
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True)
class Timeline:
    """A step of all ranks.

    Attributes:
        label: What it is of, such as "1f1b, simulated".
        ranks: Spans of each rank, one after the other; the rank of stage 0 is the first.
        kept_bytes: For each rank how much is in memory from when on, as pairs of seconds and bytes; empty if unknown.
        critical_path: The actions that decide how long it takes; empty if unknown.
    """

    label: str
    ranks: tuple[tuple[Span, ...], ...]
    kept_bytes: tuple[tuple[tuple[float, float], ...], ...] = ()
    critical_path: tuple[Action, ...] = ()

    @classmethod
    def of_simulation(cls, label: str, simulation: Simulation) -> Timeline:
        """That of a simulated step."""
        return cls(
            label,
            tuple(tuple(Span(e.action, e.start_seconds, e.end_seconds) for e in events) for events in simulation.ranks),
            simulation.kept_bytes,
            tuple(event.action for event in simulation.critical_path),
        )

    @classmethod
    def of_replicas(
        cls, label: str, simulation: Simulation, num_replicas: int, link: Link, *, shares_out: bool = False
    ) -> Timeline:
        """That of a simulated step of one of several pipelines, with what they average. Arguments as
        :meth:`~lightning_fxpipe.simulation.simulator.Simulation.seconds_of_replicas`.
        """
        alone = cls.of_simulation(label, simulation)
        spans = simulation.average_spans(num_replicas, link, shares_out=shares_out)
        ranks = []
        for of_rank, num_bytes, (start, middle, end) in zip(alone.ranks, simulation.gradient_bytes, spans, strict=True):
            averages = [Span(f"average of {human_bytes(round(num_bytes))}", start, middle), Span(OTHERS_STEP, middle, end)]
            ranks.append((*of_rank, *(span for span in averages if span.seconds > 0)))
        return replace(alone, ranks=tuple(ranks))

    @property
    def rank_numbers(self) -> tuple[int, ...]:
        """Number of each rank in a running pipeline, in which rank 0 holds the last stage."""
        place_of = {s.work.stage: place for place, spans in enumerate(self.ranks) for s in spans if isinstance(s.work, Action)}
        return running_ranks(len(self.ranks), place_of[max(place_of)] if place_of else 0)

    @property
    def seconds(self) -> float:
        """From the first beginning to the last end."""
        spans = [span for spans in self.ranks for span in spans]
        return max((s.end_seconds for s in spans), default=0.0) - min((s.start_seconds for s in spans), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """Share of that time in which ranks do nothing."""
        busy = sum(span.seconds for spans in self.ranks for span in spans)
        return 1 - busy / (len(self.ranks) * self.seconds) if self.seconds else 0.0
