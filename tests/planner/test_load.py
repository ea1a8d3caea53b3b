"""How many microbatches each stage keeps, and what of the devices' memory and speed each has."""

from __future__ import annotations

from typing import get_args

import pytest

from lightning_fxpipe import PartitionError
from lightning_fxpipe.planner.load import Load, memory_of_each
from lightning_fxpipe.simulation import ActionTable, StageCosts, simulate
from lightning_fxpipe.simulation.by_name import SimulatedSchedule, stages_of_ranks


@pytest.mark.parametrize("schedule", get_args(SimulatedSchedule))
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 4), (2, 4), (4, 8)])
def test_what_is_kept_is_that_of_a_simulation(schedule: SimulatedSchedule, num_ranks: int, num_microbatches: int) -> None:
    """A stage that alone keeps anything shows the peak of its rank."""
    held = stages_of_ranks(schedule, num_ranks)
    load = Load(schedule=schedule, num_ranks=num_ranks, stages_per_rank=len(held[0]), num_microbatches=num_microbatches)
    assert len(load.microbatches_kept) == load.num_stages
    for rank, stages in enumerate(held):
        assert [load.rank_of(stage) for stage in stages] == [rank] * len(stages)
    for stage, kept in enumerate(load.microbatches_kept):
        costs = [
            StageCosts(
                forward_seconds=1,
                input_backward_seconds=1,
                weight_backward_seconds=1,
                activation_bytes=float(index == stage),
                weight_bytes=float(index == stage),
            )
            for index in range(load.num_stages)
        ]
        found = simulate(costs, num_microbatches=num_microbatches, schedule=schedule, stages_per_rank=load.stages_per_rank)
        if schedule in ("zero_bubble", "zero_bubble_v"):  # made for costs; a microbatch more or less
            assert 1 <= kept <= num_microbatches
        else:
            assert found.peak_bytes[load.rank_of(stage)] == kept


def test_a_table_of_ones_own_says_where_stages_are_and_what_they_keep() -> None:
    turns = "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    load = Load(schedule=ActionTable.from_csv(turns), num_ranks=2, num_microbatches=3, speeds=(1.0, 2.0))
    assert load.microbatches_kept == (2, 1)
    assert load.speed_shares == (1.0, 0.5)
    v_shaped = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"
    load = Load(schedule=ActionTable.from_csv(v_shaped), num_ranks=2, stages_per_rank=2, speeds=(1.0, 2.0))
    assert load.speed_shares == (0.5, 1.0, 1.0, 0.5)


def test_a_schedule_that_there_is_not_keeps_all() -> None:
    """Then all microbatches go forward before the first one goes back."""
    assert Load(schedule="dualpipev", num_ranks=4, stages_per_rank=2, num_microbatches=3).microbatches_kept == (3,) * 8


def test_1f1b_keeps_fewer_the_later_a_stage_is() -> None:
    assert Load(schedule="1f1b", num_ranks=4, num_microbatches=8).microbatches_kept == (4, 3, 2, 1)
    assert Load(schedule="1f1b", num_ranks=4, num_microbatches=2).microbatches_kept == (2, 2, 2, 1)


def test_the_last_stage_is_on_rank_0() -> None:
    """Unless they come back in a V, stages run against the ranks."""
    load = Load(schedule="1f1b", num_ranks=3, speeds=(1.0, 2.0, 4.0), memory_bytes=(10, 20, 40))
    assert load.speed_shares == (1.0, 0.5, 0.25)
    assert [*load.stage_memories()] == [(40.0, 20.0, 10.0)]
    assert load.memory_shares == (1.0, 0.5, 0.25)
    looped = Load(schedule="interleaved_1f1b", num_ranks=2, stages_per_rank=2, speeds=(1.0, 2.0))
    assert looped.speed_shares == (1.0, 0.5, 1.0, 0.5)
    v_shaped = Load(schedule="zbv_zero_bubble", num_ranks=2, stages_per_rank=2, speeds=(1.0, 2.0))
    assert v_shaped.speed_shares == (0.5, 1.0, 1.0, 0.5)


def test_equal_devices_ask_for_nothing() -> None:
    load = Load(schedule="1f1b", num_ranks=2, speeds=(3.0, 3.0), memory_bytes=(5, 5))
    assert (load.speed_shares, load.memory_shares) == ((), ())
    assert load.without_memory().memory_bytes == ()


def test_a_device_shares_its_memory_out_among_its_stages() -> None:
    load = Load(schedule="v_min", num_ranks=2, stages_per_rank=2, num_microbatches=8, memory_bytes=(100, 200))
    kept = load.microbatches_kept
    for memories in load.stage_memories():
        assert memories[0] + memories[3] == pytest.approx(100)
        assert memories[1] + memories[2] == pytest.approx(200)
    equally, by_kept = load.stage_memories()
    assert equally == (50, 100, 100, 50)
    assert by_kept[0] / by_kept[3] == pytest.approx(kept[0] / kept[3])


@pytest.mark.parametrize("described", [{"speeds": (1.0,)}, {"memory_bytes": (1, 2, 3)}])
def test_other_devices_than_there_are_are_refused(described: dict[str, tuple[float, ...]]) -> None:
    name = "device_speeds" if "speeds" in described else "device_memory_gib"
    with pytest.raises(PartitionError, match=f"The number of entries in {name} differs from the number of devices"):
        Load(schedule="1f1b", num_ranks=2, **described).check()  # type: ignore[arg-type]


def test_memory_is_one_number_for_all_or_one_for_each() -> None:
    assert memory_of_each(2, 3) == (2 * 2**30,) * 3
    assert memory_of_each([0.5, 1], 2) == (2**29, 2**30)
    assert memory_of_each((), 2) == ()
