"""Which attributes of submodules are sent to every rank: those that their code changes and other code names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.runtime.left_state import places_left, read_by_all
from lightning_fxpipe.user_code.bytecode import names_read

READERS = frozenset({"count", "table", "settings", "meter", "memory", "linear", "running", "seen", "rate"})


class Meter:
    def __init__(self) -> None:
        self.total = 0.0

    def update(self, value: float) -> None:
        self.total += value


class Settings:
    def __init__(self) -> None:
        self.rate = 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.count, self.other, self.rate = 0, 0, 0.5
        self.table: dict[str, int] = {}
        self.meter, self.settings = Meter(), Settings()
        self.memory = torch.zeros(2)
        self.register_buffer("running", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.other += 1  # not among the names that are read
        self.seen = x
        self.table["calls"] = self.count
        self.meter.update(1.0)
        self.memory.add_(1)
        return self.linear(x) * self.rate * self.settings.rate  # which it only reads


def test_what_code_changes_and_others_name() -> None:
    root = nn.Sequential(Block(), nn.Linear(2, 2))
    assert places_left(root, READERS) == {"0": {"count", "table", "meter", "memory", "seen"}}
    assert places_left(root, frozenset({"rate", "settings", "linear"})) == {}


def test_what_a_forward_hook_sets_on_its_layer() -> None:
    root = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def keep(layer: Any, args: Any, result: Tensor) -> None:
        layer.seen = result

    root[1].register_forward_hook(keep)
    assert places_left(root, READERS) == {"1": {"seen"}}


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Reports()])
        self.kept: dict[str, Tensor] = {}
        self.blocks[0].register_forward_hook(lambda layer, args, result: self.kept.update(inside=result))

    def on_train_batch_end(self) -> None:
        self.kept.clear()
        self.last = self.blocks[0].report()


class Reports(Block):
    def report(self) -> Any:
        return self.meter.total


def test_hooks_read_what_they_and_the_methods_they_call_load() -> None:
    names = read_by_all(Root(), runs_steps=False)
    assert {"blocks", "report", "meter", "total"} <= names
    assert not {"kept", "last", "inside"} & names


@pytest.mark.parametrize(("function", "expected"), [(lambda a: a.x.y, {"x", "y"}), (lambda a: a.x.clear(), {"clear"})])
def test_what_is_only_emptied_is_not_read(function: Any, expected: set[str]) -> None:
    assert names_read(function.__code__) == expected
