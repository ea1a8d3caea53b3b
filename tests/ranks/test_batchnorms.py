"""BatchNorm's running statistics in a pipeline are those of the whole batch, at whatever stage and with either schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe import FxPipeStrategy
from tests.lit import make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net


class Normalised(Net):
    """Layers that see the batch as it comes: what they track does not depend on how others normalise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.BatchNorm1d(12), nn.BatchNorm1d(12, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(self.first(x)) + self.last(x * 2))


def fit(batch_size: int = 8, **options: Any) -> dict[str, Any]:
    module = Normalised()
    module.batch_size = batch_size
    trainer = make_trainer(max_epochs=2, **options)
    trainer.fit(module, module.train_dataloader())
    return {
        fqn: value for fqn, value in module.state_dict().items() if fqn.startswith(("first", "last")) and "weight" not in fqn
    }


def fit_in_stages(schedule: Any, batch_size: int) -> dict[str, Any]:
    """Runs on every rank."""
    return fit(batch_size, strategy=FxPipeStrategy(num_microbatches=3, schedule=schedule), devices=2)


@pytest.mark.parametrize(("schedule", "batch_size"), [("gpipe", 8), ("1f1b", 8), ("gpipe", 3)])
def test_running_statistics_are_those_of_one_device(ranks: Callable[[int], RankPool], schedule: str, batch_size: int) -> None:
    """With three samples too, of which three microbatches would have one each, over which a layer cannot normalise."""
    expected = {fqn: value for fqn, value in fit(batch_size).items() if "running" in fqn or "num" in fqn}
    for found in ranks(2).run(fit_in_stages, schedule, batch_size):
        for fqn, value in expected.items():
            torch.testing.assert_close(found[fqn], value, rtol=1e-5, atol=1e-6, msg=fqn)
