"""A trace in use is recorded again on every rank, also one of a call that a step with manual optimization makes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from lightning_fxpipe import FxPipeError, FxPipeStrategy, PeerError
from tests.lit import make_trainer
from tests.ranks.pool import RankPool
from tests.strategy.test_recheck import Reads, make_data

Ranks = Callable[[int], RankPool]


class ReadsByHand(Reads):
    """Steps its optimizer itself: every rank runs the step, and each call of a model is a pipeline."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def fit(kind: type[Reads]) -> FxPipeError | None:
    module: Any = ModuleType("settings_of_a_test")
    module.scale = 1.0
    sys.modules[module.__name__] = module
    reads = kind(lambda: sys.modules["settings_of_a_test"].scale, lambda: setattr(module, "scale", 2.0))
    try:
        make_trainer(max_epochs=1, strategy=FxPipeStrategy(num_microbatches=2), devices=2).fit(reads, make_data(12))
    except FxPipeError as error:
        return error
    return None


@pytest.mark.parametrize("kind", [Reads, ReadsByHand])
def test_a_value_that_no_guard_sees_ends_the_run_on_every_rank(ranks: Ranks, kind: type[Reads]) -> None:
    pool = ranks(2)
    try:
        errors = pool.run(fit, kind)
    finally:
        pool.kill()
    assert all(error is not None for error in errors)
    own = [error for error in errors if not isinstance(error, PeerError)]
    assert own
    assert all("computes something else than when it was traced" in str(error) for error in own)
