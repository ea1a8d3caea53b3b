"""Every schedule by its name, and what is refused."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.simulation.actions import ActionTable
from lightning_fxpipe.simulation.by_name import SimulatedSchedule, schedule_named, simulate, table_of
from lightning_fxpipe.simulation.costs import Link, Overhead, StageCosts

COST = StageCosts(forward_seconds=1, input_backward_seconds=1, weight_backward_seconds=1, activation_bytes=2, weight_bytes=1)
# For eight stages and eight microbatches: ranks, seconds.
EXPECTED: dict[SimulatedSchedule, tuple[int, float]] = {
    "gpipe": (8, 45),
    "1f1b": (8, 45),
    "looped_bfs": (4, 57),
    "interleaved_1f1b": (4, 57),
    "interleaved_zero_bubble": (4, 51),
    "zbv_zero_bubble": (4, 51),
    "dualpipev": (4, 51),
    "zb_h1": (8, 31),
    "zb_h2": (8, 34),
    "zero_bubble": (8, 31),
    "zero_bubble_v": (4, 51),
    "v_half": (4, 53),
    "v_min": (4, 59),
}


def test_all_names_are_tested() -> None:
    assert {*EXPECTED} == {*get_args(SimulatedSchedule)}


@pytest.mark.parametrize("schedule", EXPECTED)
def test_each_name_is_that_of_a_schedule(schedule: SimulatedSchedule) -> None:
    per_rank = 2 if schedule in ("looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble") else 1
    found = simulate([COST] * 8, num_microbatches=8, schedule=schedule, stages_per_rank=per_rank)
    assert (found.table.num_ranks, found.pipeline_seconds) == EXPECTED[schedule]
    assert found.table.num_microbatches == 8


def test_what_is_given_is_used() -> None:
    plain = simulate([COST] * 2, num_microbatches=2)
    assert (plain.table.num_ranks, plain.seconds) == (2, 9)
    assert simulate([COST] * 2, num_microbatches=2, overhead=Overhead(step_seconds=1)).seconds == 10
    assert simulate([COST] * 2, num_microbatches=2, link=Link(latency_seconds=1)).seconds == 11
    limited = simulate([COST] * 4, num_microbatches=8, schedule="zero_bubble", memory_bytes=[8] * 4)
    assert max(limited.peak_activation_bytes) == 8
    assert max(simulate([COST] * 4, num_microbatches=8, schedule="zero_bubble").peak_activation_bytes) > 8
    own = simulate([COST] * 2, num_microbatches=1, schedule=ActionTable.from_csv("0F0,0B0\n1F0,1B0"))
    assert own.pipeline_seconds == 6


def test_a_name_may_be_spelled_as_torch_does() -> None:
    assert simulate([COST] * 2, num_microbatches=2, schedule="1F1B").table == table_of("1f1b", [COST] * 2, 2)
    assert [schedule_named(name) for name in ("GPipe", "ZBVZeroBubble", "looped-bfs")] == [
        "gpipe",
        "zbv_zero_bubble",
        "looped_bfs",
    ]


@pytest.mark.parametrize(
    ("num_stages", "options", "message"),
    [
        (4, {"schedule": "2F1B"}, "The schedule does not exist[^*]*did you mean '1f1b'"),
        (4, {"num_microbatches": 0}, "cannot be simulated without microbatches"),
        (
            4,
            {"stages_per_rank": 2},
            "The number of stages does not fit the schedule[^*]*1f1b for 4 stages, 2 on each rank",
        ),
        (5, {"schedule": "looped_bfs", "stages_per_rank": 2}, "looped_bfs for 5 stages"),
        (4, {"schedule": "looped_bfs", "stages_per_rank": 0}, "looped_bfs for 4 stages, 0"),
        (5, {"schedule": "v_half"}, "exactly two with this schedule"),
        (0, {}, "for 0 stages"),
        (
            8,
            {"schedule": "dualpipev"},
            "DualPipeV requires at least as many microbatches as stages[^*]*4 microbatches and 8 stages",
        ),
        (1, {"schedule": ActionTable.from_csv("0F0,0B0"), "num_microbatches": 2}, "for a different number of microbatches"),
    ],
)
def test_what_makes_no_schedule_is_refused(num_stages: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate([COST] * num_stages, **{"num_microbatches": 4, **options})
