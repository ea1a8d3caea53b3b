"""Recorded code that reads what no guard sees ends the run soon, by name; code whose graph stays the same is not disturbed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.tracing.recheck import is_recheck_due, recheck
from lightning_fxpipe.tracing.trace import trace_region
from tests.lit import make_trainer
from tests.traces import call_of

WIDTH = 4


class Meta(type):
    number = 1.0

    @property
    def scale(cls) -> float:
        return Meta.number


class Settings(metaclass=Meta):
    pass


class Scales(nn.Module):
    """Multiplies by what a function reads."""

    def __init__(self, read: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.second, self.read = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), read

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.read())


class Reads(L.LightningModule):
    """Has a model that reads, and makes a change after the second batch."""

    def __init__(self, read: Callable[[], Any], change: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.model, self.change, self.num_batches = Scales(read), change, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0]).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.num_batches += 1
        if self.num_batches == 2:
            self.change()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_data(num_batches: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(4 * num_batches, WIDTH, generator=torch.Generator().manual_seed(1))), 4)


def _fit(module: L.LightningModule) -> None:
    make_trainer(max_epochs=1, strategy=FxPipeStrategy(num_stages=2, num_microbatches=2)).fit(module, make_data(12))


def _metaclass(folder: Path) -> tuple[Callable[[], Any], Callable[[], None]]:
    Meta.number = 1.0
    return (lambda: Settings.scale), lambda: setattr(Meta, "number", 2.0)


def _file(folder: Path) -> tuple[Callable[[], Any], Callable[[], None]]:
    path = folder / "scale.txt"
    path.write_text("1.0")
    return (lambda: float(path.read_text())), lambda: (path.write_text("2.0"), None)[1]


def _module(folder: Path) -> tuple[Callable[[], Any], Callable[[], None]]:
    module: Any = ModuleType("settings_of_a_test")
    module.scale = 1.0
    sys.modules[module.__name__] = module
    return (lambda: sys.modules["settings_of_a_test"].scale), lambda: setattr(module, "scale", 2.0)


def _array_in_a_file(folder: Path) -> tuple[Callable[[], Any], Callable[[], None]]:
    path = folder / "scale.npy"
    np.save(path, np.ones((500, WIDTH), dtype=np.float32))
    return (lambda: torch.from_numpy(np.load(path))[250]), lambda: np.save(path, np.full((500, WIDTH), 2, dtype=np.float32))


def _tensor_of_a_module(folder: Path) -> tuple[Callable[[], Any], Callable[[], None]]:
    read, _ = _module(folder)
    module: Any = sys.modules["settings_of_a_test"]
    module.scale = torch.ones(WIDTH)
    return read, lambda: setattr(module, "scale", torch.full((WIDTH,), 2.0))


PLACES = {
    "metaclass": _metaclass,
    "file": _file,
    "sys.modules": _module,
    "array in a file": _array_in_a_file,
    "tensor of a module": _tensor_of_a_module,
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_value_that_no_guard_sees_ends_the_run(place: Any, tmp_path: Path) -> None:
    """The graph kept the value of its first recording until the end of the run, and nothing was said."""
    read, change = place(tmp_path)
    with pytest.raises(UnsupportedError, match="computes something else than when it was traced") as raised:
        _fit(Reads(read, change))
    assert f"{Path(__file__).name}:" in str(raised.value.where)


def test_code_that_stays_the_same_is_recorded_again_and_trains_on() -> None:
    """Sizes of the batch, dropout and a number that changes in each step are no difference."""

    class Anneals(Reads):
        def __init__(self) -> None:
            super().__init__(lambda: self.scale)
            self.scale = 1.0
            self.dropout = nn.Dropout(0.5)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step([self.dropout(batch[0]) + torch.arange(len(batch[0])).unsqueeze(1)], batch_idx)

        def on_train_batch_start(self, *args: Any) -> None:
            self.scale = 1.0 / (1 + self.global_step)

    module = Anneals()
    _fit(module)
    assert module.num_batches == 12


@pytest.mark.parametrize("has_change", [False, True])
def test_batches_of_any_length_are_compared_with_the_lengths_as_symbols(has_change: bool, tmp_path: Path) -> None:
    """A recording with today's length as a constant would be another graph."""
    read, change = _metaclass(tmp_path)
    module = Reads(read, change if has_change else lambda: None)
    data = DataLoader([[torch.randn(4, 2 + number, WIDTH)] for number in range(12)], batch_size=None)
    trainer = make_trainer(max_epochs=1, strategy=FxPipeStrategy(num_stages=2, num_microbatches=2))
    with pytest.raises(UnsupportedError) if has_change else nullcontext():
        trainer.fit(module, data)
    assert has_change or module.num_batches == 12


def test_a_trace_is_recorded_again_at_ever_rarer_uses() -> None:
    assert [number for number in range(600) if is_recheck_due(number)] == [2, 8, 32, 128, 512]


def test_sizes_that_are_symbols_in_other_places_are_not_compared() -> None:
    """A batch of as many samples as another input has rows by chance: both are taken for the number of samples."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.layer(x) + table.view(table.shape[0], WIDTH).sum(0)

    model = Adds()
    traced = trace_region(model, call_of(torch.randn(4, WIDTH), torch.randn(6, WIDTH)))
    recheck(traced, call_of(torch.randn(6, WIDTH), torch.randn(6, WIDTH)))
