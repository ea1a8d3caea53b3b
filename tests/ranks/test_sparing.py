"""Ranks whose stages need no data do not load it, and nobody sees a difference."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from lightning_fxpipe import BatchError, FxPipeStrategy
from tests.lit import make_trainer, snapshot
from tests.ranks.pool import RankPool
from tests.ranks.test_training import assert_same_state, merged

Ranks = Callable[[int], RankPool]
NUM_SAMPLES, BATCH_SIZE = 38, 4  # ten batches, the last one of two samples


class Counted(Dataset[Any]):
    """Counts its samples, and augments them with each kind of random number."""

    def __init__(self) -> None:
        self.loaded = multiprocessing.Value("i", 0)  # also what workers load

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        with self.loaded.get_lock():
            self.loaded.value += 1
        x = torch.linspace(0, 1, 8) * index / NUM_SAMPLES
        return x + 0.1 * (random.random() + float(numpy.random.rand()) + torch.rand(())), torch.tensor(index % 3)


class Lengths(Counted):
    """Sequences, each batch of another length."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        length = 3 + (index // BATCH_SIZE * 5) % 7
        return x.repeat(length, 1), y


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.samples = Counted()
        self.loaded = self.samples.loaded

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(NUM_SAMPLES).tolist():
            yield self.samples[index]


class Plain(L.LightningModule):
    """Eight layers; noise before the model, by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)), nn.Linear(8, 3))
        self.losses: list[float] = []

    def inputs(self, batch: Any) -> Tensor:
        return batch[0] + 0.01 * torch.randn_like(batch[0])

    def _loss(self, batch: Any) -> Tensor:
        logits = self.model(self.inputs(batch))
        return nn.functional.cross_entropy(logits.mean(1) if logits.dim() == 3 else logits, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class OfDict(Plain):
    def _loss(self, batch: Any) -> Tensor:
        if not isinstance(batch, dict):
            return super()._loss(batch)
        return super()._loss(batch["a"]) + 0.0 * batch["b"][0].sum()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) * x.sigmoid()
        return self.head(hidden)


class UsedEverywhere(Plain):
    """Every layer takes the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Masked()


class LooksInHook(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", batch[0].mean())


class ChangesOnTheWay(Plain):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]


class LooksAtLast(Plain):
    """Looks at values in the longest batch only, when ranks have been spared already."""

    def inputs(self, batch: Any) -> Tensor:
        x: Tensor = batch[0]
        return x * 2 if x.shape[1] == 9 and float(x.abs().sum()) > 0 else x


class Divides(Plain):
    """Cannot do with zeros."""

    def inputs(self, batch: Any) -> Tensor:
        return batch[0] + 0.1 * (3 // (batch[0].abs().sum(1) > 0).long())[:, None]


class Unfreezes(Plain):
    """A new graph of the model in the middle of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.model[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.model[0].requires_grad_(batch_idx > 5)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass
class Case:
    """A module and its data; ``middle`` is about how many of the 76 samples of two epochs the middle stage's rank loads."""

    module: type[Plain]
    middle: int
    loader: Callable[[Dataset[Any]], Any] = lambda data: DataLoader(data, BATCH_SIZE, shuffle=True)
    data: type[Any] = Counted
    validates: bool = False
    options: dict[str, Any] = field(default_factory=dict)


# One batch is looked at for the plan, and two or three are loaded before the first has shown what the stages need.
SPARED, ALL = 4 * BATCH_SIZE, 76 + BATCH_SIZE
CASES: dict[str, Case] = {
    "shuffled": Case(Plain, SPARED, validates=True),
    "accumulated": Case(Plain, SPARED, options={"accumulate_grad_batches": 3}),
    "stream": Case(Plain, SPARED, loader=lambda data: DataLoader(data, BATCH_SIZE), data=Stream),
    "lengths": Case(Plain, SPARED, loader=lambda data: DataLoader(data, BATCH_SIZE), data=Lengths),
    "workers": Case(
        Plain,
        SPARED + 6 * BATCH_SIZE,  # what they load ahead
        loader=lambda data: DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=1, persistent_workers=True),
    ),
    "dict": Case(
        OfDict,
        2 * SPARED,
        loader=lambda data: CombinedLoader(
            {
                "a": DataLoader(data, BATCH_SIZE, drop_last=True),
                "b": DataLoader(Subset(data, range(16)), BATCH_SIZE, shuffle=True),
            },
            "max_size_cycle",
        ),
    ),
    "used everywhere": Case(UsedEverywhere, ALL),
    "looks in hook": Case(LooksInHook, ALL),
    "changes on the way": Case(ChangesOnTheWay, ALL),
    "looks at last": Case(LooksAtLast, SPARED, loader=lambda data: DataLoader(data, BATCH_SIZE), data=Lengths),
    "divides": Case(Divides, ALL),
    "unfreezes": Case(Unfreezes, SPARED),
}


