"""Modules, hooks and forwards that user code puts into the model during the run act as on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import nn

from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go

Ranks = Callable[[int], RankPool]


class Block(nn.Module):
    """Has most of the parameters, so that the cut falls into it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 12)

    def forward(self, x: Any) -> Any:
        h = self.first(x)
        return x + self.second(h if self.act is None else self.act(h))


class Cut(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = Block()


class Changes(L.Callback):
    def __init__(self, hook: str, change: Callable[[Any], Any]) -> None:
        self.change = change
        setattr(self, hook, self.make_change)

    def make_change(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.current_epoch == trainer.max_epochs - 1:  # type: ignore[operator]
            self.change(module)


def change_of(hook: str, change: Callable[[Any], Any], epochs: int = 2) -> Run:
    return Run(module=Cut, callbacks=lambda folder: [Changes(hook, change)], options={"max_epochs": epochs})


def another_activation(module: Any) -> None:
    module.backbone.act = nn.Tanh()


def no_activation(module: Any) -> None:
    module.backbone.act = None


def halve(module: Any, args: Any, result: Any) -> Any:
    return result / 2


def hook(module: Any) -> None:
    module.backbone.act.register_forward_hook(halve)
    module.head.register_forward_hook(halve)


def hook_around_cut(module: Any) -> None:
    module.backbone.register_forward_hook(halve)


def forward(module: Any) -> None:
    block = module.backbone
    block.forward = lambda x: x + block.second(block.first(x).sigmoid())


EPOCH, START = "on_train_epoch_start", "on_train_start"
RUNS: dict[str, Run] = {
    "another activation in the second epoch": change_of(EPOCH, another_activation),
    "another activation at the start": change_of(START, another_activation, 1),
    "no activation in the second epoch": change_of(EPOCH, no_activation),
    "hooks in the second epoch": change_of(EPOCH, hook),
    "hooks at the start": change_of(START, hook, 1),
    "hooks around the cut in the second epoch": change_of(EPOCH, hook_around_cut),
    "hooks around the cut at the start": change_of(START, hook_around_cut, 1),
    "a forward in the second epoch": change_of(EPOCH, forward),
    "a forward at the start": change_of(START, forward, 1),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_change_in_the_model_has_its_effect(ranks: Ranks, tmp_path: Path, name: str) -> None:
    compare(ranks, do, [name], tmp_path, 2)


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    path = Path(folder) / name.replace(" ", "_") / str(stages)
    path.mkdir(parents=True, exist_ok=True)
    return go(RUNS[name], path, stages)
