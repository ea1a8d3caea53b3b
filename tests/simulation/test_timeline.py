"""A timeline says of a simulated step what the simulation says."""

from __future__ import annotations

import pytest

from lightning_fxpipe.distributed.topology import Placement
from lightning_fxpipe.simulation.by_name import simulate
from lightning_fxpipe.simulation.costs import StageCosts
from lightning_fxpipe.simulation.timeline import Span, Timeline


def test_the_timeline_of_a_simulation_has_its_time_bubble_and_peaks() -> None:
    costs = [
        StageCosts(forward_seconds=s, input_backward_seconds=2 * s, activation_bytes=5, state_bytes=7) for s in (1, 2, 1.5)
    ]
    simulation = simulate(costs, num_microbatches=5)
    timeline = Timeline.of_simulation("1f1b", simulation)
    assert timeline.seconds == pytest.approx(simulation.pipeline_seconds)
    assert timeline.bubble_fraction == pytest.approx(simulation.bubble_fraction)
    assert tuple(max(kept for _, kept in rank) for rank in timeline.kept_bytes) == simulation.peak_bytes
    assert [rank[-1][1] for rank in timeline.kept_bytes] == [7, 7, 7]
    assert timeline.critical_path == tuple(event.action for event in simulation.critical_path)


def test_a_measured_timeline_counts_from_its_first_beginning() -> None:
    timeline = Timeline("measured", ((Span("loss", 1.0, 2.0),), (Span("optimizer step", 3.0, 5.0),)))
    assert timeline.seconds == 4.0
    assert timeline.bubble_fraction == pytest.approx(1 - 3 / 8)
    assert Timeline("nothing", ((), ())).bubble_fraction == 0.0


@pytest.mark.parametrize(("schedule", "numbers"), [("1f1b", (2, 1, 0)), ("interleaved_1f1b", (2, 1, 0)), ("v_half", (0, 1, 2))])
def test_ranks_have_the_numbers_of_a_running_pipeline(schedule: str, numbers: tuple[int, ...]) -> None:
    """Rank 0 holds the last stage, as ``Placement`` says."""
    each = 1 if schedule == "1f1b" else 2
    costs = [StageCosts(forward_seconds=1, input_backward_seconds=1, weight_backward_seconds=1)] * (3 * each)
    timeline = Timeline.of_simulation("", simulate(costs, num_microbatches=6, schedule=schedule, stages_per_rank=each))
    placement = Placement(num_ranks=3, stages_per_rank=each, is_v=schedule == "v_half")
    assert timeline.rank_numbers == numbers == tuple(map(placement.global_rank, range(3)))
    assert Timeline("nothing", ((), ())).rank_numbers == (0, 1)
