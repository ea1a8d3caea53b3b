"""What a table of the user's own says of the pipeline that is to run it, and those that none can run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_fxpipe.distributed.topology import Placement
from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.schedules.by_name import SCHEDULES, forward_order, training_order
from lightning_fxpipe.schedules.own_table import schedule_of, schedule_of_table, wanted_schedule
from lightning_fxpipe.simulation.actions import ActionTable
from lightning_fxpipe.simulation.by_name import stages_of_ranks, table_of
from lightning_fxpipe.simulation.costs import StageCosts
from tests.owntables import ODD, ONE_F_ONE_B, ONE_RANK, SPLIT_V

COST = StageCosts(forward_seconds=1, input_backward_seconds=1, weight_backward_seconds=1, activation_bytes=1)


@pytest.mark.parametrize(
    ("text", "num_ranks", "each", "is_v", "splits", "count"),
    [
        (ONE_F_ONE_B, 2, 1, False, False, 4),
        (ODD, 2, 1, False, False, 4),
        (SPLIT_V, 2, 2, True, True, 4),
        (ONE_RANK, 1, 4, False, True, 2),
        (forward_order(Placement(num_ranks=3, stages_per_rank=2), 3).to_csv(), 3, 2, False, False, 3),
    ],
)
def test_a_table_says_all_of_its_pipeline(text: str, num_ranks: int, each: int, is_v: bool, splits: bool, count: int) -> None:
    found = schedule_of_table(ActionTable.from_csv(text), "mine")
    assert found.table is not None
    assert (found.table.num_ranks, found.stages_per_rank, found.is_v, found.splits) == (num_ranks, each, is_v, splits)
    assert found.num_microbatches == count
    assert found.alternates
    placement = Placement(num_ranks=num_ranks, stages_per_rank=each, is_v=is_v)
    assert [found.table.stages_of(rank) for rank in range(num_ranks)] == [placement.stages_of(r) for r in range(num_ranks)]
    assert {*found.table.ranks} == {*ActionTable.from_csv(text).ranks}  # each rank's order is untouched
    assert training_order(found, placement, count) is found.table
    other = training_order(found, placement, count - 1)
    assert other == forward_order(placement, count - 1)


@pytest.mark.parametrize(
    "name", ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev", "zb_h2"]
)
def test_the_table_of_a_name_is_placed_as_the_name_is(name: str) -> None:
    held = stages_of_ranks(name, 3)  # type: ignore[arg-type]
    table = table_of(name, [COST] * 3 * len(held[0]), 6, len(held[0]))  # type: ignore[arg-type]
    found = schedule_of_table(table, "mine")
    named = SCHEDULES[name]
    assert found.table == table
    assert (found.stages_per_rank, found.is_v) == (named.stages_per_rank, named.is_v)
    assert found.splits == named.splits


def test_stages_elsewhere_than_a_pipeline_places_them_are_refused() -> None:
    blocks = ActionTable.from_csv("0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n")
    with pytest.raises(ScheduleError, match="Unsupported placement of stages in the schedule table") as refused:
        schedule_of_table(blocks, "blocks.csv")
    assert refused.value.where == "blocks.csv"
    assert refused.value.observed == "line 1: stages 0, 1; line 2: stages 2, 3"
    assert "looped: (0, 2); (1, 3) or V-shaped: (0, 3); (1, 2)" in str(refused.value.expected)
    for text in ("0F0,2F0,2B0,0B0\n1F0,1B0\n", "0F0,0B0\n1F0,2F0,2B0,1B0\n"):
        with pytest.raises(ScheduleError, match="Unsupported placement of stages in the schedule table"):
            schedule_of_table(ActionTable.from_csv(text), "uneven")
    with pytest.raises(ScheduleError, match="Unsupported placement of stages in the schedule table"):
        schedule_of_table(ActionTable.of([*ActionTable.from_csv("0F0,0B0").ranks, ()]), "idle")


def test_ranks_that_would_wait_for_ever_are_refused() -> None:
    with pytest.raises(ScheduleError, match="deadlocks: its ranks wait for each other") as refused:
        schedule_of_table(ActionTable.from_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n"), "stuck.csv")
    assert refused.value.where == "stuck.csv"
    assert refused.value.observed == "line 1 for 1B0, line 2 for 0F1"


def test_an_option_is_a_name_a_file_or_a_table(tmp_path: Path) -> None:
    table, path, odd_name = ActionTable.from_csv(ODD), tmp_path / "mine.csv", tmp_path / "table.txt"
    path.write_text(ODD)
    odd_name.write_text(ODD)
    assert schedule_of("zb_h1") is SCHEDULES["zb_h1"]
    of_table = schedule_of(table)
    assert of_table is not None
    for given in (path, str(path), odd_name):
        found = schedule_of(given)
        assert found is not None
        assert (found.name, found.table) == (str(given), of_table.table)
    assert [schedule_of(value) for value in ("zb_h7", "", None, 3, [])] == [None] * 5
    with pytest.raises(ScheduleError, match="Cannot read the schedule table") as refused:
        schedule_of(str(tmp_path / "absent.csv"))
    assert refused.value.where == str(tmp_path / "absent.csv")
    assert "No such file" in str(refused.value.observed)


def test_another_number_of_microbatches_than_the_tables_is_refused() -> None:
    table = ActionTable.from_csv(ODD)
    for count in ("auto", 4):
        assert wanted_schedule(table, count).num_microbatches == 4
    with pytest.raises(ScheduleError, match="differs from the number of microbatches in the schedule table") as refused:
        wanted_schedule(table, 8)
    assert refused.value.observed == "FxPipeStrategy(num_microbatches=8) and a table for 4"
    assert wanted_schedule("1f1b", 8) is SCHEDULES["1f1b"]
