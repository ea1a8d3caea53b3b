"""Votes before each batch, whose outcome is known before the next one, so that no rank waits for another.

A signal to stop, SIGTERM, may have reached one rank only: all end the run at the same batch. And ranks of a pipeline that have
computed a batch with different graphs end it with an error: each found a graph that it knows, so that none waited for another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_fxpipe._compat.lightning import note_sigterm, stop_after_batch
from lightning_fxpipe.distributed.agreement import LateVote
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.errors import TraceError


def votes_before_batches(trainer: Any, topology: Topology) -> Callable[[int, bool], None]:
    """Has SIGTERM wait for the next batch. Called by every rank before each run.

    Args:
        trainer: The Trainer.
        topology: This pipeline's.

    Returns:
        The vote. Called for each batch by every rank, with a digest of the graphs that the batch before ran with, and with True
        if all replicas are there: where nothing is trained, they may have different numbers of batches. It stops the run after
        this batch if a rank had been asked to before the last one.

    Raises:
            TraceError: The ranks of the pipeline computed a batch with different graphs.
    """
    in_pipeline, among_all = LateVote(topology.control_group), LateVote(topology.replicas.everyone)
    is_asked = False

    def note() -> None:
        nonlocal is_asked
        is_asked = True

    def vote(graphs: int, are_all_here: bool) -> None:
        outcome = in_pipeline.largest(is_asked, graphs, -graphs)
        if outcome is not None and outcome[1] != -outcome[2]:
            raise _different_graphs()
        if topology.replicas.are_several and are_all_here:
            outcome = among_all.largest(is_asked)
        if outcome is not None and outcome[0]:
            stop_after_batch(trainer)

    note_sigterm(trainer, note)
    return vote


def _different_graphs() -> TraceError:
    return TraceError(
        "The ranks of the pipeline computed a batch with different traces.",
        where="the batch before the last one",
        observed="an attribute, an entry or a global variable that the model reads had a different value on some rank",
        expected="the same values on every rank when the model is called",
        todo="Look for state that your code sets on one rank only: in a hook under `if trainer.is_global_zero`, or from the "
        "clock, a file or unseeded random numbers. Set it on every rank.",
    )
