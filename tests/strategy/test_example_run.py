"""When a model summary needs no values of the model."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.strategy.example_run import can_be_summarised_on_fakes


class Lit(L.LightningModule):
    """A module with an example, whose forward also calls ``extra``."""

    def __init__(self, extra: Any = lambda self, x: None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.stats = {"calls": 0}
        self.extra = extra
        self.example_input_array = torch.ones(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.extra(self, x)
        return self.layers(x)


class Counting(Lit):
    def forward(self, x: Tensor) -> Tensor:
        self.stats["calls"] += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Lit(), True),
        (Lit(lambda self, x: torch.arange(3, device=self.device) + x), True),
        (Lit(lambda self, x: torch.rand_like(x)), False),
        (Lit(lambda self, x: random.random()), False),
        (Lit(lambda self, x: x.sum().item()), False),
        (Lit(lambda self, x: x[x > 0]), False),
        (Counting(), False),
    ],
    ids=["plain", "device", "random", "python's random", "values", "sizes", "counts"],
)
def test_a_summary_runs_on_fakes_unless_its_forward_would_be_noticed(module: Lit, expected: bool) -> None:
    weights, generator, python = module.layers[0].weight.clone(), torch.get_rng_state(), random.getstate()
    meta = nn.Parameter(torch.empty(3, 3, device="meta"))
    module.layers[0].weight, own = meta, module.layers[0].weight  # another stage's
    assert can_be_summarised_on_fakes(module, torch.device("cpu")) is expected
    assert module.layers[0].weight is meta
    assert torch.equal(own, weights)
    assert torch.equal(torch.get_rng_state(), generator)
    assert random.getstate() == python
    assert module.stats == {"calls": 0}
    assert module.training
    assert not any(child._forward_hooks for child in module.modules())
