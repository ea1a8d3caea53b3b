"""Ranks of one pipeline must agree on what they do, or they would wait for each other forever or compute garbage."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Collection
from operator import itemgetter
from typing import Any, TypeVar, cast

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor

from lightning_fxpipe._compat.torch import unprofiled
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.distributed.values import broadcast_object
from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.pytree.containers import leaves_with_path
from lightning_fxpipe.pytree.portable import packed
from lightning_fxpipe.pytree.sizes import as_bytes

Value = TypeVar("Value")

_DIGESTED = 4096  # elements of a tensor, about
_WORDS = 1 << 18  # of a tensor's memory that are multiplied at once
_ODD = 0x1E3779B97F4A7C15


def check_agreement(
    group: dist.ProcessGroup | None, value: Any, disagreement: FxPipeError, reasons: Collection[str] = ()
) -> None:
    """Raises ``disagreement`` on every rank unless all have the same value. Called by every rank of the group.

    Args:
        group: The pipeline's ranks; None without a process group.
        value: Something small that can be pickled; None abstains.
        disagreement: The error; what the ranks have is filled in as observed.
        reasons: Why this rank may have another value. They are not compared; those that not all ranks have are told.
    """
    answers = gather_values(group, (value, (*reasons,)))
    values = [other for other, _ in answers]
    told = [other for other in values if other is not None]
    if any(other != told[0] for other in told):
        ranks = [*range(len(values))] if group is None else dist.get_process_group_ranks(group)
        shared = set.intersection(*(set(some) for _, some in answers))
        observed = []
        for rank, (other, some) in sorted(zip(ranks, answers, strict=True), key=itemgetter(0)):
            own = [reason for reason in some if reason not in shared]
            observed.append(f"rank {rank}: {other}{', since ' * bool(own)}{', '.join(own)}")
        raise type(disagreement)(
            disagreement.what,
            where=disagreement.where,
            observed="; ".join(observed),
            expected=disagreement.expected,
            todo=disagreement.todo,
        )


def gather_values(group: dist.ProcessGroup | None, value: Value) -> list[Value]:
    """Returns the small, picklable values of all ranks in the order of their global ranks; only this one's without a group.

    Called by every rank of the group.
    """
    if group is None:
        return [value]
    found: list[bytes] = [b""] * dist.get_world_size(group)
    dist.all_gather_object(found, packed(value), group=group)
    return [pickle.loads(each) for each in found]


def of_last_stage(value: Value, topology: Topology) -> Value:
    """The picklable value of the last stage's rank; the others' do not count. Called by every rank of the pipeline."""
    if topology.num_ranks == 1:
        return value
    return cast(Value, broadcast_object(value, topology.last_rank, topology.control_group))


def any_rank(vote: bool, topology: Topology) -> bool:
    """Returns True if any rank says yes. Called by every rank of the pipeline."""
    return any(gather_values(topology.control_group, vote))


class LateVote:
    """A vote whose outcome is known one call later, so that no rank waits for another. Made by every rank of the pipeline."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._cast: tuple[Tensor, dist.Work] | None = None

    def largest(self, *numbers: float) -> list[float] | None:
        """Returns the largest of each number that the ranks gave in the call before; None in the first call.

        Called by every rank.
        """
        if self._group is None:
            return [*numbers]
        before, votes = self._cast, torch.tensor(numbers, dtype=torch.float64, device="cpu")
        if before is not None:
            before[1].wait()
        with unprofiled():  # it ends with the next call
            work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._cast = votes, work
        return None if before is None else before[0].tolist()


def digest(batch: Any) -> str:
    """Equal for batches with equal tensors; of large ones it reads some thousand elements."""
    state = hashlib.blake2b(digest_size=8)
    for _, leaf in leaves_with_path(batch):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            state.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            elements = leaf.detach().reshape(-1)
            elements = elements[:: max(1, elements.numel() // _DIGESTED)]
            state.update(as_bytes(elements.cpu().contiguous()).numpy().tobytes())
    return state.hexdigest()


def fingerprint(value: Any) -> str:
    """Equal for values with equal bits; reads every element, where the tensor is."""
    found = []
    for path, leaf in leaves_with_path(value):
        if isinstance(leaf, Tensor) and leaf.is_sparse:
            leaf = leaf.detach().coalesce()
            found.append(f"{path}={tuple(leaf.shape)} {_checksum(leaf.indices())} {_checksum(leaf.values())}")
        elif isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            found.append(f"{path}={tuple(leaf.shape)} {leaf.dtype} {_checksum(leaf)}")
        else:
            found.append(f"{path}={leaf!r}")
    return ", ".join(found)


def _checksum(tensor: Tensor) -> int:
    """A sum of the 64-bit words of a tensor's memory, each times a number of its place: the order of elements counts."""
    memory = as_bytes(tensor.contiguous())
    whole = len(memory) // 8 * 8
    words = memory[:whole] if memory.storage_offset() % 8 == 0 else memory[:whole].clone()
    weights = torch.arange(min(whole // 8, _WORDS), device=tensor.device).mul_(_ODD).bitwise_or_(1)
    total = 0
    for part in torch.split(words.view(torch.int64), _WORDS):
        total = total * 31 + int((part * weights[: len(part)]).sum())
    return hash((total, *memory[whole:].tolist()))
