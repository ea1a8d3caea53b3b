"""Attributes that a step sets on modules between two calls of the model count in the second call only.

A stage makes all calls of a region at once, with the attributes as they are then: of adapters that are switched off for a
reference call, both calls had the same. Such steps run on every rank, each call as a pipeline of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.ranks.pool import RankPool
from tests.ranks.runs import NetWithLoss, Run, compare, go


class Adapted(nn.Module):
    """A layer with an adapter that can be switched off, as those of LoRA."""

    enabled = True

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(12, 12), nn.Linear(12, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if self.enabled:
            y = y + self.adapter(x)
        return torch.tanh(y)


class Reference(NetWithLoss):
    """Compares with a call without adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*(Adapted() for _ in range(3)))

    @contextmanager
    def reference(self) -> Iterator[None]:
        for block in self.backbone:
            block.enabled = False  # type: ignore[assignment]
        yield
        for block in self.backbone:
            block.enabled = True  # type: ignore[assignment]

    def loss(self, batch: Any) -> Tensor:
        found = self(batch[0])
        with self.reference(), torch.no_grad():
            wanted = self(batch[0])
        return cross_entropy(found, batch[1]) + (found - wanted).square().mean()


class ReferenceFirst(Reference):
    def loss(self, batch: Any) -> Tensor:
        with self.reference(), torch.no_grad():
            wanted = self(batch[0])
        found = self(batch[0])
        return cross_entropy(found, batch[1]) + (found - wanted).square().mean()


class OfTheClass(Reference):
    """The switch is one for all adapters."""

    @contextmanager
    def reference(self) -> Iterator[None]:
        Adapted.enabled = False
        try:
            yield
        finally:
            Adapted.enabled = True


class InEvaluationMode(Reference):
    """The reference is that of evaluation, in modules of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh()) for _ in range(3)))

    @contextmanager
    def reference(self) -> Iterator[None]:
        was_training = self.training
        self.eval()
        yield
        self.train(was_training)


class Slope(Reference):
    """Sets an attribute of modules of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.LeakyReLU(0.3)) for _ in range(3)))

    @contextmanager
    def reference(self) -> Iterator[None]:
        for _, activation in self.backbone:  # type: ignore[misc]
            activation.negative_slope = 0.1
        yield
        for _, activation in self.backbone:  # type: ignore[misc]
            activation.negative_slope = 0.3


class Tasks(NetWithLoss):
    """Chooses a head between calls of a submodule."""

    def loss(self, batch: Any) -> Tensor:
        self.backbone[1].chosen = 1
        first = self.head(self.backbone(batch[0]))
        self.backbone[1].chosen = 0
        return cross_entropy(self.head(self.backbone(batch[0])), batch[1]) + cross_entropy(first, batch[1])

    def __init__(self) -> None:
        super().__init__()
        self.backbone[1] = Chosen()


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.chosen = nn.ModuleList(nn.Linear(12, 12) for _ in range(2)), 0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers[self.chosen](x))


CASES: dict[str, tuple[type[NetWithLoss], int]] = {
    "reference": (Reference, 2),
    "reference first": (ReferenceFirst, 2),
    "of the class": (OfTheClass, 2),
    "in evaluation mode": (InEvaluationMode, 1),
    "slope": (Slope, 4),
    "tasks": (Tasks, 2),
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    """A short run."""
    module, num_microbatches = CASES[name]
    return go(Run(module=module, strategy={"num_microbatches": num_microbatches}), Path(folder) / f"{name}{stages}", stages)


@pytest.mark.parametrize("names", [[*CASES][:3], [*CASES][3:]], ids=["adapters", "others"])
def test_each_call_has_what_is_set_for_it(ranks: Callable[[int], RankPool], tmp_path: Path, names: list[str]) -> None:
    compare(ranks, do, names, tmp_path, 2)
