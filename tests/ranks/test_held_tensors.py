"""Tensors and items that a step has from elsewhere than its batch are those of one device, also where they change."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go

Ranks = Callable[[int], RankPool]

SHIFTS: dict[str, Any] = {}
FACTOR = 1.0


class Held(Net):
    """Its middle takes part in what subclasses change."""

    def __init__(self) -> None:
        super().__init__()
        global FACTOR
        FACTOR = 1.0
        SHIFTS["now"] = torch.zeros(12)
        self.scale = torch.ones(12)
        self.register_buffer("centre", torch.zeros(12))
        generator = torch.Generator().manual_seed(2)
        self.more = TensorDataset(torch.randn(40, 12, generator=generator), torch.arange(40) % 5)
        self.drawn: list[float] = []

    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.backbone(x)))


class InStep(Held):
    """Calls its parts from the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.head(self.middle(self.backbone(batch[0]))), batch[1])
        self.log("loss", loss)
        return loss


class FromHook(Held):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        global FACTOR
        self.scale = torch.full((12,), 1.0 + 0.1 * batch_idx)
        SHIFTS["now"] = torch.full((12,), 0.1 * batch_idx)
        FACTOR += 0.1

    def middle(self, h: Tensor) -> Tensor:
        return h * self.scale * FACTOR + SHIFTS["now"]


class FromHookInStep(FromHook, InStep):
    """The same between the step's calls."""


class Centred(InStep):
    """Puts another buffer in a buffer's place, between the step's calls."""

    def middle(self, h: Tensor) -> Tensor:
        self.centre = 0.9 * self.centre + 0.1 * h.detach().mean(0)
        return h - self.centre


class CentredByHook(Held):
    def on_train_batch_end(self, *args: Any) -> None:
        self.scale = self.scale + 0.1

    def middle(self, h: Tensor) -> Tensor:
        return h * self.scale


class Bank(InStep):
    """Reads rows of what earlier batches have left."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.backbone(batch[0])
        rows = (torch.arange(len(h)) + batch_idx) % len(self.scale)
        loss = nn.functional.cross_entropy(self.head(h + self.scale[rows][:, None]), batch[1])
        self.scale = self.scale * 0.9 + 0.1 * loss.detach()
        self.log("loss", loss)
        return loss


class Recurrent(Held):
    """Carries its state from one batch to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(12, 12, batch_first=True)
        self.hidden: Tensor | None = None

    def on_train_epoch_start(self) -> None:
        self.hidden = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.hidden is not None and self.hidden.shape[1] != len(batch[0]):
            self.hidden = None
        out, hidden = self.rnn(self.backbone(batch[0])[:, None], self.hidden)
        self.hidden = hidden.detach()
        loss = nn.functional.cross_entropy(self.head(out[:, 0]), batch[1])
        self.log("loss", loss)
        return loss


class SecondLoader(Held):
    """Draws from a loader of its own: before the model's call, or between its calls."""

    is_first = True

    def __init__(self) -> None:
        super().__init__()
        self.count, self.weights = itertools.count(), itertools.cycle([1.0, 0.5, 0.25])
        self.batches: Any = None

    def next_batch(self) -> Any:
        if self.batches is None:
            self.batches = self.more_batches()
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = self.more_batches()
            return next(self.batches)

    def more_batches(self) -> Any:
        return iter(DataLoader(self.more, batch_size=4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn.append(next(self.count))
        if self.is_first:
            x, y = self.next_batch()
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        if not self.is_first:
            x, y = self.next_batch()
        loss = loss + next(self.weights) * nn.functional.cross_entropy(self(x), y)
        self.drawn.append(float(x.sum()))
        self.log("loss", loss)
        return loss


class SecondLoaderBetween(SecondLoader):
    is_first = False


class Shuffled(SecondLoader):
    """By numbers of the default generator, from which the main loader draws, too."""

    shuffle = True

    def more_batches(self) -> Any:
        return iter(DataLoader(self.more, batch_size=4, shuffle=True))


class OwnGenerator(SecondLoader):
    """Shuffles by a generator of the loader's, which the module does not know otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.loader = DataLoader(self.more, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5))

    def more_batches(self) -> Any:
        return iter(self.loader)


class OwnGeneratorBetween(OwnGenerator):
    is_first = False


class DrawsItself(SecondLoader):
    """Its batches come from code that has a generator and a counter of the module's."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.num_made = torch.Generator().manual_seed(6), 0
        self.batches = self.made()

    def made(self) -> Any:
        while True:
            self.num_made += 1
            yield torch.randn(4, 12, generator=self.generator), torch.arange(4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.drawn.append(self.num_made)
        return loss


class DrawsItselfBetween(DrawsItself):
    is_first = False


class FirstItem(SecondLoader):
    """Begins anew in each step."""

    def next_batch(self) -> Any:
        return next(self.more_batches())


class LogsTheRate(Net):
    """Reads a number that a scheduler changes with each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        loss = super().training_step(batch, batch_idx)
        self.log("step", float(self.global_step))
        return loss


class Counts(L.Callback):
    def __init__(self) -> None:
        self.num_batches = 0

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        self.num_batches += 1


def whats_left(trainer: Any, module: Any, folder: Path) -> Any:
    return module.drawn, [float(value) for value in module.scale], module.centre


def held(module: Any, **more: Any) -> Run:
    return Run(module=module, options={"limit_val_batches": 0}, look=whats_left, **more)


def are_few_traces(trainer: L.Trainer, module: Any, folder: Path) -> bool:
    """The epoch's last batch is smaller."""
    assert trainer.global_step >= 20
    return not isinstance(trainer.strategy, FxPipeStrategy) or len(trainer.strategy.session.trace_log.traces) <= 2


def traced(module: Any) -> Run:
    options = {"limit_val_batches": 0, "max_epochs": 4}
    return Run(module=module, options=options, look=are_few_traces, callbacks=lambda folder: [Counts()])


TRACED: dict[str, Run] = {"rate": traced(LogsTheRate)}

RUNS: dict[str, Run] = {
    "from hook": held(FromHook),
    "from hook in step": held(FromHookInStep),
    "buffer": held(Centred, strategy={"num_microbatches": 1}),
    "attribute in hook": held(CentredByHook),
    "bank": held(Bank),
    "recurrent": held(Recurrent, strategy={"num_microbatches": 1}),
    "second loader": held(SecondLoader),
    "second loader between": held(SecondLoaderBetween),
    "shuffled": held(Shuffled),
    "own generator": held(OwnGenerator),
    "own generator between": held(OwnGeneratorBetween),
    "draws itself": held(DrawsItself),
    "draws itself between": held(DrawsItselfBetween),
    "first item": held(FirstItem),
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    return go((RUNS | TRACED)[name], Path(folder) / f"{name}{stages}", stages)


OFTEN = ["from hook in step", "bank", "recurrent", "second loader", "own generator between"]
SELDOM = [pytest.param([name], marks=pytest.mark.slow, id=name) for name in RUNS.keys() - set(OFTEN)]


@pytest.mark.parametrize("names", [pytest.param(OFTEN, id="some"), *sorted(SELDOM, key=str)])
def test_what_a_step_takes_from_elsewhere_is_that_of_one_device(ranks: Ranks, tmp_path: Path, names: list[str]) -> None:
    compare(ranks, do, names, tmp_path, 2)


def test_what_changes_in_each_step_and_is_only_logged_makes_no_traces(ranks: Ranks, tmp_path: Path) -> None:
    compare(ranks, do, list(TRACED), tmp_path, 2)
