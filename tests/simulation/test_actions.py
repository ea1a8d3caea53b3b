"""Tables are read and written as torch's, and those that nobody could run are refused."""

from __future__ import annotations

import pytest

from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.simulation.actions import Action, ActionTable, Kind
from lightning_fxpipe.simulation.orders import hand_made_zero_bubble, interleaved

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
        ("0F0,0F0,0B0", "0F0 is there twice"),
        ("0F0,0B0\n2F0,2B0", "stages [0, 2]"),
        ("0F0\n0B0", "stage 0 on ranks [0, 1]"),
        ("0F0", "0F0 for microbatch 0 of stage 0"),
        ("0F0,0I0", "0F0, 0I0 for microbatch 0 of stage 0"),
        ("0F0,0B0,0W0", "0F0, 0B0, 0W0 for microbatch 0 of stage 0"),
        ("0F1,0B1", "nothing for microbatch 0 of stage 0"),
        ("0B0,0F0", "microbatch 0 of stage 0 in another order"),
        ("0F0,0W0,0I0", "microbatch 0 of stage 0 in another order"),
    ],
)
def test_what_nobody_could_run_is_refused(text: str, observed: str) -> None:
    with pytest.raises(
        ScheduleError, match="has something in it that is no action|A table of actions cannot be run"
    ) as refused:
        ActionTable.from_csv(text)
    assert refused.value.observed == observed
