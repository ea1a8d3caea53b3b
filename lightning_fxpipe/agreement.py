"""Ranks of one pipeline must agree on what they do, or they would wait for each other forever or compute garbage."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_fxpipe.containers import leaves_with_path
from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.topology import Topology


def check_agreement(group: dist.ProcessGroup | None, value: Any, disagreement: FxPipeError) -> None:
    """Raises ``disagreement`` on every rank unless all have the same value. Called by every rank of the group.

    Args:
        group: The pipeline's ranks; None without a process group.
        value: Something small that can be pickled.
        disagreement: The error; what the ranks have is filled in as observed.
    """
    if group is None:
        return
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    if any(other != values[0] for other in values):
        raise type(disagreement)(
            disagreement.what,
            where=disagreement.where,
            observed="; ".join(f"stage {stage}: {other}" for stage, other in enumerate(values)),
            expected=disagreement.expected,
            todo=disagreement.todo,
        )


def any_rank(vote: bool, topology: Topology) -> bool:
    """Whether any rank says yes. Called by every rank of the pipeline."""
    if topology.num_stages == 1:
        return vote
    votes = torch.tensor(int(vote))
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=topology.control_group)
    return bool(votes)


def digest(batch: Any) -> str:
    """Equal for batches with equal tensors."""
    state = hashlib.blake2b(digest_size=8)
    for _, leaf in leaves_with_path(batch):
        if isinstance(leaf, Tensor):
            state.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            state.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
