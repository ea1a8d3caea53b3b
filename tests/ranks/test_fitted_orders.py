"""Orders that are made from what a plan's stages take: all ranks run the simulated one, and it trains as one device does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fxpipe import FxPipeStrategy, PartitionPlan, Recording, read_recording
from lightning_fxpipe.recording.expected import table_of
from lightning_fxpipe.simulation import ActionTable, by_name, simulate
from lightning_fxpipe.simulation.costs import StageCosts, even
from lightning_fxpipe.simulation.simulator import run_table
from tests.lit import LitModel, fit_and_record, make_loader, make_trainer
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]
TOLERANCE = 1e-5
NUM_MICROBATCHES = 8
COST = StageCosts(forward_seconds=1, input_backward_seconds=1, weight_backward_seconds=1, activation_bytes=1, weight_bytes=0.5)
# Stages of one layer, of three, or of the table alone.
POINTS = {"zero_bubble": ["model.blocks.1"], "zero_bubble_v": ["model.blocks.0", "model.blocks.1", "model.head"]}


@cache
def reference() -> dict[str, Any]:
    return fit_and_record("gpt")


def fit(schedule: Any, folder: str, saved: str | None = None) -> dict[str, Any]:
    """Runs on every rank."""
    cuts: Any = {"plan": saved} if saved else {"split_points": POINTS[schedule]}
    record = Recording(folder, first_step=1, num_steps=2)
    strategy = FxPipeStrategy(schedule=schedule, num_microbatches=NUM_MICROBATCHES, record=record, **cuts)
    result = fit_and_record("gpt", strategy=strategy, devices=2)
    if strategy.is_global_zero:
        strategy.plan.save(Path(folder) / "plan.json")
    return {**result, "plan": strategy.plan}


def executed(folder: Path) -> ActionTable:
    first, second = (table_of(timeline) for timeline in read_recording(folder)[:2])
    assert first is not None
    assert first == second
    return first


@pytest.mark.parametrize("schedule", POINTS)
def test_every_rank_runs_the_order_for_the_plans_costs(ranks: Ranks, tmp_path: Path, schedule: Any) -> None:
    results = ranks(2).run(fit, schedule, str(tmp_path))
    plan: PartitionPlan = results[0]["plan"]
    assert results[1]["plan"] == plan
    costs = tuple(each.costs for each in plan.stage_work)
    assert max(cost.forward_seconds for cost in costs) > 2 * min(cost.forward_seconds for cost in costs)
    wanted = simulate(costs, num_microbatches=NUM_MICROBATCHES, schedule=schedule)
    assert executed(tmp_path) == wanted.table
    assert wanted.table != by_name.table_of(schedule, [COST] * len(costs), NUM_MICROBATCHES)
    equal = by_name.table_of(schedule, even(costs), NUM_MICROBATCHES)
    assert wanted.seconds <= run_table(equal, costs).seconds
    assert_equals_one_device(results)
    # A run that goes on from the saved plan has the same order; nothing is looked at anew.
    again = tmp_path / "again"
    for result in ranks(2).run(fit, schedule, str(again), str(tmp_path / "plan.json")):
        assert result["plan"] == plan
    assert executed(again) == wanted.table


def assert_equals_one_device(results: list[dict[str, Any]]) -> None:
    expected = reference()
    state: dict[str, Tensor] = {}
    gradients: list[dict[str, Tensor]] = [{} for _ in range(10)]
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
        for step, found in enumerate(result["gradients"]):
            gradients[step] |= found
        state |= result["state"]
    torch.testing.assert_close(state, expected["state"], rtol=0, atol=TOLERANCE)
    for step, (found, wanted) in enumerate(zip(gradients, expected["gradients"], strict=True)):
        assert found.keys() == wanted.keys()
        for fqn, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[fqn], rtol=1e-5, atol=TOLERANCE, msg=f"{step} {fqn}")


@pytest.mark.parametrize(("options", "tells"), [({"schedule": "zb_h1"}, False), ({"schedule": "zero_bubble"}, True)])
def test_only_a_schedule_that_needs_it_has_its_stages_looked_at(options: Any, tells: bool) -> None:
    """In a fit; a validation has no order."""
    for balance in ("parameters", "flops", "seconds", "auto"):
        strategy = FxPipeStrategy(balance=balance, num_microbatches=2, gather_after_run=True, **options)  # type: ignore[arg-type]
        trainer = make_trainer(strategy=strategy, max_epochs=1, limit_train_batches=1, limit_val_batches=1)
        module = LitModel("mlp")
        trainer.validate(module, make_loader("mlp"), verbose=False)
        assert strategy.plan.stage_work == ()
        trainer.fit(module, make_loader("mlp"))
        assert bool(strategy.plan.stage_work) == tells
