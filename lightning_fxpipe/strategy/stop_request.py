"""A signal to stop, SIGTERM, which may have reached one rank only, ends the run on all of them at the same batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed.distributed_c10d as dist

from lightning_fxpipe._compat.lightning import note_sigterm, stop_after_batch
from lightning_fxpipe.distributed.agreement import LateVote


def stopping_together(
    trainer: Any, everyone: dist.ProcessGroup | None, pipeline: dist.ProcessGroup | None
) -> Callable[[bool], None]:
    """Has SIGTERM wait for the next batch. Called by every rank before each run.

    Args:
        trainer: The Trainer.
        everyone: The ranks of all replicas; None without a process group.
        pipeline: The ranks of this one.

    Returns:
        What stops after this batch if a rank had been asked to before the last one. Called for each batch by every rank, with
        whether all replicas are there: where nothing is trained, they may have different numbers of batches.
    """
    votes, is_asked = {True: LateVote(everyone), False: LateVote(pipeline)}, False

    def note() -> None:
        nonlocal is_asked
        is_asked = True

    def stop_if_asked(are_all_here: bool) -> None:
        if votes[are_all_here].any_rank(is_asked):
            stop_after_batch(trainer)

    note_sigterm(trainer, note)
    return stop_if_asked
