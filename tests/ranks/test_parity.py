"""The matrix: model x schedule x stages x microbatches, ten optimizer steps, against the same module on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from lightning_fxpipe import FxPipeStrategy
from tests.lit import fit_and_record
from tests.ranks.pool import RankPool

TOLERANCE = 1e-5

CASES = [
    (model, schedule, stages, microbatches)
    for stages in (2, 3, 4)
    for model in ("mlp", "gpt", "resnet", "unet")
    for schedule in ("gpipe", "1f1b")
    for microbatches in ((1,) if model == "resnet" else (1, 4, 5))
]
# Masks and tables are computed by each stage, from buffers that several stages then hold.
CASES += [("rotary", "1f1b", stages, 5) for stages in (2, 4)]
# Every model, schedule and number of stages with some numbers of microbatches, four stages for one model; the rest of the
# matrix is slow.
OFTEN = {("gpipe", 2, 1), ("1f1b", 3, 4), ("1f1b", 4, 5)}


def is_for_every_change(case: tuple[str, str, int, int]) -> bool:
    model, _, stages, _ = case
    return case[1:] in OFTEN and (stages < 4 or model == "rotary")


MARKED = [pytest.param(*case, marks=() if is_for_every_change(case) else pytest.mark.slow) for case in CASES]


@cache
def reference(model: str) -> dict[str, Any]:
    return fit_and_record(model)


def pipelined_fit(model: str, schedule: str, stages: int, microbatches: int) -> dict[str, Any]:
    """Runs on every rank."""
    strategy = FxPipeStrategy(schedule=schedule, num_microbatches=microbatches)  # type: ignore[arg-type]
    return fit_and_record(model, strategy=strategy, devices=stages)


@pytest.mark.parametrize(("model", "schedule", "stages", "microbatches"), MARKED)
def test_equals_one_device(ranks: Callable[[int], RankPool], model: str, schedule: str, stages: int, microbatches: int) -> None:
    expected = reference(model)
    results = ranks(stages).run(pipelined_fit, model, schedule, stages, microbatches)
    assert expected["global_step"] == 10
    state: dict[str, torch.Tensor] = {}
    gradients: list[dict[str, torch.Tensor]] = [{} for _ in range(10)]
    for result in results:
        assert result["global_step"] == 10
        assert result["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
        assert result["metrics"] == pytest.approx(expected["metrics"], abs=TOLERANCE)
        for step, found in enumerate(result["gradients"]):
            for fqn, gradient in found.items():
                torch.testing.assert_close(
                    gradient, expected["gradients"][step][fqn], rtol=1e-5, atol=TOLERANCE, msg=f"{step} {fqn}"
                )
            gradients[step] |= found
        for fqn, value in result["state"].items():
            torch.testing.assert_close(value, expected["state"][fqn], rtol=0, atol=TOLERANCE, msg=fqn)
        state |= result["state"]
    assert state.keys() == expected["state"].keys()
    assert [found.keys() for found in gradients] == [found.keys() for found in expected["gradients"]]
