"""A signal to stop, SIGTERM, which may have reached one rank only, ends the run on all of them at the same batch."""

from __future__ import annotations

from typing import Any

import torch.distributed.distributed_c10d as dist

from lightning_fxpipe._compat.lightning import note_sigterm, stop_after_batch
from lightning_fxpipe.distributed.agreement import LateVote


class StopRequest:
    """Made by every rank for each run.

    Args:
        trainer: The Trainer.
        group: The pipeline's ranks; None without a process group.
    """

    def __init__(self, trainer: Any, group: dist.ProcessGroup | None) -> None:
        self._trainer = trainer
        self._vote = LateVote(group)
        self._is_asked = False
        note_sigterm(trainer, self._note)

    def at_batch(self) -> None:
        """Stops after this batch if a rank had been asked to before the last one. Called by every rank for each batch."""
        if self._vote.any_rank(self._is_asked):
            stop_after_batch(self._trainer)

    def _note(self) -> None:
        self._is_asked = True
