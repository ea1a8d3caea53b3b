"""Notes what makes the host wait for a CUDA device in a batch."""

from __future__ import annotations

import json
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
import torch


def noting(file: Path) -> L.Callback:
    """A callback that adds a line for each batch of the last epoch to a file: what ``torch.cuda.set_sync_debug_mode`` reports.

    In the epochs before it the first batch of each shape is looked at. What a callback keeps, the strategy hands on from one
    rank to the others, and so what each rank notes is in a file.
    """
    watching = ExitStack()

    def end(found: list[str]) -> None:
        torch.cuda.set_sync_debug_mode("default")
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(found) + "\n")

    class Noting(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.current_epoch + 1 != trainer.max_epochs:
                return
            found: list[str] = []

            def note(message: Any, category: Any, filename: str, lineno: int, *args: Any) -> None:
                if "synchroniz" in str(message):
                    found.append(f"{'/'.join(Path(filename).parts[-2:])}:{lineno}")

            watching.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            watching.callback(end, found)

        def on_train_batch_end(self, *args: Any) -> None:
            watching.close()

    return Noting()


def noted(file: Path) -> list[list[str]]:
    """What is in such a file, without what tells of the setting of the mode itself."""
    batches = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [[line for line in batch if not line.startswith("cuda/__init__.py")] for batch in batches]
