"""Runs of the modules of `logmodules`, with all that they log."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.inmemory import InMemory
from tests.logmodules import CLASSES, VARIANTS


class Watcher(L.Callback):
    """Reads the Trainer's metrics wherever a callback may."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, dict[str, float]]]] = []

    def _read(self, place: str, trainer: Any) -> None:
        read = {}
        for kind in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            read[kind] = {key: float(value) for key, value in getattr(trainer, kind).items()}
        self.seen.append((place, read))

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._read("on_train_batch_end", trainer)

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        self._read("on_validation_batch_end", trainer)

    def on_test_batch_end(self, trainer: Any, *args: Any) -> None:
        self._read("on_test_batch_end", trainer)

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        self._read("on_train_epoch_end", trainer)

    def on_validation_epoch_end(self, trainer: Any, *args: Any) -> None:
        self._read("on_validation_epoch_end", trainer)

    def on_validation_end(self, trainer: Any, *args: Any) -> None:
        self._read("on_validation_end", trainer)

    def on_test_end(self, trainer: Any, *args: Any) -> None:
        self._read("on_test_end", trainer)

    def on_fit_end(self, trainer: Any, *args: Any) -> None:
        self._read("on_fit_end", trainer)


def loader(num_samples: int, seed: int) -> DataLoader[Any]:
    """Batches of 8 samples; the last may be smaller."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 8, generator=generator)
    y = torch.randint(0, CLASSES, (num_samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def run_variant(name: str, **options: Any) -> dict[str, Any]:
    """Fits, validates and tests a variant; returns all that must be the same on one device and on every rank of a pipeline."""
    L.seed_everything(11, verbose=False)
    module, watcher, memory = VARIANTS[name](), Watcher(), InMemory()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=[watcher],
        logger=memory,
        log_every_n_steps=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"devices": 1} | options),
    )
    loaders = [loader(11, 2), loader(8, 3)] if name == "Loader2" else loader(11, 2)
    trainer.fit(module, loader(19, 1), loaders)
    results = [trainer.test(module, loaders, verbose=False)]
    return {"seen": watcher.seen, "history": [*memory.history, *memory.writer.written], "results": results}
