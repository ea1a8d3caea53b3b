"""Notices ranks that have stopped to answer without having died: stopped by a signal, or on a machine that is gone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

# In the limit: the more, the more exact it is.
_NUM_BEATS = 12


class Heartbeat:
    """When this rank says that it is there, and for how many of its own beats others have said nothing.

    Time in which this rank was stopped itself does not count, such as that of a machine that sleeps or of all ranks that a
    shell has stopped: however long it was, it is part of one beat.

    Args:
        ranks: The others.
        seconds: How long a rank may be silent; infinity for any time, without beats.
        clock: Seconds from any moment on, never backwards.
    """

    def __init__(self, ranks: Iterable[int], seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._silent_beats = dict.fromkeys(ranks, 0)
        self._next = clock() + seconds / _NUM_BEATS

    def seconds_left(self) -> float | None:
        """Seconds until this rank's next beat; None if it never beats."""
        return None if math.isinf(self.seconds) else max(0.0, self._next - self._clock())

    def hear(self, rank: int) -> None:
        """A rank has said something."""
        if rank in self._silent_beats:
            self._silent_beats[rank] = 0

    def forget(self, rank: int) -> None:
        """A rank need not say anything any more."""
        self._silent_beats.pop(rank, None)

    def beat(self) -> list[int]:
        """This rank beats; returns the ranks that have now been silent for too long, each of them once."""
        self._next = self._clock() + self.seconds / _NUM_BEATS
        for rank in self._silent_beats:
            self._silent_beats[rank] += 1
        silent = [rank for rank, beats in self._silent_beats.items() if beats > _NUM_BEATS]
        for rank in silent:
            self.forget(rank)
        return silent
