"""A module normalises and later undoes it: statistics of its first call go to the rank that makes the second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.ranks.pool import RankPool
from tests.ranks.runs import NetWithLoss, Run, compare, go


class Reversible(nn.Module):
    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 12))

    def forward(self, x: Tensor, mode: str) -> Tensor:
        if mode == "denorm":
            return x / self.gain * self.std + self.mean
        self.mean, self.std = x.mean(1, keepdim=True).detach(), x.std(1, keepdim=True) + 1e-3
        return (x - self.mean) / self.std * self.gain


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reversible = Reversible()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.reversible(self.layers(self.reversible(x, "norm")), "denorm")


class OneCall(NetWithLoss):
    def __init__(self) -> None:
        super().__init__()
        del self.backbone, self.head
        self.model = Forecaster()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def loss(self, batch: Any) -> Tensor:
        return (self(batch[0]) - batch[0].roll(1, 1)).square().mean()


class CallsOfTheStep(OneCall):
    def forward(self, x: Tensor) -> Tensor:
        return self.model.reversible(self.model.layers(self.model.reversible(x, "norm")), "denorm")


RUNS = {
    "one call": Run(module=OneCall, strategy={"num_microbatches": 4}, options={"max_epochs": 1}),
    # A rank that only undoes it has got the statistics in the order in which it reads them when validation is recorded.
    "validated later": Run(
        module=OneCall, strategy={"num_microbatches": 2}, options={"max_epochs": 1, "num_sanity_val_steps": 0}
    ),
    "the step's": Run(module=CallsOfTheStep, strategy={"num_microbatches": 2, "schedule": "1f1b"}, options={"max_epochs": 1}),
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    return go(RUNS[name], Path(folder) / f"{name}{stages}", stages)


def test_its_statistics_go_where_they_are_used(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    compare(ranks, do, list(RUNS), tmp_path, 2)
