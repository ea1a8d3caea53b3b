"""A run trains on the batch that its plan was made from, and its data is that of one device: what changes when data is read
(a stream's place, random generators of a dataset's own, a hook's counter) has changed once, in its turn.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_fxpipe import BatchError, FxPipeStrategy, UnsupportedError
from lightning_fxpipe._compat.torch import tree_leaves
from tests.lit import make_trainer
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]


class Module(L.LightningModule):
    """Notes the batches of each step, and what its loops ask it for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
        self.seen: list[Any] = []

    def _loss(self, batch: Any) -> Tensor:
        return self.model(torch.cat([leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)])).pow(2).mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note("train", batch)

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note(f"validate {dataloader_idx}", batch)

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note(f"test {dataloader_idx}", batch)

    def note(self, what: str, batch: Any) -> None:
        self.seen.append((what, [leaf.double().sum().item() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self._loss(batch) + torch.rand(()))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Drawn(Dataset[Tensor]):
    """Samples with random numbers of a generator of its own, or of the global ones."""

    def __init__(self, own: str = "") -> None:
        owns = {"numpy": np.random.default_rng(0), "random": random.Random(0), "torch": torch.Generator().manual_seed(0)}
        self.own: Any = owns.get(own)
        self.count = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        self.count += 1
        if isinstance(self.own, torch.Generator):
            noise = float(torch.rand((), generator=self.own))
        else:
            noise = self.own.random() if self.own else float(torch.rand(())) + random.random() + np.random.rand()
        return torch.full((4,), index + noise + self.count)


class Order(Sampler[int]):
    def __init__(self) -> None:
        self.rng, self.epoch = np.random.default_rng(0), None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        assert self.epoch is not None
        return iter(np.roll(self.rng.permutation(12), self.epoch).tolist())

    def __len__(self) -> int:
        return 12


def counted(size: int = 4) -> Iterator[Tensor]:
    return itertools.chain.from_iterable(itertools.repeat([torch.full((size, 4), float(n)) for n in range(10)]))


class Endless(IterableDataset[Tensor]):
    """An epoch is the next four batches of a stream that nobody can turn back."""

    def __init__(self, draws: bool = False) -> None:
        self.items, self.draws = counted(), draws

    def __iter__(self) -> Iterator[Tensor]:
        return (item + torch.rand(()) if self.draws else item for item in itertools.islice(self.items, 4))


class FromFile(IterableDataset[Tensor]):
    """Reads on in a file that stays open."""

    def __init__(self, path: Path) -> None:
        path.write_text("".join(f"{number}\n" for number in range(100)))
        self.file = path.open()

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((4,), float(self.file.readline())) for _ in range(8))


class ItsOwnIterator:
    """Begins anew where it is asked for an iterator, which is itself."""

    def __init__(self, goes_on: bool = False) -> None:
        self.at, self.end, self.goes_on = 0, 0, goes_on

    def __iter__(self) -> ItsOwnIterator:
        self.at = self.at if self.goes_on else 0
        self.end = self.at + 3
        return self

    def __next__(self) -> Tensor:
        if self.at >= self.end:
            raise StopIteration
        self.at += 1
        return torch.full((4, 4), float(self.at))


class Positioned:
    """Knows how far it has come, as torchdata's loader does, which a checkpoint brings back."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < 6:
            self.position += 1
            yield torch.full((4, 4), float(self.position))
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class WithHooks(Module):
    """Its hooks make the data, with random numbers and counters."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.width = 4
        self.stream = counted()

    def train_dataloader(self) -> Any:
        self.asked.append(f"train {self.current_epoch}")
        self.seen.append(("train loader", torch.rand(()).item(), next(self.stream).mean().item()))
        return DataLoader(TensorDataset(torch.randn(12, self.width)), 4, shuffle=True)

    def val_dataloader(self) -> Any:
        self.asked.append(f"validation {self.current_epoch}")
        return [DataLoader(TensorDataset(torch.randn(8, 4)), 4), DataLoader(Drawn("numpy"), 4)]

    def on_train_end(self) -> None:
        self.seen.append(self.asked)


class DrawsAtStart(WithHooks):
    """A hook between setup and the first batch draws, so that all that follows are other numbers."""

    def on_fit_start(self) -> None:
        self.latent = torch.rand(2)


class DrawsAtEpoch(WithHooks):
    def on_train_epoch_start(self) -> None:
        L.seed_everything(100 + self.current_epoch, verbose=False)


class ReadsLate(WithHooks):
    """Its loader is made of what a hook sets after setup."""

    def on_fit_start(self) -> None:
        self.size = 6

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(12, 4)), getattr(self, "size", 4), shuffle=True)