def fit(name: str, devices: int) -> dict[str, Any]:
    case = CASES[name]
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    L.seed_everything(3, verbose=False)
    module, data, valid = case.module(), case.data(), case.data()
    strategy: Any = FxPipeStrategy(num_microbatches=2) if devices > 1 else "auto"
    trainer = make_trainer(max_epochs=2, strategy=strategy, devices=devices, **case.options)
    more = {"val_dataloaders": case.loader(valid)} if case.validates else {}
    trainer.fit(module, case.loader(data), **more)
    again = list(trainer.validate(module, case.loader(valid), verbose=False)) if case.validates else []
    return {
        "losses": module.losses,
        "metrics": {name: float(value) for name, value in trainer.logged_metrics.items()},
        "validated": again,
        "state": snapshot(module),
        "draws": [float(torch.rand(())), random.random(), float(numpy.random.rand())],
        "loaded": data.loaded.value,
        "loaded for validation": valid.loaded.value,
    }


def fit_all(names: Sequence[str], devices: int) -> list[dict[str, Any]]:
    return [fit(name, devices) for name in names]


FOR_EVERY_CHANGE = ("shuffled", "lengths", "used everywhere", "looks at last")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FOR_EVERY_CHANGE, id="some"),
        pytest.param([name for name in CASES if name not in FOR_EVERY_CHANGE], id="others", marks=pytest.mark.slow),
    ],
)
def test_a_rank_whose_stage_needs_no_data_does_not_load_it(names: Sequence[str], ranks: Ranks) -> None:
    alone = fit_all(names, 1)
    by_rank = ranks(3).run(fit_all, names, 3, timeout_seconds=150)
    for index, name in enumerate(names):
        case, expected, runs = CASES[name], alone[index], [results[index] for results in by_rank]
        for run in runs:
            assert run["losses"] == pytest.approx(expected["losses"], rel=1e-5), name
            assert run["metrics"] == pytest.approx(expected["metrics"], rel=1e-5), name
            assert run["draws"] == expected["draws"], name
            for mine, theirs in zip(run["validated"], expected["validated"], strict=True):
                assert mine == pytest.approx(theirs, rel=1e-5), name
        assert_same_state(merged(runs, "state"), expected["state"])
        last, middle, first = (run["loaded"] for run in runs)
        assert last == first >= 76, name
        assert middle <= case.middle, name
        assert (middle > 76) == (case.middle == ALL), name
        if case.validates:
            assert runs[1]["loaded for validation"] <= 4 * BATCH_SIZE < 100 < runs[0]["loaded for validation"]


class EndsEarly(Stream):
    """The second epoch is shorter on the rank of the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        end = NUM_SAMPLES - 2 * BATCH_SIZE * (self.epoch == 2 and os.environ["RANK"] == "2")
        return (self.samples[index] for index in range(end))


def fit_ends_early() -> str:
    L.seed_everything(3, verbose=False)
    trainer = make_trainer(max_epochs=3, strategy=FxPipeStrategy(num_microbatches=2), devices=3)
    with pytest.raises(BatchError) as caught:
        trainer.fit(Plain(), DataLoader(EndsEarly(), BATCH_SIZE))
    return str(caught.value)


def test_data_that_ends_early_is_refused_on_spared_ranks_too(ranks: Ranks) -> None:
    for told in ranks(3).run(fit_ends_early):
        assert "rank 0: at least 9 batches; rank 1: at least 9 batches; rank 2: 8 batches" in told
