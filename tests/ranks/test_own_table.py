"""Tables of actions of the user's own: they run word for word, and train as one device does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fxpipe import FxPipeError, FxPipeStrategy, PeerError, Recording, UnsupportedError, make_plan, read_recording
from lightning_fxpipe.recording.expected import table_of
from lightning_fxpipe.simulation import ActionTable
from tests.lit import LitModel, fit_and_record, make_loader, make_trainer
from tests.models import make_samples
from tests.owntables import ODD, ONE_F_ONE_B, ONE_RANK, SPLIT_V
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]
TOLERANCE = 1e-5
TABLES = {"1F1B": (ONE_F_ONE_B, 2), "odd": (ODD, 2), "a V": (SPLIT_V, 2), "one rank": (ONE_RANK, 1)}


@cache
def reference(model: str) -> dict[str, Any]:
    return fit_and_record(model)


def fit(model: str, path: str, devices: int, **options: Any) -> dict[str, Any]:
    """Runs on every rank: five steps, twice, the last of each with a smaller batch."""
    strategy = FxPipeStrategy(schedule=path, **options)
    result = fit_and_record(model, strategy=strategy, devices=devices)
    return {**result, "chosen": strategy.plan.chosen, "num_stages": strategy.plan.num_stages}


def assert_equals_one_device(results: list[dict[str, Any]], model: str) -> None:
    expected = reference(model)
    state: dict[str, Tensor] = {}
    gradients: list[dict[str, Tensor]] = [{} for _ in range(10)]
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
        assert result["metrics"] == pytest.approx(expected["metrics"], abs=TOLERANCE)
        for step, found in enumerate(result["gradients"]):
            gradients[step] |= found
        state |= result["state"]
    assert state.keys() == expected["state"].keys()
    for fqn, value in state.items():
        torch.testing.assert_close(value, expected["state"][fqn], rtol=0, atol=TOLERANCE, msg=fqn)
    for step, (found, wanted) in enumerate(zip(gradients, expected["gradients"], strict=True)):
        assert found.keys() == wanted.keys()
        for fqn, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[fqn], rtol=1e-5, atol=TOLERANCE, msg=f"{step} {fqn}")


@pytest.mark.parametrize("name", TABLES)
def test_a_table_runs_word_for_word_and_equals_one_device(ranks: Ranks, tmp_path: Path, name: str) -> None:
    text, devices = TABLES[name]
    path, record = tmp_path / "mine.csv", tmp_path / "record"
    path.write_text(text)
    results = ranks(devices).run(fit, "gpt", str(path), devices, record=Recording(record, first_step=1, num_steps=3))
    assert_equals_one_device(results, "gpt")
    executed = [table_of(timeline) for timeline in read_recording(record)[:3]]
    table = ActionTable.from_csv(text)
    assert [found and {*found.ranks} for found in executed] == [{*table.ranks}] * 3
    assert {result["num_stages"] for result in results} == {table.num_stages}


def test_layers_are_timed_and_recomputed_for_a_table(ranks: Ranks, tmp_path: Path) -> None:
    """It leaves nothing to choose but where to cut."""
    path = tmp_path / "mine.csv"
    path.write_text(SPLIT_V)
    results = ranks(2).run(fit, "gpt", str(path), 2, balance="auto", activation_checkpointing=True)
    assert_equals_one_device(results, "gpt")
    assert [result["chosen"] for result in results] == [None, None]


def fit_with_own(texts: list[str], plan: Any = None) -> Any:
    """Runs on every rank, each with a table of its own; what it has trained, or what it was refused with."""
    table = ActionTable.from_csv(texts[dist.get_rank() % len(texts)])
    try:
        return fit_and_record("mlp", strategy=FxPipeStrategy(schedule=table, plan=plan), devices=2)
    except FxPipeError as error:
        return type(error), str(error)


def test_the_table_of_rank_0_holds_where_files_differ(ranks: Ranks) -> None:
    """As its plan does: in each other's order ranks would wait for ever."""
    fewer = "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n"
    assert_equals_one_device(ranks(2).run(fit_with_own, [ODD, fewer]), "mlp")


def test_tables_that_place_stages_differently_are_refused_on_every_rank(ranks: Ranks) -> None:
    for kind, text in ranks(2).run(fit_with_own, [ODD, SPLIT_V]):
        assert kind in (UnsupportedError, PeerError)
        assert "The ranks of the pipeline disagree on the placement of stages" in text
        assert "rank 1: Placement(num_ranks=2, stages_per_rank=2, is_v=True)" in text


def test_a_saved_plan_goes_with_a_table_of_as_many_stages(ranks: Ranks) -> None:
    plan = make_plan(LitModel("mlp"), make_samples("mlp", 4), num_stages=2)
    assert_equals_one_device(ranks(2).run(fit_with_own, [ODD], plan), "mlp")
    for _, text in ranks(2).run(fit_with_own, [SPLIT_V], plan):
        assert "does not support this number of stages per device" in text


class InBatch(LitModel):
    """A loss that compares samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = torch.nn.functional.normalize(self.model(batch[0]).flatten(1))
        return torch.nn.functional.cross_entropy(found @ found.T, torch.arange(len(found)))


def test_a_loss_that_is_no_sum_over_microbatches_is_refused() -> None:
    strategy = FxPipeStrategy(schedule=ActionTable.from_csv(ONE_RANK))
    trainer = make_trainer(strategy=strategy, max_epochs=1, limit_val_batches=0)
    with pytest.raises(UnsupportedError, match='schedule="ActionTable" does not support this loss'):
        trainer.fit(InBatch("mlp"), make_loader("mlp"))
    assert trainer.global_step == 0


def test_a_batch_with_another_number_of_microbatches_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    strategy = FxPipeStrategy(schedule=ActionTable.from_csv(ONE_RANK), num_microbatches=2)
    trainer = make_trainer(strategy=strategy, max_epochs=2, limit_val_batches=0)
    with caplog.at_level("INFO"):
        trainer.fit(LitModel("mlp"), make_loader("mlp", num_samples=23))
    told = [record.getMessage() for record in caplog.records if "is for 2 microbatches" in record.getMessage()]
    assert told == [
        "The schedule table ActionTable is for 2 microbatches. A batch split into 1 of 4 samples and 1 of 3 samples runs in "
        "GPipe order instead."
    ]