class Counts(WithHooks):
    """Asks the Trainer how long it will train, in ``configure_optimizers`` and in its step."""

    def configure_optimizers(self) -> Any:
        self.seen.append(self.trainer.estimated_stepping_batches)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, int(self.trainer.estimated_stepping_batches))]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch) * len(self.trainer.val_dataloaders) / self.trainer.num_training_batches  # type: ignore[arg-type]


class ChangesData(Module):
    """A hook before the first batch gives the dataset other samples."""

    def on_train_epoch_start(self) -> None:
        data: Any = self.trainer.train_dataloader.dataset  # type: ignore[union-attr]
        data.count = 100 * (1 + self.current_epoch)


def drawn(own: str = "", **options: Any) -> DataLoader[Any]:
    return DataLoader(Drawn(own), 4, **{"shuffle": True, **options})


@dataclass(frozen=True)
class Case:
    data: Callable[[Path], Any] = lambda folder: None
    module: Callable[[], Any] = Module
    validation: Callable[[], Any] = lambda: None
    options: dict[str, Any] = field(default_factory=dict)
    calls: tuple[str, ...] = ("fit",)
    resumes: bool = False


CASES = {
    "own numpy": Case(lambda folder: drawn("numpy")),
    "own random": Case(lambda folder: drawn("random", sampler=Order(), shuffle=False)),
    "own torch, replaced in each epoch": Case(lambda folder: drawn("torch"), options={"reload_dataloaders_every_n_epochs": 1}),
    "global": Case(lambda folder: drawn(), validation=drawn),
    "own and workers": Case(lambda folder: drawn("numpy", num_workers=1, persistent_workers=True)),
    "endless": Case(lambda folder: DataLoader(Endless(), None)),
    "endless that draws": Case(lambda folder: DataLoader(Endless(draws=True), None)),
    "endless, no loader": Case(lambda folder: Endless(), validation=Endless),
    "file": Case(lambda folder: DataLoader(FromFile(folder / "data"), 4)),
    "generator": Case(lambda folder: itertools.islice(counted(), 6), options={"max_epochs": 1}),
    "its own iterator": Case(lambda folder: ItsOwnIterator()),
    "its own iterator that goes on": Case(lambda folder: ItsOwnIterator(goes_on=True)),
    "several": Case(lambda folder: {"a": DataLoader(Endless(), None), "b": [drawn("numpy"), ItsOwnIterator()]}),
    "sizes": Case(lambda folder: CombinedLoader([drawn("numpy"), DataLoader(Endless(), None)], "max_size")),
    "sequential validation": Case(
        lambda folder: drawn(), validation=lambda: CombinedLoader([drawn("numpy"), Endless()], "sequential")
    ),
    "overfits": Case(lambda folder: drawn("numpy"), options={"overfit_batches": 2}),
    "fast": Case(lambda folder: DataLoader(Endless(), None), options={"fast_dev_run": 2}),
    "hooks": Case(module=WithHooks, options={"num_sanity_val_steps": 2, "reload_dataloaders_every_n_epochs": 1}),
    "hooks, no sanity check": Case(module=WithHooks),
    "draws at start": Case(module=DrawsAtStart),
    "draws at epoch": Case(module=DrawsAtEpoch, options={"num_sanity_val_steps": 1}),
    "reads late": Case(module=ReadsLate),
    "counts": Case(module=Counts, options={"num_sanity_val_steps": 1}),
    "changes data": Case(lambda folder: drawn("numpy"), module=ChangesData),
    "evaluates": Case(lambda folder: Endless(), calls=("validate", "test", "validate")),
    "evaluates hooks": Case(module=WithHooks, calls=("validate", "fit", "validate")),
    "resumed": Case(lambda folder: drawn("numpy", sampler=Order(), shuffle=False), resumes=True),
    "resumed, with a position": Case(lambda folder: Positioned(), resumes=True, options={"max_steps": 9, "max_epochs": 3}),
    "resumed hooks": Case(module=WithHooks, resumes=True, options={"reload_dataloaders_every_n_epochs": 1}),
    "resumed stream": Case(lambda folder: DataLoader(Endless(), None), resumes=True),
}


def run(name: str, folder: str, devices: int) -> list[Any]:
    case, path = CASES[name], Path(folder) / f"{devices}{torch.randint(10**9, ())}"
    path.mkdir(exist_ok=True, parents=True)
    seen: list[Any] = []
    options: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0, "default_root_dir": path, **case.options}
    for part in ("first", "second") if case.resumes else ("",):
        L.seed_everything(7, verbose=False)
        count = 1 if part == "first" else devices  # a checkpoint of one device says nothing of random generators
        strategy = FxPipeStrategy(num_microbatches=2, timeout=30) if count > 1 else "auto"
        if part == "second":
            options |= {"max_epochs": options["max_epochs"] + 1}
        module, trainer = case.module(), make_trainer(devices=count, strategy=strategy, **options)
        data, validation = case.data(path), case.validation()
        for call in case.calls:
            how = {"val_dataloaders": validation, "ckpt_path": path / "first.ckpt" if part == "second" else None}
            how = how if call == "fit" else {"verbose": False}
            getattr(trainer, call)(module, data, **how)
        seen += [*module.seen, torch.rand(()).item(), random.random(), np.random.rand(), getattr(data, "at", None)]
        if part == "first":
            trainer.save_checkpoint(path / "first.ckpt")
    return seen


