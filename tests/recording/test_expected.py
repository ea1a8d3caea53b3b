"""The schedule that ran is simulated with the medians of what was measured."""

from __future__ import annotations

import pytest

from lightning_fxpipe.recording.expected import costs_of, simulated, table_of
from lightning_fxpipe.simulation.actions import FORWARD, Action
from lightning_fxpipe.simulation.by_name import SimulatedSchedule, simulate
from lightning_fxpipe.simulation.costs import StageCosts
from lightning_fxpipe.simulation.timeline import Span, Timeline

COSTS = [
    StageCosts(forward_seconds=1.0, input_backward_seconds=2.0, weight_backward_seconds=0.5),
    StageCosts(forward_seconds=1.5, input_backward_seconds=1.0, weight_backward_seconds=1.0),
]


def as_measured(timeline: Timeline, factor: float) -> Timeline:
    """All takes longer, and there is other work before and after."""
    ranks = []
    for spans in timeline.ranks:
        later = [Span(s.work, 1 + factor * s.start_seconds, 1 + factor * s.end_seconds) for s in spans]
        ranks.append((Span("training_step", 0.0, 1.0), *later, Span("optimizer step", 900.0, 901.0)))
    return Timeline("measured", tuple(ranks))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_the_simulation_is_that_of_the_table_that_ran_with_the_medians(schedule: SimulatedSchedule) -> None:
    simulation = simulate(COSTS, num_microbatches=4, schedule=schedule)
    truth = Timeline.of_simulation("", simulation)
    steps = [as_measured(truth, factor) for factor in (3.0, 1.0, 0.5)]
    assert table_of(steps[0]) == simulation.table
    found = simulated(steps)
    assert found is not None
    assert found.label == "simulated"
    assert found.ranks == truth.ranks
    assert found.kept_bytes == ()


def test_only_steps_of_the_same_table_count() -> None:
    few, many = (Timeline.of_simulation("", simulate(COSTS, num_microbatches=count)) for count in (2, 4))
    found = simulated([as_measured(many, 9.0), as_measured(few, 1.0)])
    assert found is not None
    assert found.ranks == few.ranks


def test_a_whole_backward_and_its_two_parts_may_stand_side_by_side() -> None:
    spans = tuple(
        Span(Action.parse(text), 0.0, seconds) for text, seconds in [("0F0", 1), ("0I0", 2), ("0W0", 4), ("0F1", 3), ("0B1", 9)]
    )
    (found,) = costs_of([Timeline("", (spans,))])
    assert (found.forward_seconds, found.input_backward_seconds, found.weight_backward_seconds) == (2, 2, 4)


@pytest.mark.parametrize("spans", [(), (Span("training_step", 0.0, 1.0),), (Span(Action(0, FORWARD, 0), 0.0, 1.0),) * 2])
def test_what_is_no_pass_of_a_batch_is_not_simulated(spans: tuple[Span, ...]) -> None:
    """As several calls of the model in a step with manual optimization."""
    assert simulated([Timeline("", (spans,))]) is None
    assert simulated([]) is None
