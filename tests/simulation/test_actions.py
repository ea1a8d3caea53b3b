"""Tables are read and written as torch's, and those that nobody could run are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.simulation.actions import Action, ActionTable, Kind
from lightning_fxpipe.simulation.orders import hand_made_zero_bubble, interleaved
from tests.simulation.torch_tables import rows_of

SPLIT = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


def test_a_table_survives_csv() -> None:
    for table in (interleaved(4, 8, stages_per_rank=3), hand_made_zero_bubble(3, 5)):
        assert ActionTable.from_csv(table.to_csv()) == table


def test_empty_cells_mean_nothing() -> None:
    assert ActionTable.from_csv("0F0, ,0B0\n\n,1F0,1B0\n").to_csv() == "0F0,0B0\n1F0,1B0\n"


def test_what_a_table_says() -> None:
    table = ActionTable.from_csv(SPLIT)
    assert (table.num_ranks, table.num_stages, table.num_microbatches, table.is_split) == (2, 2, 2, True)
    assert next(iter(table)) == Action(0, Kind.FORWARD, 0)
    several = interleaved(2, 4, stages_per_rank=2)
    assert several.rank_of_stage == (0, 1, 0, 1)
    assert [several.stages_of(rank) for rank in range(2)] == [(0, 2), (1, 3)]
    assert not several.is_split


@pytest.mark.parametrize(
    ("text", "observed"),
    [
        ("0F0,0X0", "'0X0'"),
        ("0F0,F0", "'F0'"),
        ("", "no action"),
        ("0F0,0F0,0B0", "0F0 occurs twice"),
        ("0F0,0B0\n2F0,2B0", "stages [0, 2]"),
        ("0F0\n0B0", "stage 0 on lines [1, 2]"),
        ("0F0", "0F0 for microbatch 0 of stage 0"),
        ("0F0,0I0", "0F0, 0I0 for microbatch 0 of stage 0"),
        ("0F0,0B0,0W0", "0F0, 0B0, 0W0 for microbatch 0 of stage 0"),
        ("0F1,0B1", "nothing for microbatch 0 of stage 0"),
        ("0B0,0F0", "microbatch 0 of stage 0 in another order"),
        ("0F0,0W0,0I0", "microbatch 0 of stage 0 in another order"),
    ],
)
def test_what_nobody_could_run_is_refused(text: str, observed: str) -> None:
    with pytest.raises(ScheduleError, match="contains an invalid action|schedule table cannot be executed") as refused:
        ActionTable.from_csv(text)
    assert refused.value.observed == observed


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize(
    ("kind", "each"),
    [
        (ScheduleInterleaved1F1B, 1),
        (ScheduleInterleaved1F1B, 2),
        (ScheduleLoopedBFS, 2),
        (ScheduleInterleavedZeroBubble, 2),
        (ScheduleZBVZeroBubble, 2),
        (ScheduleDualPipeV, 2),
    ],
)
def test_what_torch_dumps_can_be_read(kind: Any, each: int, form: str, tmp_path: Path) -> None:
    """With its empty cells, two actions at once, and sends and receives, which follow from the others."""
    stages = [SimpleNamespace(num_stages=2 * each, group_size=2, group_rank=0, submod=None) for _ in range(each)]
    schedule = kind(stages, 4)
    schedule._dump_csv(tmp_path / "torchs.csv", form)
    assert [[str(action) for action in row] for row in ActionTable.load(tmp_path / "torchs.csv").ranks] == rows_of(schedule)


def test_a_file_that_is_no_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    for content, observed in ((b"0F0,0X0", "'0X0'"), (b"\xff\xfe0", "can't decode"), (b"", "no action")):
        path.write_bytes(content)
        with pytest.raises(ScheduleError) as refused:
            ActionTable.load(path)
        assert refused.value.where == str(path)
        assert observed in str(refused.value.observed)
        assert refused.value.todo
    with pytest.raises(ScheduleError, match="Cannot read the schedule table"):
        ActionTable.load(tmp_path)
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n")  # as spreadsheets write it
    assert ActionTable.load(path).to_csv() == "0F0,0B0\n"
