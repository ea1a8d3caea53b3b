"""A step that checkpoints its calls of the model by itself trains as on one device.

The step's code runs once more around what the stages have computed. Its checkpoints kept the calls, to make them again in the
backward pass, where the stages had nothing to give: torch found other tensors than the first time.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy
from tests.lit import make_trainer

WIDTH = 8


class Checkpointed(L.LightningModule):
    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        L.seed_everything(4, verbose=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)
        self.is_reentrant = is_reentrant

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = batch[0]
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.is_reentrant)
        loss: Tensor = checkpoint(lambda h: (self.head(h) - batch[1]).square().mean(), hidden, use_reentrant=False)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(is_reentrant: bool, **options: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(22, WIDTH, generator=generator), torch.randn(22, 1, generator=generator))
    module = Checkpointed(is_reentrant)
    make_trainer(max_epochs=2, **options).fit(module, DataLoader(data, batch_size=8))
    return dict(module.state_dict())


@pytest.mark.parametrize(
    ("schedule", "is_reentrant"),
    [("gpipe", False), ("1f1b", False), ("zbv_zero_bubble", False), ("gpipe", True), ("looped_bfs", True)],
)
def test_it_equals_one_device(schedule: Any, is_reentrant: bool) -> None:
    strategy = FxPipeStrategy(schedule=schedule, stages_per_rank=2, num_microbatches=4)
    found, expected = fitted(is_reentrant, strategy=strategy), fitted(is_reentrant)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=name)
