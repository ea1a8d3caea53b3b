"""Recorded code reads present values, whatever holds them."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from os import environ
from typing import Any
from weakref import ref

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
    scale = 1.0

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


class Entries:
    """Has entries as attributes, and raises KeyError for all others: whoever asks it for anything else fails."""

    def __init__(self) -> None:
        self.entries = {"scale": 1.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["entries"][name]


ENTRIES = Entries()


def _entry(scale: float) -> None:
    ENTRIES.entries["scale"] = scale


NAMES = ContextVar("NAMES", default=1.0)
OTHER = Same()


def _other(scale: float, value: Any = None) -> Any:
    OTHER.scale = scale
    return value


def _in_environment(number: int) -> None:
    environ["FXPIPE_TEST"] = str(number)


KINDS = {
    "weak reference": _Kind(lambda: ref(OTHER), lambda v, x: x * v().scale, lambda v, n: _other(1.0 + n // 2, v)),
    "context variable": _Kind(lambda: NAMES, lambda v, x: x * NAMES.get(), lambda v, n: NAMES.set(1.0 + n // 2)),
    "entries as attributes": _Kind(lambda: 1.0, lambda v, x: x * ENTRIES.scale, lambda v, n: _entry(1.0 + n // 2)),
    "environment": _Kind(
        lambda: environ.pop("FXPIPE_TEST", None),
        lambda v, x: x * float(environ.get("FXPIPE_TEST", "1")),
        lambda v, n: _in_environment(n),
    ),
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


class ReadsTheRun(Reads):
    """Uses something of the Trainer, or finds its own value in another way than by its name."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.second(self.kind.use(self, x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Data(L.LightningDataModule):
    scale = 1.0

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        data = torch.randn(24, WIDTH, generator=generator), torch.randn(24, WIDTH, generator=generator)
        return DataLoader(TensorDataset(*data), 4)


def _set_on_data(module: L.LightningModule, number: int) -> float:
    module.trainer.datamodule.scale = 1.0 + number // 2  # type: ignore[attr-defined]
    return 1.0 + number // 2


OF_THE_RUN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "metrics": lambda module, x: x * (1 + float(module.trainer.callback_metrics.get("loss", 0.0))),
    "data module": lambda module, x: x * module.trainer.datamodule.scale,
    "progress": lambda module, x: x * (1 + module.trainer.fit_loop.epoch_loop.batch_progress.current.ready),
    "rate": lambda module, x: x * 10 * module.trainer.optimizers[0].param_groups[0]["lr"],
    "scheduler": lambda module, x: x * (1 + module.lr_schedulers().last_epoch),
    "dict": lambda module, x: x * vars(module)["value"],
    "attribute by a name that is computed": lambda module, x: x * getattr(module, "val" + "ue"),
}


@pytest.mark.parametrize("use", OF_THE_RUN.values(), ids=OF_THE_RUN)
def test_what_the_run_holds_counts_as_it_is_in_each_step(use: Callable[[Any, Tensor], Tensor]) -> None:
    """Nothing of the Trainer was compared but counters, rates and callbacks; nor was what code found in a ``__dict__``."""
    found = []
    for options in ({"strategy": FxPipeStrategy(num_stages=2, num_microbatches=2)}, {}):
        module = ReadsTheRun(_Kind(lambda: 1.0, use, lambda value, n: value))
        module.kind = _Kind(lambda: 1.0, use, lambda value, n: _set_on_data(module, n))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make_trainer(max_epochs=1, **options).fit(module, datamodule=Data())
        found.append({"losses": module.losses, "state": {fqn: t.clone() for fqn, t in module.state_dict().items()}})
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def _fit(kind: _Kind, **options: Any) -> dict[str, Any]:
    WINDOW.clear()
    WINDOW.append(1.0)
    _other(1.0)
    _entry(1.0)
    NAMES.set(1.0)
    module = Reads(kind)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, WIDTH, generator=generator), torch.randn(24, WIDTH, generator=generator))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(max_epochs=1, **options).fit(module, DataLoader(data, 4))
    environ.pop("FXPIPE_TEST", None)
    return {"losses": module.losses, "state": {fqn: value.clone() for fqn, value in module.state_dict().items()}}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_value_that_changes_between_steps_counts_whatever_holds_it(kind: _Kind) -> None:
    """Guards compared lists, dicts, arrays and attributes; all else kept the value that it had when it was traced."""
    there = _fit(kind, strategy=FxPipeStrategy(num_stages=2, num_microbatches=2))
    torch.testing.assert_close(there, _fit(kind), rtol=1e-5, atol=1e-6)
