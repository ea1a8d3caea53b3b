"""Which order a schedule has for so many stages and microbatches: the very table that is simulated."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from lightning_fxpipe.distributed.topology import Placement
from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.schedules import by_name
from lightning_fxpipe.schedules.by_name import (
    SCHEDULES,
    ScheduleName,
    forward_order,
    training_order,
)
from lightning_fxpipe.simulation.actions import ActionTable
from lightning_fxpipe.simulation.by_name import SimulatedSchedule, simulate, stages_of_ranks, table_of
from lightning_fxpipe.simulation.costs import StageCosts, StageWork, even
from lightning_fxpipe.simulation.orders import gpipe, interleaved, looped_breadth_first
from lightning_fxpipe.simulation.simulator import run_table

COST = StageCosts(
    forward_seconds=1, input_backward_seconds=1, weight_backward_seconds=1, activation_bytes=1.0, weight_bytes=0.5
)
ALTERNATING = [name for name, schedule in SCHEDULES.items() if schedule.alternates]


def placement_of(name: str, num_ranks: int) -> Placement:
    schedule = SCHEDULES[name]
    return Placement(num_ranks=num_ranks, stages_per_rank=schedule.stages_per_rank, is_v=schedule.is_v)


def test_each_name_has_a_schedule() -> None:
    assert [*SCHEDULES] == [*get_args(ScheduleName)]
    assert {*get_args(SimulatedSchedule)} == {*SCHEDULES} - {"auto"}


@pytest.mark.parametrize("name", get_args(SimulatedSchedule))
def test_stages_are_placed_as_they_are_simulated(name: SimulatedSchedule) -> None:
    placement = placement_of(name, 3)
    assert stages_of_ranks(name, 3) == [placement.stages_of(rank) for rank in range(3)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", [name for name in ALTERNATING if name not in ("auto", "1f1b")])
def test_what_is_executed_is_what_is_simulated(name: str, num_ranks: int) -> None:
    """Word for word: a simulation of another table would tell of a run that there is not."""
    placement, schedule, count = placement_of(name, num_ranks), SCHEDULES[name], 8
    simulated = table_of(name, [COST] * placement.num_stages, count, schedule.stages_per_rank)  # type: ignore[arg-type]
    assert training_order(schedule, placement, count) == simulated


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("name", ALTERNATING)
def test_every_order_ends_for_few_and_odd_many_microbatches(name: str, num_microbatches: int) -> None:
    for num_ranks in (1, 2, 3, 4):
        placement = placement_of(name, num_ranks)
        table = training_order(SCHEDULES[name], placement, num_microbatches)
        assert run_table(table, [COST] * placement.num_stages).seconds >= 3 * num_microbatches
        assert [table.stages_of(rank) for rank in range(num_ranks)] == [placement.stages_of(r) for r in range(num_ranks)]


def test_where_there_is_no_such_order_all_go_forward_first() -> None:
    looped = Placement(num_ranks=2, stages_per_rank=2)
    assert training_order(SCHEDULES["1f1b"], looped, 4) == interleaved(2, 4, stages_per_rank=2)
    assert training_order(SCHEDULES["interleaved_1f1b"], looped, 5) == forward_order(looped, 5)
    assert training_order(SCHEDULES["interleaved_zero_bubble"], looped, 5) == forward_order(looped, 5)
    v = Placement(num_ranks=2, stages_per_rank=2, is_v=True)
    assert training_order(SCHEDULES["dualpipev"], v, 3) == forward_order(v, 3)
    with pytest.raises(ScheduleError):
        table_of("dualpipev", [COST] * 4, 3)


def test_passes_one_way_take_all_microbatches_through_a_stage_first() -> None:
    assert forward_order(Placement(num_ranks=3), 4) == gpipe(3, 4)
    looped = Placement(num_ranks=3, stages_per_rank=2)
    assert forward_order(looped, 4) == looped_breadth_first(3, 4, stages_per_rank=2)
    v = forward_order(Placement(num_ranks=2, stages_per_rank=2, is_v=True), 1)
    assert v.to_csv() == "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"


WORK = tuple(
    StageWork(forward=forward, input_backward=0.25, weight_backward=weights, kept_bytes=kept)
    for forward, weights, kept in ((0.2, 0.9, 8), (0.5, 0.2, 4), (0.2, 0.6, 4), (0.9, 0.2, 6))
)


@pytest.mark.parametrize(("name", "num_ranks"), [("zero_bubble", 4), ("zero_bubble_v", 2)])
def test_an_order_is_made_from_what_the_stages_take(name: str, num_ranks: int) -> None:
    schedule, placement, costs = SCHEDULES[name], placement_of(name, num_ranks), tuple(each.costs for each in WORK)
    found = training_order(schedule, placement, 9, WORK)
    assert found == simulate(costs, num_microbatches=9, schedule=name).table  # type: ignore[arg-type]
    equal = table_of(name, even(costs), 9)  # type: ignore[arg-type]
    assert run_table(found, costs).seconds <= run_table(equal, costs).seconds
    without = training_order(schedule, placement, 9)
    assert without == table_of(name, [COST] * 4, 9)  # type: ignore[arg-type]
    assert without != found
    for other in ("zb_h1", "v_half"):
        place = placement_of(other, 4 if other == "zb_h1" else 2)
        assert training_order(SCHEDULES[other], place, 9, WORK) == training_order(SCHEDULES[other], place, 9)


def test_stages_whose_memory_has_no_order_have_that_of_equal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """All forward first would take more memory still."""
    asked: list[Any] = []

    def refusing(name: Any, costs: Any, count: int, stages_per_rank: int) -> ActionTable:
        asked.append(costs)
        if len(asked) == 1:
            raise ScheduleError("No V-shaped schedule fits")
        return table_of(name, costs, count, stages_per_rank)

    monkeypatch.setattr(by_name, "table_of", refusing)
    by_name._table.cache_clear()
    place = placement_of("zero_bubble_v", 2)
    assert training_order(SCHEDULES["zero_bubble_v"], place, 9, WORK) == table_of("zero_bubble_v", [COST] * 4, 9)
    assert asked[0] == tuple(each.costs for each in WORK)
    by_name._table.cache_clear()
