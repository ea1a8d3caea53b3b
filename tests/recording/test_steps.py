"""The parts of all ranks make one timeline, on one clock."""

from __future__ import annotations

import pytest

from lightning_fxpipe.recording.alignment import ClockOffset, shortest
from lightning_fxpipe.recording.recorder import RankStep
from lightning_fxpipe.recording.steps import MeasuredStep, put_together
from lightning_fxpipe.simulation.actions import BACKWARD, FORWARD, Action
from lightning_fxpipe.simulation.timeline import Span

F, B = Action(0, FORWARD, 0), Action(0, BACKWARD, 0)
SAME = ClockOffset(0.0, 0.0)


def part(*spans: Span, peak_bytes: int = 1, kept_bytes: tuple[tuple[float, float], ...] = ()) -> RankStep:
    return RankStep(spans=spans, kept_bytes=kept_bytes, peak_bytes=peak_bytes)


def measured(*parts: RankStep) -> MeasuredStep:
    return put_together(parts, [SAME] * len(parts), "")


def test_the_ranks_spans_are_put_on_one_clock_and_count_from_the_first() -> None:
    parts = [part(Span(F, 12.0, 13.0)), part(Span(B, 1010.5, 1011.0), peak_bytes=7, kept_bytes=((1011.0, 5.0),))]
    step = put_together(parts, [SAME, ClockOffset(1000.0, 0.25)], "step 3")
    assert step.timeline.ranks == ((Span(F, 1.5, 2.5),), (Span(B, 0.0, 0.5),))
    assert step.timeline.kept_bytes == ((), ((0.5, 5.0),))
    assert step.timeline.label == "step 3"
    assert (step.peak_bytes, step.clock_error_seconds) == (7, 0.25)
    assert measured(part(Span(F, 0.0, 1.0))).timeline.kept_bytes == ()


def test_the_bubble_is_what_ranks_idle_from_the_first_action_to_the_last() -> None:
    last = part(Span("training_step", 0.0, 1.0), Span(F, 1.0, 2.0), Span("training_step", 2.0, 3.0), Span(B, 3.0, 4.0))
    other = part(Span("training_step", 0.0, 1.5), Span(F, 2.0, 2.5), Span("optimizer step", 3.5, 9.0))
    # Of two times three seconds the other rank works half a second three times.
    assert measured(last, other).bubble_fraction == pytest.approx(1 - (3 + 1.5) / 6)


def test_a_step_without_actions_has_no_bubble() -> None:
    assert measured(part(Span("training_step", 0.0, 1.0))).bubble_fraction is None
    assert measured(part()).bubble_fraction is None
    assert measured(part(Span(F, 1.0, 1.0))).bubble_fraction == 0.0


def test_the_shortest_trip_tells_the_offset_and_its_error() -> None:
    assert shortest([(0.0, 51.0, 4.0), (10.0, 60.5, 11.0), (20.0, 72.0, 22.0)]) == ClockOffset(50.0, 0.5)


def test_an_offset_within_its_error_is_none() -> None:
    """On one machine the clocks are the same; what a trip seems to show there would only put things out of order."""
    assert shortest([(10.0, 10.9, 11.0)]) == ClockOffset(0.0, 0.5)
