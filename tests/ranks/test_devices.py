"""Devices that are not equal, and modules whose stage the user chooses: what is cut so trains as one device does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fxpipe import FxPipeStrategy, PartitionError
from tests.lit import fit_and_record
from tests.ranks.pool import RankPool

TOLERANCE = 1e-5


@cache
def reference(model: str) -> dict[str, Any]:
    return fit_and_record(model)


def fit(model: str, options: dict[str, Any]) -> dict[str, Any]:
    strategy = FxPipeStrategy(**options)
    result = fit_and_record(model, strategy=strategy, devices=2)
    plan = strategy.plan
    return {**result, "held": [plan.num_held(stage.index) for stage in plan.stages], "stages": plan.stages}


def check(results: list[dict[str, Any]], model: str) -> None:
    expected, state = reference(model), dict[str, Tensor]()
    for result in results:
        assert result["stages"] == results[0]["stages"]
        assert result["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
        state |= result["state"]
    assert state.keys() == expected["state"].keys()
    for fqn, value in state.items():
        torch.testing.assert_close(value, expected["state"][fqn], rtol=0, atol=TOLERANCE, msg=fqn)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zbv_zero_bubble"])
def test_a_faster_device_gets_more(ranks: Callable[[int], RankPool], schedule: str) -> None:
    results = ranks(2).run(fit, "mlp", {"device_speeds": [1, 3], "schedule": schedule})
    check(results, "mlp")
    held = results[0]["held"]
    is_v = schedule == "zbv_zero_bubble"
    of_rank_0 = held[0] + held[-1] if is_v else sum(held[1::2])
    assert of_rank_0 < 0.4 * sum(held)


def test_modules_are_in_the_stages_that_the_user_chooses(ranks: Callable[[int], RankPool]) -> None:
    options = {"stage_of": {"*blocks.0": 0, "*blocks.1": -1}, "balance": "flops", "schedule": "1f1b"}
    results = ranks(2).run(fit, "gpt", options)
    check(results, "gpt")
    first, last = results[0]["stages"]
    assert any("blocks.0." in fqn for fqn in first.fqns)
    assert not any("blocks.0." in fqn for fqn in last.fqns)
    assert not any("blocks.1." in fqn for fqn in first.fqns)


@pytest.mark.parametrize("balance", ["parameters", "memory", "seconds", "auto"])
def test_the_memory_that_is_left_is_asked_for_on_every_rank(ranks: Callable[[int], RankPool], balance: str) -> None:
    check(ranks(2).run(fit, "mlp", {"device_memory_gib": "auto", "balance": balance}), "mlp")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_recomputation_knows_what_several_stages_on_a_device_keep(schedule: str) -> None:
    """These are schedules of other names where they are simulated."""
    options = {"schedule": schedule, "stages_per_rank": 2, "activation_checkpointing": "auto", "device_memory_gib": 1e-4}
    strategy = FxPipeStrategy(**options)  # type: ignore[arg-type]
    result = fit_and_record("gpt", strategy=strategy, devices=1)
    assert strategy.plan.checkpointed_modules
    check([{**result, "stages": strategy.plan.stages}], "gpt")


def refusal(options: dict[str, Any]) -> str:
    with pytest.raises(PartitionError) as caught:
        fit("mlp", options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"device_memory_gib": [1, 1e-6]}, "No partition into 2 stages fits in the devices' memory"),
        ({"device_memory_gib": 1e-6, "balance": "seconds"}, "fits in memory"),
        ({"device_memory_gib": [1, 1, 1]}, "3 entries for 2"),
        ({"device_speeds": [1]}, "The number of entries in device_speeds differs from the number of devices"),
        ({"stage_of": {"absent": 0}}, "A pattern in stage_of matches no module"),
        ({"stage_of": {"*": 0}}, "stages assigned by stage_of are impossible"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(ranks: Callable[[int], RankPool], options: dict[str, Any], told: str) -> None:
    for text in ranks(2).run(refusal, options):
        assert told in text
