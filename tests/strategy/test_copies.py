"""Forwards that copy tensors with ``copy.deepcopy``: torch would copy the memory of fakes, which have none."""

from __future__ import annotations

import copy
import gc
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

from lightning_fxpipe import FxPipeStrategy
from tests.lit import make_trainer

WIDTH = 4


class Scale(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor
        self.add_state("total", default=torch.tensor(2.0), dist_reduce_fx="sum")  # which copies it

    def update(self) -> None:
        pass

    def compute(self) -> Tensor:
        return self.total


class MakesAMetric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * Scale().total


class Copies(MakesAMetric):
    def forward(self, x: Tensor) -> Tensor:
        one = torch.ones(WIDTH)
        first, second = copy.deepcopy([one, one])
        assert first is second
        return self.layers(x) * first.add_(1)


class Model(L.LightningModule):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.model = nn.Sequential(kind(), nn.Linear(WIDTH, WIDTH))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0]).square().mean()

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(kind: type[nn.Module], **options: Any) -> list[float]:
    module = Model(kind)
    data = TensorDataset(torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1)))
    make_trainer(max_epochs=1, **options).fit(module, DataLoader(data, 4))
    return module.losses


@pytest.mark.parametrize("kind", [MakesAMetric, Copies])
def test_a_forward_may_copy_tensors(kind: type[nn.Module]) -> None:
    """The process could crash when the garbage of a recording was collected: bytes had been copied from and to nowhere."""
    there = _fit(kind, strategy=FxPipeStrategy(num_stages=2, num_microbatches=2))
    gc.collect()
    torch.testing.assert_close(there, _fit(kind), rtol=1e-5, atol=1e-6)
