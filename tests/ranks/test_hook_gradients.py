"""Gradients that a hook computes itself, of a model whose other stages it sees as copies, are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.ranks.pool import RankPool
from tests.ranks.runs import NetWithLoss, Run, compare, go


class Fisher(NetWithLoss):
    """Measures after each epoch how much each parameter matters, as elastic weight consolidation does."""

    def clear(self) -> None:
        self.zero_grad()

    def on_train_epoch_end(self) -> None:
        data = torch.randn(8, 12, generator=torch.Generator().manual_seed(8)), torch.arange(8) % 5
        total = 0.0
        for half in (slice(0, 4), slice(4, 8)):
            self.clear()
            with torch.enable_grad():
                cross_entropy(self(data[0][half]), data[1][half]).backward()
                cross_entropy(self(data[0]), data[1]).backward()
            total += sum(float(p.grad.square().sum()) for p in self.parameters())  # type: ignore[union-attr]
        self.log("fisher", total)
        self.clear()


class ByHand(Fisher):
    def clear(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None


class ByOptimizer(Fisher):
    def clear(self) -> None:
        self.optimizers().zero_grad()  # type: ignore[union-attr]


CASES = {"of the module": Fisher, "by hand": ByHand, "of the optimizer": ByOptimizer}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    """A short run."""
    return go(Run(module=CASES[name]), Path(folder) / f"{name}{stages}", stages)


@pytest.mark.parametrize("stages", [2, 3])
def test_gradients_of_a_hook_are_those_of_one_device(ranks: Callable[[int], RankPool], tmp_path: Path, stages: int) -> None:
    """They were gone where the hook had taken away or looked at the old ones before."""
    compare(ranks, do, [*CASES], tmp_path, stages)