def run_all(names: list[str], folder: str, devices: int) -> list[Any]:
    # The ranks of the pool may have no children by default, lest they outlive it; workers end with their loader.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    return [run(name, folder, devices) for name in names]


OFTEN = (
    *("own numpy", "own random", "endless that draws", "its own iterator that goes on", "several", "hooks", "draws at epoch"),
    *("reads late", "counts", "changes data", "evaluates hooks", "resumed, with a position"),
)


def check(ranks: Ranks, names: list[str], folder: Path) -> None:
    alone = run_all(names, str(folder), 1)
    for rank, found in enumerate(ranks(2).run(run_all, names, str(folder), 2, timeout_seconds=20 + 10 * len(names))):
        for name, expected, seen in zip(names, alone, found, strict=True):
            assert seen == expected, f"{name}, rank {rank}"


def test_the_data_of_a_run_is_that_of_one_device(ranks: Ranks, tmp_path: Path) -> None:
    check(ranks, list(OFTEN), tmp_path)


@pytest.mark.slow
def test_more_data_is_that_of_one_device(ranks: Ranks, tmp_path: Path) -> None:
    check(ranks, [name for name in CASES if name not in OFTEN], tmp_path)


class Drawing(FromFile):
    """Reads on in a file, and draws from the global generators."""

    def __iter__(self) -> Iterator[Tensor]:
        return (line + torch.rand(()) for line in super().__iter__())


def fit_refused(folder: str) -> str:
    loader = DataLoader(Drawing(Path(folder) / f"data{os.environ['RANK']}"), 4)
    with pytest.raises(UnsupportedError) as caught:
        make_trainer(max_epochs=1, strategy=FxPipeStrategy(), devices=2).fit(DrawsAtStart(), loader)
    return str(caught.value)


def test_a_stream_that_cannot_begin_anew_is_refused_where_it_would_have_to(ranks: Ranks, tmp_path: Path) -> None:
    for told in ranks(2).run(fit_refused, str(tmp_path)):
        assert "The first batch was read before the run, but its data stream cannot be restarted." in told
        assert "Drawing" in told
        assert "TextIOWrapper" in told


class Mines(Module):
    """The step changes what decides which samples come next, in objects of torch's own classes."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler = WeightedRandomSampler([1.0] * 12, 12, generator=torch.Generator().manual_seed(9))
        self.generator = torch.Generator().manual_seed(4)

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.randn(12, 4), torch.arange(12))
        some = ConcatDataset([Subset(data, [0, 1, 2, 3])])
        return {"a": DataLoader(data, 4, sampler=self.sampler), "b": DataLoader(some, 4)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        each = self.model(batch["a"][0]).pow(2).mean(1) + 0.1 * self.model(batch["b"][0]).pow(2).mean()
        self.sampler.weights[batch["a"][1]] = each.detach().double() + float(torch.rand((), generator=self.generator))
        reached: Any = self.trainer.train_dataloader["b"].dataset.datasets[0]  # type: ignore[index,union-attr]
        reached.indices = [*reached.indices[1:], int(each.argmax())]
        reached.dataset.tensors[0][0] += float(each.detach().sum())
        return each.mean()


def fit_mined(devices: int) -> list[Any]:
    L.seed_everything(3, verbose=False)
    module = Mines()
    strategy = FxPipeStrategy(num_microbatches=2) if devices > 1 else "auto"
    make_trainer(max_epochs=3, strategy=strategy, devices=devices).fit(module)
    return module.seen


def test_what_the_step_changes_in_objects_of_torchs_classes_is_changed_on_every_rank(ranks: Ranks) -> None:
    alone = fit_mined(1)
    for found in ranks(2).run(fit_mined, 2):
        for (_, seen), (_, expected) in zip(found, alone, strict=True):
            assert seen == pytest.approx(expected, rel=1e-5, abs=1e-5)


class Differs(Dataset[Tensor]):
    """From the second epoch on other samples on each rank."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        self.read += 1
        return torch.full((4,), float(index + (int(os.environ["RANK"]) if self.read > 4 else 0)))


def fit_different() -> str:
    with pytest.raises(BatchError) as caught:
        make_trainer(max_epochs=2, strategy=FxPipeStrategy(), devices=2).fit(Module(), DataLoader(Differs(), 4))
    return str(caught.value)


def test_ranks_that_load_different_batches_end_the_run(ranks: Ranks) -> None:
    for told in ranks(2).run(fit_different):
        assert "The ranks of the pipeline loaded different batches." in told
