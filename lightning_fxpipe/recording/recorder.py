"""Notes what this rank does in a step, and when.

A rank does one thing at a time. So what is noted is each moment at which it turns to something else, and to what; what happens
inside of something else takes its time away from that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from lightning_fxpipe.recording.clocks import Clock, CpuClock, clock_of
from lightning_fxpipe.recording.memory import allocated_bytes, peak_bytes
from lightning_fxpipe.simulation.actions import Action
from lightning_fxpipe.simulation.timeline import Span

_NOTHING = nullcontext()
# What takes up a rank; None while it waits for others.
Work = Action | str | None


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """Actions of one rank in a step.

    Attributes:
        spans: One after the other, on this rank's clock.
        kept_bytes: How much was in memory from when on; empty if unknown.
        peak_bytes: The most that was.
    """

    spans: tuple[Span, ...]
    kept_bytes: tuple[tuple[float, float], ...]
    peak_bytes: int


class Recorder:
    """Notes the step that runs, between :meth:`begin` and :meth:`end`. Each rank has one; none of its methods is collective.

    Attributes:
        is_on: Whether there is a step to note.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._clock: Clock = CpuClock()
        self._device = torch.device("cpu")
        self._turns: list[tuple[Any, Work]] = []  # marks, and to what the rank turned there
        self._kept: list[tuple[Any, int]] = []
        self._open: list[Work] = []
        self._is_undivided = False
        self._peak_bytes = 0

    def begin(self, device: torch.device) -> None:
        """A step begins.

        Args:
            device: This rank's.
        """
        self._turns, self._kept, self._open = [], [], []
        self._is_undivided, self._peak_bytes = False, 0
        self._device, self._clock = device, clock_of(device)
        self._clock.begin()
        self.is_on = True

    def end(self) -> RankStep:
        """The step is over; returns what was noted."""
        self.is_on = False
        marks = [mark for mark, _ in self._turns]
        # Of two streams of a GPU the later event may be the earlier moment.
        times = list(accumulate(self._clock.seconds(marks), max))
        spans = [
            Span(work, start, end)
            for (_, work), (start, end) in zip(self._turns, pairwise(times), strict=False)
            if isinstance(work, Action) or (work is not None and end > start)
        ]
        kept = zip(self._clock.seconds([mark for mark, _ in self._kept]), (num for _, num in self._kept), strict=True)
        found = RankStep(spans=tuple(spans), kept_bytes=tuple(kept), peak_bytes=self._peak_bytes)
        self._turns, self._kept = [], []
        return found

    @property
    def is_in_step(self) -> bool:
        """True if the rank is in the middle of something that is noted, and whose parts are noted, too."""
        return self.is_on and bool(self._open) and not self._is_undivided

    def during(self, words: str) -> AbstractContextManager[None]:
        """In the block the rank does this, but for what the block says of itself."""
        return self._noted(words) if self.is_on and not self._is_undivided else _NOTHING

    def waiting(self) -> AbstractContextManager[None]:
        """In the block the rank waits for others, but for what the block says of itself."""
        return self._noted(None) if self.is_in_step else _NOTHING

    def undivided(self, work: Action | str) -> AbstractContextManager[None]:
        """In the block the rank does this, whatever it is made of."""
        return self._undivided(work) if self.is_in_step else _NOTHING

    @contextmanager
    def _undivided(self, work: Work) -> Iterator[None]:
        with self._noted(work):
            self._is_undivided = True
            try:
                yield
            finally:
                self._is_undivided = False
        if isinstance(work, Action) and (num_bytes := allocated_bytes(self._device)) is not None:
            self._kept.append((self._turns[-1][0], num_bytes))

    @contextmanager
    def _noted(self, work: Work) -> Iterator[None]:
        self._turn(work)
        self._open.append(work)
        try:
            yield
        finally:
            self._open.pop()
            self._turn(self._open[-1] if self._open else None)
            if not self._open:
                self._peak_bytes = peak_bytes(self._device)

    def _turn(self, work: Work) -> None:
        self._turns.append((self._clock.mark(), work))
