"""The strategy's hooks about checkpoints, each a few lines that hand over to :class:`CheckpointHooks`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fxpipe._compat.lightning import checkpoints_in_background
from lightning_fxpipe.checkpoint.saving import Saver
from lightning_fxpipe.distributed.failure import has_failed
from lightning_fxpipe.strategy.checkpoint_hooks import CheckpointHooks
from lightning_fxpipe.strategy.replica_strategy import ReplicaStrategy
from lightning_fxpipe.strategy.support import report_unsaved

_LAST_SECONDS = 2.0  # that a checkpoint in the background still has when the run has failed


class CheckpointStrategy(ReplicaStrategy):
    """What ``FxPipeStrategy`` does with checkpoints.

    Args:
        saver: Saves.
    """

    def __init__(self, saver: Saver) -> None:
        super().__init__()
        self._saver = saver
        self._checkpoints: CheckpointHooks | None = None
        self._seed = 0
        self._has_trained = False  # in this run; what is restored then is no resumed run, but a trial that is over

    @property
    def _saving(self) -> CheckpointHooks:
        if self._checkpoints is None:
            raise RuntimeError("Checkpoints are of a module in stages, which it is from the strategy's setup on.")
        return self._checkpoints

    @property
    def _saves_nothing(self) -> bool:
        """Whether a run ends with an exception before the module is in stages, and a hook on exceptions wants a checkpoint."""
        return self._checkpoints is None and sys.exc_info()[0] is not None

    def _begin_saving(self, trainer: Trainer, checkpoints: CheckpointHooks) -> Any:
        """For a new run; returns what holds while it is on, a context."""
        self._checkpoints = checkpoints
        self._has_trained = False
        return checkpoints_in_background(trainer, checkpoints.is_started, checkpoints.link)

    def _end_saving(self) -> None:
        if has_failed():
            self._saver.abandon(_LAST_SECONDS)
        elif self._checkpoints is not None:
            self._saving.end()

    @override
    def on_train_start(self) -> None:
        self._saving.begin_training()

    @override
    def on_train_end(self) -> None:
        self._saving.end()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {} if self._saves_nothing else self._saving.module_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {} if self._saves_nothing else self._saving.optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        if self._saves_nothing:
            report_unsaved(filepath, self.global_rank)
            return
        self._saving.save(checkpoint, self.broadcast(filepath), storage_options, seed=self._seed)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if not self.is_global_zero:
            return
        if self._checkpoints is None or "://" in os.fspath(filepath):
            self._saver.when_saved(partial(super().remove_checkpoint, filepath))
        else:
            self._checkpoints.remove(Path(filepath))

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return self._saving.load(self.broadcast(checkpoint_path), weights_only=weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._saving.load_model(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        seed = self._saving.load_optimizers(checkpoint, is_resumed=not self._has_trained)
        self._seed = self._seed if seed is None else seed
