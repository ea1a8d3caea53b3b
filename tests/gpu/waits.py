"""Notes what makes the host wait for a CUDA device in a batch."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
import torch


def noting(batches: list[list[str]]) -> L.Callback:
    """A callback that adds what ``torch.cuda.set_sync_debug_mode`` reports in each batch of the last epoch: lines that ask.

    In the epochs before it the first batch of each shape is looked at. The callback itself keeps nothing, so that the strategy
    has nothing to hand on from it.
    """
    watching = ExitStack()

    def note(message: Any, category: Any, filename: str, lineno: int, *args: Any) -> None:
        if "synchroniz" in str(message):
            batches[-1].append(f"{'/'.join(Path(filename).parts[-2:])}:{lineno}")

    class Noting(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.current_epoch + 1 == trainer.max_epochs:
                batches.append([])
                watching.enter_context(warnings.catch_warnings())
                warnings.simplefilter("always")
                warnings.showwarning = note
                torch.cuda.set_sync_debug_mode("warn")
                watching.callback(torch.cuda.set_sync_debug_mode, "default")

        def on_train_batch_end(self, *args: Any) -> None:
            watching.close()

    return Noting()
