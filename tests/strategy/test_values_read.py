"""What recorded code reads is that of today, whatever kind of value user code keeps it in."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy
from tests.lit import make_trainer

WIDTH = 4
WINDOW: deque[float] = deque([1.0], maxlen=2)


@dataclass(slots=True)
class Settings:
    scale: float = 1.0


class Same:
    def __call__(self, x: Tensor) -> Tensor:
        return x


class Halved(Same):
    def __call__(self, x: Tensor) -> Tensor:
        return x / 2


class Reads(L.LightningModule):
    """Keeps a value, ``uses`` it in its forward and ``changes`` it after each batch."""

    def __init__(self, kind: _Kind) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.kind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), kind
        self.value = kind.begin()
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.kind.use(self.value, torch.tanh(self.first(x))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.value = self.kind.change(self.value, self.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


@dataclass(frozen=True)
class _Kind:
    begin: Callable[[], Any]
    use: Callable[[Any, Tensor], Tensor]
    change: Callable[[Any, int], Any]


def _appended(value: deque[Any], item: Any) -> deque[Any]:
    value.append(item)
    return value


def _slotted(value: Settings, scale: float) -> Settings:
    value.scale = scale
    return value


def _multiplies(by: float) -> Callable[[Tensor], Tensor]:
    def multiply(x: Tensor, factor: float = by) -> Tensor:
        return x * factor

    return multiply


KINDS = {
    "tuple": _Kind(lambda: (1.0, 2.0), lambda v, x: x * v[0], lambda v, n: (1.0 + n, 2.0)),
    "default value": _Kind(lambda: _multiplies(1.0), lambda v, x: v(x), lambda v, n: _multiplies(1.0 + n)),
    "deque": _Kind(lambda: deque([1.0], maxlen=3), lambda v, x: x * sum(v), lambda v, n: _appended(v, float(n))),
    "global deque": _Kind(lambda: WINDOW, lambda v, x: x * sum(WINDOW), lambda v, n: _appended(v, float(n % 3))),
    "deque of tensors": _Kind(
        lambda: deque([torch.ones(WIDTH)], maxlen=3), lambda v, x: x * v[-1], lambda v, n: _appended(v, torch.ones(WIDTH) * n)
    ),
    "set": _Kind(set, lambda v, x: x * (1 + len(v)), lambda v, n: v | {n // 3}),
    "slots": _Kind(Settings, lambda v, x: x * v.scale, lambda v, n: _slotted(v, 1.0 + n)),
    "partial": _Kind(
        lambda: partial(torch.mul, other=1.0), lambda v, x: v(x), lambda v, n: partial(torch.mul, other=1.0 + n // 2)
    ),
    "callable": _Kind(Same, lambda v, x: v(x), lambda v, n: Halved() if n > 2 else Same()),
    "decimal": _Kind(lambda: Decimal(1), lambda v, x: x * float(v), lambda v, n: Decimal(1 + n // 2)),
    "large list": _Kind(lambda: [1.0] * 3000, lambda v, x: x * v[2000], lambda v, n: [1.0 + n // 3] * 3000),
}


def _fit(kind: _Kind, **options: Any) -> dict[str, Any]:
    WINDOW.clear()
    WINDOW.append(1.0)
    module = Reads(kind)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, WIDTH, generator=generator), torch.randn(24, WIDTH, generator=generator))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(max_epochs=1, **options).fit(module, DataLoader(data, 4))
    return {"losses": module.losses, "state": {fqn: value.clone() for fqn, value in module.state_dict().items()}}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_value_that_changes_between_steps_counts_whatever_holds_it(kind: _Kind) -> None:
    """Guards compared lists, dicts, arrays and attributes; all else kept the value that it had when it was traced."""
    there = _fit(kind, strategy=FxPipeStrategy(num_stages=2, num_microbatches=2))
    torch.testing.assert_close(there, _fit(kind), rtol=1e-5, atol=1e-6)
