"""Common work of the replicas of a stage: they average gradients, and begin with the same state.

As ``torch.nn.parallel.DistributedDataParallel`` does it (arXiv 2006.15704): the mean over the replicas, in buckets, once where
a backward pass ends that is not accumulated; buffers are those of the first replica. Each rank begins as soon as its own
stages are done, while others still drain the pipeline.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor

from lightning_fxpipe._compat.torch import patched_attributes
from lightning_fxpipe.distributed.topology import Replicas
from lightning_fxpipe.distributed.values import broadcast_tensor

# As DDP's: large enough that the start of a message does not count.
_BUCKET_BYTES = 25 * 2**20
# Copies of so many buckets are there at a time.
_MAX_IN_FLIGHT = 2


def average_gradients(parameters: Iterable[Tensor], replicas: Replicas) -> None:
    """Makes each gradient the mean over the replicas. Called by the ranks with the same stages, in all replicas.

    A gradient that is None everywhere stays None; where only some replicas have one, it is zero on the others.

    Args:
        parameters: Of this rank, in the same order in all replicas.
        replicas: The replicas.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad and not parameter.is_meta]
    if not trained:
        return
    # Which are there the host has to know: it is a message between CPUs, for which no device waits.
    flags = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.uint8, device="cpu")
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=replicas.control_group)
    gradients = []
    for parameter, is_there in zip(trained, flags.tolist(), strict=True):
        if is_there and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if is_there and parameter.grad is not None:
            gradients.append(parameter.grad)
    with torch.no_grad():
        _reduce([gradient for gradient in gradients if gradient.layout is torch.strided], replicas)
        for gradient in gradients:
            if gradient.layout is not torch.strided:  # it gets other indices in its place
                dist.all_reduce(gradient.div_(replicas.count), group=replicas.group)


def _reduce(gradients: Sequence[Tensor], replicas: Replicas) -> None:
    """Averages dense tensors in their places."""
    under_way: deque[tuple[dist.Work, Tensor, list[Tensor]]] = deque()

    def take_back() -> None:
        work, flat, bucket = under_way.popleft()
        work.wait()
        for gradient, part in zip(bucket, _parts(flat, bucket), strict=True):
            gradient.copy_(part.view_as(gradient))

    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(replicas.count)
        work = dist.all_reduce(flat, group=replicas.group, async_op=True)
        assert work is not None
        under_way.append((work, flat, bucket))
        if len(under_way) > _MAX_IN_FLIGHT:
            take_back()
    while under_way:
        take_back()


def share_tensors(tensors: Iterable[Tensor], replicas: Replicas, *, source: int = 0) -> None:
    """Makes tensors those of one replica, the first by default. Called by the ranks with the same stages, in all replicas."""
    group = replicas.group
    if group is None:
        return
    with torch.no_grad():
        for bucket in _buckets([tensor.detach() for tensor in tensors if not tensor.is_meta]):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            broadcast_tensor(flat, dist.get_global_rank(group, source), group)
            if replicas.index != source:
                for tensor, part in zip(bucket, _parts(flat, bucket), strict=True):
                    tensor.copy_(part.view_as(tensor))


def _parts(flat: Tensor, bucket: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.split(flat, [tensor.numel() for tensor in bucket])


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one kind together, up to a size."""
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    num_bytes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for tensor in tensors:
        if not tensor.numel():
            continue
        kind = tensor.dtype, tensor.device
        buckets.setdefault(kind, []).append(tensor)
        num_bytes[kind] += tensor.numel() * tensor.element_size()
        if num_bytes[kind] >= _BUCKET_BYTES:
            del num_bytes[kind]
            yield buckets.pop(kind)
    yield from buckets.values()


class Replicated:
    """This rank's part of a module that other replicas have, too. Made by every rank.

    Args:
        replicas: The replicas.
        parameters, buffers: Gives those of this rank as they are now.
        noted: In this context gradients are averaged.
    """

    def __init__(
        self,
        replicas: Replicas,
        parameters: Callable[[], Iterable[Tensor]],
        buffers: Callable[[], Iterable[Tensor]],
        *,
        noted: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._noted = noted
        self._replicas = replicas
        self._parameters, self._buffers = parameters, buffers
        self._buffers_differ = False
        self._is_in_backward = False

    def begin(self) -> None:
        """Parameters and buffers are those of the first replica, as where they were drawn from other seeds."""
        share_tensors([*self._parameters(), *self._buffers()], self._replicas)

    def begin_run(self, *, trains: bool) -> None:
        """Called before each run. What its hooks do to buffers before the first step that trains is the first replica's."""
        self._buffers_differ = trains and self._replicas.are_several

    @contextmanager
    def step(self, *, trains: bool, averages: bool, is_manual: bool = False) -> Iterator[None]:
        """In the block a step runs. Where the one before has changed buffers, they are those of the first replica.

        Args:
            trains: Whether the step trains.
            averages: Whether gradients are averaged after it; if not, buffers go on by themselves until they are.
            is_manual: Whether the step optimizes by itself. Lightning's DDP does not tell torch's that there is a backward pass
                then, and buffers go on by themselves.
        """
        if self._buffers_differ:
            share_tensors(self._buffers(), self._replicas)
        is_averaged = trains and averages and self._replicas.are_several
        self._buffers_differ = is_averaged and not is_manual
        averaging = (Tensor, "backward", self._averaging(Tensor.backward))
        with patched_attributes(averaging) if is_averaged else nullcontext():
            yield

    @contextmanager
    def backward(self, *, averages: bool) -> Iterator[None]:
        """In the block Lightning's backward runs; after it gradients are averaged, if they are to be."""
        before, self._is_in_backward = self._is_in_backward, True
        try:
            yield
        finally:
            self._is_in_backward = before
        if averages and self._replicas.are_several:
            with self._noted():
                average_gradients(self._parameters(), self._replicas)

    def _averaging(self, original: Callable[..., None]) -> Callable[..., None]:
        """``loss.backward()`` that a step calls by itself, which under DDP ends with averaged gradients, too."""

        @functools.wraps(original)
        def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            if self._is_in_backward:
                original(tensor, *args, **kwargs)
                return
            with self.backward(averages=True):
                original(tensor, *args, **kwargs)

        return backward
