"""Which ranks have been silent for too long, by a clock that the tests set."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from lightning_fxpipe.distributed.heartbeat import Heartbeat

LIMIT_SECONDS = 12.0


class Clock:
    """What ``Heartbeat`` takes for the time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def silent_after(heartbeat: Heartbeat, clock: Clock, seconds: float, at_beat: Callable[[], None] = lambda: None) -> list[int]:
    """Who was found silent within a time in which this rank was running."""
    found: list[int] = []
    end = clock.now + seconds
    while clock.now < end:
        clock.now += heartbeat.seconds_left() or 0.0
        at_beat()
        found += heartbeat.beat()
    return found


def test_a_silent_rank_is_named_once_when_its_time_is_over(clock: Clock) -> None:
    heartbeat = Heartbeat([1, 2], LIMIT_SECONDS, clock)

    def say() -> None:
        heartbeat.hear(1)

    assert silent_after(heartbeat, clock, LIMIT_SECONDS * 0.95, say) == []
    assert silent_after(heartbeat, clock, LIMIT_SECONDS * 0.2, say) == [2]
    assert silent_after(heartbeat, clock, LIMIT_SECONDS * 3, say) == []


def test_time_in_which_the_observer_was_stopped_does_not_count(clock: Clock) -> None:
    """All ranks stop with a laptop that sleeps, or by Ctrl-Z; whoever wakes first would take the others for dead."""
    heartbeat = Heartbeat([1], LIMIT_SECONDS, clock)
    for _ in range(5):
        clock.now += 100 * LIMIT_SECONDS
        assert heartbeat.beat() == []
    assert silent_after(heartbeat, clock, LIMIT_SECONDS * 0.5) == []
    assert silent_after(heartbeat, clock, LIMIT_SECONDS) == [1]


def test_nobody_waits_for_a_rank_that_is_forgotten(clock: Clock) -> None:
    heartbeat = Heartbeat([1], LIMIT_SECONDS, clock)
    heartbeat.forget(1)
    heartbeat.hear(1)
    assert silent_after(heartbeat, clock, LIMIT_SECONDS * 3) == []


def test_without_a_limit_a_rank_never_beats(clock: Clock) -> None:
    assert Heartbeat([1], math.inf, clock).seconds_left() is None
