"""Every rank of a pipeline sees the same batches, whatever the user did or did not seed, or there is an error on every rank."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler, random_split

from lightning_fxpipe import BatchError, FxPipeStrategy
from lightning_fxpipe._compat.torch import tree_leaves, tree_map
from lightning_fxpipe.distributed.agreement import digest
from tests.lit import make_trainer
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]


class Numbers(Dataset[Tensor]):
    """Augments with each kind of random number."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index)) + random.random() + float(numpy.random.rand()) + torch.rand(())


class Stream(IterableDataset[Tensor]):
    def __init__(self, count: int = 12) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        order = list(range(self.count))
        random.shuffle(order)
        for index in order:
            yield torch.full((4,), float(index)) + torch.rand(())


class RandomOrder(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(numpy.random.permutation(12).tolist())

    def __len__(self) -> int:
        return 12


class Batches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(12).tolist()
        return iter([order[start : start + 4] for start in (0, 4, 8)])


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        self.seen: list[str] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return tree_map(lambda leaf: leaf if leaf is None else leaf + torch.rand(1), batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(digest(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(torch.cat([leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)])).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Split(L.LightningDataModule):
    """Splits at random without a seed."""

    def setup(self, stage: str) -> None:
        self.train, _ = random_split(TensorDataset(torch.arange(32.0).reshape(8, 4)), [4, 4])

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=2, shuffle=True)


def loaders() -> dict[str, Any]:
    pair = {"a": DataLoader(Numbers(), 4, shuffle=True), "b": DataLoader(Stream(8), 4)}
    return {
        "augmented": DataLoader(Numbers(), 4, shuffle=True),
        "workers": DataLoader(Numbers(), 4, shuffle=True, num_workers=2, persistent_workers=True),
        "stream": DataLoader(Stream(), 4),
        "sampler": DataLoader(Numbers(), 4, sampler=RandomOrder()),
        "batch sampler": DataLoader(Numbers(), batch_sampler=Batches()),
        "weighted": DataLoader(Numbers(), 4, sampler=WeightedRandomSampler([1.0] * 12, 12)),
        "dict": pair,
        "longest": CombinedLoader(pair, "max_size"),
        "cycled": CombinedLoader(pair, "max_size_cycle"),
        "data module": Split(),
    }


def fit_unseeded() -> dict[str, list[str]]:
    seen = {}
    # The ranks of the pool may have no children by default, lest they outlive it; workers end with their loader.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    for name, loader in loaders().items():
        torch.seed()
        random.seed()
        numpy.random.seed()
        module = Module()
        options: dict[str, Any] = {"datamodule": loader} if name == "data module" else {"train_dataloaders": loader}
        strategy = FxPipeStrategy(num_microbatches=2)
        make_trainer(max_epochs=2, strategy=strategy, devices=2).fit(module, **options)
        seen[name] = module.seen
    return seen


@pytest.mark.slow
def test_ranks_see_the_same_batches_though_nobody_seeded(ranks: Ranks) -> None:
    first, second = ranks(2).run(fit_unseeded)
    assert first == second
    for name, seen in first.items():
        assert len(set(seen)) == len(seen) >= 2, f"{name}: random batches must differ from each other"


class Torn(Sampler[int]):
    """As long as it likes on each rank."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4 * (2 + int(os.environ["RANK"]))))


class Ones(Stream):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(self.count, 4))


def fit_torn() -> list[str]:
    rank = int(os.environ["RANK"])
    told = []
    for loader in (
        DataLoader(Ones(8 + 4 * rank), 4),
        DataLoader(Numbers(), 4, sampler=Torn()),
        DataLoader(TensorDataset(torch.ones(8 + 4 * rank, 4)), 4),
    ):
        L.seed_everything(1, verbose=False)
        with pytest.raises(BatchError) as caught:
            make_trainer(max_epochs=1, strategy=FxPipeStrategy(), devices=2).fit(Module(), loader)
        told.append(str(caught.value))
    return told


def test_data_that_ends_early_on_one_rank_is_refused_on_all(ranks: Ranks) -> None:
    for told in ranks(2).run(fit_torn, timeout_seconds=60):
        assert all("A dataloader has a different number of batches on different ranks" in text for text in told)
        assert "rank 0: 2 batches; rank 1: at least 3 batches" in told[0]
        assert "rank 0: 2 batches; rank 1: at least 3 batches" in told[1]
        assert "rank 0: 2 batches; rank 1: 3 batches" in told[2]


class Augmented(Dataset[Tensor]):
    """Random numbers that the workers draw."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(4) + index


def fit_augmented(stages: int) -> list[list[str]]:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    seen = []
    for workers in (False, True):
        L.seed_everything(5, workers=workers, verbose=False)
        module = Module()
        strategy = FxPipeStrategy(num_microbatches=2) if stages > 1 else "auto"
        make_trainer(max_epochs=1, strategy=strategy, devices=stages).fit(module, DataLoader(Augmented(), 4, num_workers=1))
        seen.append(module.seen)
    os.environ["PL_SEED_WORKERS"] = "0"  # as before
    return seen


def test_workers_draw_the_random_numbers_of_one_device_seeded_by_lightning_or_not(ranks: Ranks) -> None:
    alone = fit_augmented(1)
    assert alone[0] != alone[1]
    assert ranks(2).run(fit_augmented, 2) == [alone, alone]
