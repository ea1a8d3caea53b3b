"""Tensors over the replicas: what ``self.all_gather``, ``sync_dist=True`` and the like mean under data parallelism.

Each rank talks to those that have the same stages in other replicas. The ranks of a pipeline have the same values, so all get
the same results; where only the ranks with the last stages come, as at the end of a step, these are among themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor

from lightning_fxpipe._compat.modes import makes_fakes, unwatched_torch
from lightning_fxpipe._compat.torch import FakeTensor
from lightning_fxpipe.distributed.topology import Replicas
from lightning_fxpipe.distributed.values import broadcast_object
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.user_code.for_microbatch import NeedsWholeBatch, is_for_microbatch
from lightning_fxpipe.user_code.frames import user_source


class TalksToReplicas(NeedsWholeBatch):
    """A step talks to other replicas where it runs for each microbatch, of which these may have fewer or none."""

    does = "communicates with other replicas"


def check_may_talk() -> None:
    """Raises :class:`TalksToReplicas` where that is forbidden. Called before user code's values go to other replicas."""
    if is_for_microbatch():
        raise TalksToReplicas(
            "The step communicates with other replicas, but this schedule runs the step once per microbatch.",
            where=user_source(),
            expected="a step whose loss depends only on the samples of its own replica",
            todo='Set FxPipeStrategy(schedule="gpipe"), which runs the step once per batch.',
        )


_MEANS = ("mean", "avg")
_OPERATIONS = {
    **dict.fromkeys(_MEANS, dist.ReduceOp.SUM),
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def reduced(value: Any, replicas: Replicas, group: Any, operation: Any) -> Any:
    """A tensor of each replica made one, in its place, as Lightning's DDP does. Called by ranks with the same stages.

    Args:
        value: The tensor; what is none stays as it is.
        replicas: The replicas.
        group: What the user gives for a group.
        operation: "mean", "sum" and so on, or one of torch's; None is the sum.

    Raises:
        UnsupportedError: There is no such operation, or the group is not that of the replicas.
    """
    if not replicas.are_several or not isinstance(value, Tensor):
        return value
    _check_group(replicas, group)
    check_may_talk()
    known: Any = _OPERATIONS.get(operation.lower()) if isinstance(operation, str) else operation or dist.ReduceOp.SUM
    if known is None:
        raise UnsupportedError(
            "The reduction over replicas is not supported.",
            observed=f"reduce_op={operation!r}",
            expected=f"one of {', '.join(_OPERATIONS)}, or a ReduceOp of torch.distributed",
            todo="Use one of these operations.",
        )
    found = exchanged(all_reduce, value, replicas, known)
    if isinstance(operation, str) and operation.lower() in _MEANS:
        found = found / replicas.count
    value.detach().copy_(found)
    return value


def gathered(tensor: Tensor, replicas: Replicas, group: Any = None, *, sync_grads: bool = False) -> Tensor:
    """A tensor of each replica, all of one shape, along a new first dimension. Called by ranks with the same stages.

    Args:
        tensor: This replica's.
        replicas: The replicas.
        group: What the user gives for a group.
        sync_grads: Whether gradients go back to the replicas.
    """
    if not replicas.are_several:
        return tensor
    _check_group(replicas, group)
    check_may_talk()
    # One call for those that watch the step, whether it is recorded or runs.
    return gathered_with_gradients(tensor if sync_grads else tensor.detach(), replicas)


def gathered_with_gradients(tensor: Tensor, replicas: Replicas) -> Tensor:
    """Gathers like :func:`gathered`; results that a replica computes from another's tensor count in the gradients of that
    tensor.

    torch's own all_gather with gradients takes ranks of a group for global ones on CPUs (2.13).
    """
    return cast(Tensor, _Gather.apply(tensor, replicas))  # type: ignore[no-untyped-call]


# Exchanges a tensor of this replica for what the group makes of them.
Exchange = Callable[..., Any]


def all_reduce(tensor: Tensor, replicas: Replicas, operation: Any) -> None:
    """An exchange: all tensors made one."""
    dist.all_reduce(tensor, op=operation, group=replicas.group)


def broadcast(tensor: Tensor, replicas: Replicas, source: int) -> None:
    """An exchange: the tensor of a replica."""
    dist.broadcast(tensor, group=replicas.group, group_src=source)


def exchanged(exchange: Exchange, tensor: Tensor, replicas: Replicas, *options: Any) -> Tensor:
    """Returns the result of an exchange for a copy of a tensor; one call for recorders and for real runs of a step."""
    return cast(Tensor, _Exchange.apply(tensor.detach(), replicas, exchange, *options))  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, replicas: Replicas, exchange: Exchange, *options: Any) -> Tensor:
        found = tensor.clone(memory_format=torch.contiguous_format)
        if not isinstance(tensor, FakeTensor):  # else the step is recorded
            exchange(found, replicas, *options)
        return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, replicas: Replicas) -> Tensor:
        ctx.replicas = replicas
        if isinstance(tensor, FakeTensor):  # while the step is recorded, where this is the same one call
            return torch.stack([tensor] * replicas.count)
        found = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(replicas.count)]
        dist.all_gather(found, tensor.contiguous(), group=replicas.group)
        return torch.stack(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.replicas.group)
        return summed[ctx.replicas.index], None


def reduced_with_gradients(tensor: Tensor, replicas: Replicas, operation: Any) -> Tensor:
    """All tensors made one; gradients of what the replicas compute from it are made one, too, as torch does it."""
    return cast(Tensor, _Reduce.apply(tensor, replicas, operation))  # type: ignore[no-untyped-call]


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, replicas: Replicas, operation: Any) -> Tensor:
        ctx.replicas, ctx.operation = replicas, operation
        found = tensor.clone(memory_format=torch.contiguous_format)
        if not isinstance(tensor, FakeTensor):  # else the step is recorded
            all_reduce(found, replicas, operation)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return reduced_with_gradients(gradients[0], ctx.replicas, ctx.operation), None, None


def broadcast_among_replicas(value: Any, replicas: Replicas, source: int) -> Any:
    """A replica's object, on all of them. Called by ranks with the same stages; while a step is recorded it is its own."""
    if makes_fakes():
        return value
    check_may_talk()
    with unwatched_torch():
        group = replicas.control_group
        return broadcast_object(value, source if group is None else dist.get_global_rank(group, source), group)


def voted(decision: bool, replicas: Replicas, *, all: bool) -> bool:
    """Returns True if all replicas, or any, say yes. Called by ranks with the same stages; while a step is recorded it is its
    own.
    """
    if makes_fakes():
        return decision
    check_may_talk()
    with unwatched_torch():
        votes = torch.tensor(int(decision), device="cpu")
        dist.all_reduce(votes, group=replicas.control_group)
        return int(votes) == replicas.count if all else int(votes) > 0


def _check_group(replicas: Replicas, group: Any) -> None:
    if group not in (None, dist.group.WORLD, replicas.group):
        raise UnsupportedError(
            "Values can be reduced or gathered over all replicas only.",
            observed="a custom process group",
            expected="no process group, which means all replicas",
            todo="Omit the process group.",
        )
