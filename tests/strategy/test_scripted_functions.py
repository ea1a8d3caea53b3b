"""Functions of ``torch.jit.script`` in recorded code, and parameter-free modules of torch before the model is called.

TorchScript calls operators without asking function modes, by which recorded code is seen: what such a function returned was
unknown to the recorder.
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy
from tests.lit import Recorder, make_trainer

WIDTH = 4


@torch.jit.script
def gated(x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    return torch.tanh(x) * torch.sigmoid(gate) * scale


@torch.jit.script
def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(-1, keepdim=True), x.std(-1, keepdim=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return gated(self.value(x), self.gate(x))


class InForward(L.LightningModule):
    """The forward that is cut calls them between its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            mean, deviation = moments(x)
            x = gated(layer((x - mean) / deviation), x, scale=2.0)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class InBlocks(InForward):
    """Blocks call them, and the step reads a value of the batch, so that it is a region of several calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = layer(x)
        offset = float(int(y.numel()) + int(batch[0].sum() > 1e6))
        return gated(self.head(x) - y, y).square().mean() + offset


class PadsBefore(InForward):
    """A branch on what a parameter-free module of torch makes of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.pad, self.out = nn.ConstantPad1d((0, 2), 1.0), nn.Linear(WIDTH + 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[1](self.layers[0](x[:, :WIDTH]).tanh())
        self.kept = {"hidden": hidden}  # a later look at it needs the step's own region
        return self.head(hidden) + self.out(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.pad(batch[0])
        if x[:, :2].sum() > 0:
            x = -x
        loss = (self(x) - batch[1]).square().mean()
        if torch.isnan(loss):
            raise ValueError("no number")
        return loss + self.kept["hidden"].square().mean()


class DropsBefore(PadsBefore):
    """One that draws has no value that is known in advance."""

    def __init__(self) -> None:
        super().__init__()
        self.pad = nn.Sequential(nn.ConstantPad1d((0, 2), 1.0), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[0](x[:, :WIDTH])) + self.out(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.pad(batch[0])
        return (self(-x if x[:, :2].sum() > 0 else x) - batch[1]).square().mean()


def _fit(kind: type[InForward], **options: Any) -> tuple[InForward, Recorder]:
    module, recorder, generator = kind(), Recorder(), torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, WIDTH, generator=generator), torch.randn(24, 1, generator=generator))
    torch.manual_seed(3)
    make_trainer(max_epochs=1, callbacks=[recorder], **options).fit(module, DataLoader(data, 4))
    return module, recorder


@pytest.mark.parametrize(
    ("kind", "num_microbatches"),
    [(InForward, 2), (InBlocks, 1), (InBlocks, 2), (PadsBefore, 2), (DropsBefore, 1)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_steps_equal_one_device(kind: type[InForward], num_microbatches: int) -> None:
    module, recorder = _fit(kind, strategy=FxPipeStrategy(num_stages=2, num_microbatches=num_microbatches))
    alone, of_one = _fit(kind)
    torch.testing.assert_close(recorder.losses, of_one.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(recorder.gradients, of_one.gradients, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module.state_dict(), alone.state_dict(), rtol=1e-4, atol=1e-5)


def test_their_sizes_may_change() -> None:
    """TorchScript would fix the sizes of fakes for good, and each batch would be one microbatch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*single microbatch")
        for kind in (InForward, InBlocks):
            strategy = FxPipeStrategy(num_stages=2, num_microbatches=2)
            _fit(kind, strategy=strategy)
            assert not strategy.plan.joint_reason
