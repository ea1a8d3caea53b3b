"""Hooks that recorded code registers and removes again are no part of a graph: the code stays whole, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.errors import TraceError
from tests.traces import WIDTH, batch, names, trace


class Halved(nn.Module):
    """Halves the input of its second layer by a hook."""

    stays = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.handle: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.handle is None:
            self.handle = self.second.register_forward_pre_hook(lambda module, args: (args[0] / 2,))
        y: Tensor = self.second(self.first(x))
        if not self.stays:
            self.handle.remove()
            self.handle = None
        return y


class Staying(Halved):
    """Registers its hook once and for all."""

    stays = True


class Holder(nn.Module):
    """Calls a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return y + 1


def test_a_block_that_registers_a_hook_for_its_own_call_stays_whole() -> None:
    model = Holder(Halved())
    traced = trace(model, batch(), opened=("block",))
    assert names(traced) == ["block", "add"]
    assert "registers a hook on block.second and removes it again" in traced.kept_whole["block"]


def test_a_model_that_does_so_in_its_own_forward_is_refused() -> None:
    with pytest.raises(TraceError, match=r"it registers a hook on second and removes it again"):
        trace(Halved(), batch())


def test_a_hook_that_stays_is_one_of_the_module() -> None:
    model = Holder(Staying())
    model(torch.ones(2, WIDTH))
    assert names(trace(model, batch(), opened=("block",))) == ["block.first", "block.second", "add"]
