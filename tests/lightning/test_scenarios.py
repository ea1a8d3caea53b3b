"""Lightning's own promises hold with this strategy: see ``scenarios``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lightning.scenarios import SCENARIOS, do
from tests.ranks.pool import RankPool
from tests.ranks.runs import assert_same


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_is_that_of_plain_lightning(name: str, tmp_path: Path) -> None:
    assert_same(do([name], str(tmp_path), 1), do([name], str(tmp_path), 0), name)


# A logger is written to, and predictions are made, there.
ONLY_ON_RANK_0 = {"logged_names", "several_loaders"}
# What one stage cannot show.
IN_TWO_STAGES = [
    *("early_stopping", "checkpoints: top 2", "accumulation_by_epoch", "backbone", "weight_averaging", "skipped_batches"),
    *("stop_by_hand", "generator_as_loader", "manual", "schedulers", "no_optimizer", "logged_names", "several_loaders"),
    *("length: val_check_interval", "length: clip by norm", "combined: max_size", "old_checkpoint"),
]


def test_scenarios_in_two_stages_are_those_of_plain_lightning(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    expected = do(IN_TWO_STAGES, str(tmp_path), 0)
    by_rank = ranks(2).run(do, IN_TWO_STAGES, str(tmp_path), 2, timeout_seconds=240)
    for name, plain, *found in zip(IN_TWO_STAGES, expected, *by_rank, strict=True):
        for rank, one in enumerate(found):
            if rank == 0 or name not in ONLY_ON_RANK_0:
                assert_same(one, plain, f"{name}, rank {rank}")
