"""Several dataloaders, combined in every way that Lightning knows, with batches of different structure, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go

Ranks = Callable[[int], RankPool]


def pairs(samples: int, batch_size: int, seed: int) -> DataLoader[Any]:
    """Batches ``(x, y)``."""
    x = torch.randn(samples, 12, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, torch.arange(samples) % 5), batch_size=batch_size)


def dicts(samples: int, batch_size: int, seed: int) -> DataLoader[Any]:
    """Batches ``{"x": x, "y": y}``."""
    x = torch.randn(samples, 12, generator=torch.Generator().manual_seed(seed))
    return DataLoader([{"x": x[i], "y": i % 5} for i in range(samples)], batch_size=batch_size)  # type: ignore[arg-type]


class Several(Net):
    """Takes whatever the loaders give together or one after the other."""

    def _loss(self, batch: Any) -> Tensor:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        return nn.functional.cross_entropy(self(x), y)

    def _together(self, batch: Any) -> Tensor:
        if isinstance(batch, dict) and "x" not in batch:
            return torch.stack([self._loss(part) for part in batch.values() if part is not None]).sum()
        if isinstance(batch, (list, tuple)) and (batch[0] is None or not isinstance(batch[0], Tensor)):
            return torch.stack([self._loss(part) for part in batch if part is not None]).sum()
        return self._loss(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._together(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self._together(batch), batch_size=4)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log(f"test_loss_{dataloader_idx}", self._together(batch), add_dataloader_idx=False, batch_size=4)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        x = batch["x"] if isinstance(batch, dict) else batch[0]
        return self(x) + dataloader_idx


def with_loaders(fit: Callable[[], Any], evaluation: Callable[[], Any], prediction: Callable[[], Any]) -> Callable[[], Several]:
    def make() -> Several:
        module = Several()
        module.train_dataloader = fit  # type: ignore[method-assign]
        module.val_dataloader = module.test_dataloader = evaluation  # type: ignore[method-assign]
        module.predict_dataloader = prediction  # type: ignore[method-assign]
        return module

    return make


def both() -> list[DataLoader[Any]]:
    return [pairs(20, 4, 1), dicts(12, 4, 2)]


def named() -> dict[str, DataLoader[Any]]:
    return dict(zip("ab", both(), strict=True))


ALL = ("validate", "fit", "test", "predict")
RUNS: dict[str, Run] = {
    "lists": Run(module=with_loaders(both, both, both), calls=ALL),
    "dicts": Run(module=with_loaders(named, named, named), calls=ALL),
    **{
        mode: Run(
            module=with_loaders(lambda m=mode: CombinedLoader(both(), m), lambda m=mode: CombinedLoader(both(), m), both),
            calls=ALL,
        )
        for mode in ("max_size_cycle", "min_size", "max_size", "sequential")
    },
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    path = Path(folder) / f"{name}{stages}"
    path.mkdir(exist_ok=True)
    return go(RUNS[name], path, stages)


@pytest.mark.parametrize("names", [["lists", "max_size_cycle"], pytest.param([*RUNS][1:], marks=pytest.mark.slow)])
def test_batches_are_traced_as_they_come(ranks: Ranks, tmp_path: Path, names: list[str]) -> None:
    compare(ranks, do, names, tmp_path, 2)
