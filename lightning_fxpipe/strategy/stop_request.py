"""A signal to stop, SIGTERM, which may have reached one rank only, ends the run on all of them at the same batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed.distributed_c10d as dist

from lightning_fxpipe._compat.lightning import note_sigterm, stop_after_batch
from lightning_fxpipe.distributed.agreement import LateVote


def stopping_together(trainer: Any, group: dist.ProcessGroup | None) -> Callable[[], None]:
    """Has SIGTERM wait for the next batch. Called by every rank before each run.

    Args:
        trainer: The Trainer.
        group: The pipeline's ranks; None without a process group.

    Returns:
        What stops after this batch if a rank had been asked to before the last one. Called by every rank for each batch.
    """
    vote, is_asked = LateVote(group), False

    def note() -> None:
        nonlocal is_asked
        is_asked = True

    def stop_if_asked() -> None:
        if vote.any_rank(is_asked):
            stop_after_batch(trainer)

    note_sigterm(trainer, note)
    return stop_if_asked
