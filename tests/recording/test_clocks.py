"""Moments of a GPU are read from its events when the step is over; here they are made up, as there is no GPU."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_fxpipe.recording.clocks import CpuClock, CudaClock, clock_of


class FakeGpu:
    """Comes to an event 250 ms after it has come to the one before."""

    def __init__(self) -> None:
        self.num_events = self.num_waits = 0

    def event(self) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu, self._at_ms = gpu, -1.0

    def record(self) -> None:
        self._at_ms = 250.0 * self._gpu.num_events
        self._gpu.num_events += 1

    def synchronize(self) -> None:
        assert self._at_ms >= 0
        self._gpu.num_waits += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        return end._at_ms - self._at_ms


def test_marks_of_a_gpu_are_on_the_cpus_clock_and_waited_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    gpu = FakeGpu()
    clock = CudaClock(gpu.event)
    clock.begin()
    marks = [clock.mark() for _ in range(3)]
    assert gpu.num_waits == 1
    assert clock.seconds(marks) == [100.25, 100.5, 100.75]
    assert gpu.num_waits == 2
    assert clock.seconds([]) == []


def test_a_cpus_marks_are_the_time() -> None:
    clock = CpuClock()
    before = time.perf_counter()
    first, second = clock.seconds([clock.mark(), clock.mark()])
    assert before <= first <= second <= time.perf_counter()


def test_each_device_has_its_clock() -> None:
    assert isinstance(clock_of(torch.device("cpu")), CpuClock)
    assert isinstance(clock_of(torch.device("cuda", 0)), CudaClock)
