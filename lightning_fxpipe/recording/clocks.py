"""When something happens on a rank's device, on the scale of ``time.perf_counter``, which a machine's processes share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks moments cheaply; when they were is read once the step is over."""

    def begin(self) -> None:
        """Before the first mark."""

    def mark(self) -> Any:
        """Stands for this moment."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """When marks were made."""


class CpuClock:
    """A CPU does what it is told at once."""

    def begin(self) -> None:
        """Nothing to do."""

    def mark(self) -> float:
        """The time itself."""
        return time.perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """The marks themselves."""
        return list(marks)


class CudaClock:
    """Clock of a GPU, which runs behind the host: a mark is an event in its stream, and the step does not wait for it.

    Args:
        make_event: Makes an event that knows when the GPU has come to it.
    """

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self._make_event = make_event or partial(torch.cuda.Event, enable_timing=True)
        self._first: Any = None
        self._first_seconds = 0.0

    def begin(self) -> None:
        """Waits for the GPU once, to know when on the CPU's clock its first event was."""
        self._first = self.mark()
        self._first.synchronize()
        self._first_seconds = time.perf_counter()

    def mark(self) -> Any:
        """An event in the current stream."""
        event = self._make_event()
        event.record()
        return event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """When the GPU came to the events; waits for the last of them."""
        if marks:
            marks[-1].synchronize()
        return [self._first_seconds + self._first.elapsed_time(mark) / 1e3 for mark in marks]


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else CpuClock()
