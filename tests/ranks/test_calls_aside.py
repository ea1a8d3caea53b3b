"""A step may change what it has from elsewhere between two calls of the model: the last stage does so, once for a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks.pool import RankPool
from tests.ranks.runs import NetWithLoss, Run, compare, go

Ranks = Callable[[int], RankPool]


class Between(NetWithLoss):
    """Both steps call two parts of the model, and :meth:`change` something between the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = torch.zeros(12)
        self.by_name = {"sums": [torch.zeros(12)]}
        self.register_buffer("centre", torch.zeros(12))
        self.register_buffer("bank", torch.zeros(9, 12))
        self.also_centre = [self.centre]

    def change(self, h: Tensor) -> None:
        """Changes something."""

    def loss(self, batch: Any) -> Tensor:
        h = self.backbone(batch[0])
        self.change(h.detach())
        return nn.functional.cross_entropy(self.head(h), batch[1])


class Histogram(Between):
    def change(self, h: Tensor) -> None:
        self.counts += torch.bincount(h.argmax(1), minlength=12)


class InAList(Between):
    """A tensor that no attribute of a module is: recorded code sees it as it is, and not as a fake."""

    def change(self, h: Tensor) -> None:
        self.by_name["sums"][0].add_(h.sum(0))
        self.log("largest", self.by_name["sums"][0].max())


class Average(Between):
    """What has changed is used at once, by several calls, and what it was after both calls."""

    def change(self, h: Tensor) -> None:
        self.centre.mul_(0.9).add_(h.mean(0), alpha=0.1)
        share = self.centre / self.centre.abs().sum()
        share.clamp_(min=0)
        self.counts = share * 2
        self.log("share", share.sum())


class Written(Between):
    """By an index, and by ``out=``."""

    def change(self, h: Tensor) -> None:
        self.bank[2:5] = h[:3]
        torch.add(self.centre, h.mean(0), out=self.centre)


class UsedByTheNextCall(Between):
    """No stage would have it in time, so that every rank runs the step."""

    def loss(self, batch: Any) -> Tensor:
        h = self.backbone(batch[0])
        self.centre.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return nn.functional.cross_entropy(self.head(h - self.centre), batch[1])


def whats_left(trainer: Any, module: Any, folder: Path) -> Any:
    assert module.also_centre[0] is module.centre
    return module.counts, module.by_name, module.centre, module.bank


def between(module: Any, **more: Any) -> Run:
    return Run(module=module, look=whats_left, **more)


RUNS: dict[str, Run] = {
    "histogram": between(Histogram),
    "in a list": between(InAList),
    "average": between(Average),
    "average, by turns": between(Average, strategy={"num_microbatches": 2, "schedule": "1f1b"}),
    "written": between(Written),
    "used": Run(module=UsedByTheNextCall),
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    return go(RUNS[name], Path(folder) / f"{name}{stages}", stages)


OFTEN = ["in a list", "average"]
SELDOM = [pytest.param([name], marks=pytest.mark.slow, id=name) for name in sorted(RUNS.keys() - set(OFTEN))]


@pytest.mark.parametrize("names", [pytest.param(OFTEN, id="some"), *SELDOM])
def test_what_changes_between_calls_is_that_of_one_device(ranks: Ranks, tmp_path: Path, names: list[str]) -> None:
    compare(ranks, do, names, tmp_path, 2)
