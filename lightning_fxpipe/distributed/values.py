"""Values with tensors inside, from a rank to another that does not know what it will get, on the CPU.

What describes them goes first, with small tensors in it; then the memory of each other tensor, as bytes: not every transport
knows every dtype. A tensor that the value has twice is sent once, and lies in memory as it does where it comes from.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor, nn

from lightning_fxpipe._compat.torch import storage_key, tree_map
from lightning_fxpipe.pytree.portable import packed
from lightning_fxpipe.pytree.sizes import as_bytes

# Smaller tensors travel together with what describes the others.
_SMALL = 1 << 16


@dataclass(frozen=True)
class _Sent:
    """Stands for a tensor that is sent by itself.

    Attributes:
        shape: Its shape with the dimensions in the order in which they lie in memory.
        order: Where in that order each dimension is.
        dtype: Its dtype.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype


def send_value(value: Any, target: int, group: dist.ProcessGroup | None) -> None:
    """Sends tensors in containers, and whatever else can be pickled, to the rank that calls :func:`receive_value`.

    The group is one for messages between CPUs.
    """
    description, tensors = _taken_apart(value)
    dist.send_object_list([packed(description)], dst=target, group=group)
    for tensor in tensors:
        dist.send(tensor, dst=target, group=group)


def receive_value(source: int, group: dist.ProcessGroup | None) -> Any:
    """Receives a value that ``source`` sends with :func:`send_value`."""
    box: list[Any] = [None]
    dist.recv_object_list(box, src=source, group=group)
    return _put_together(pickle.loads(box[0]), lambda memory: dist.recv(memory, src=source, group=group))


def broadcast_value(value: Any, source: int, group: dist.ProcessGroup | None) -> Any:
    """Returns the value of ``source``, as for :func:`send_value`; those of others are ignored. Called by every rank of the
    group.
    """
    is_source = dist.get_rank() == source
    description, tensors = _taken_apart(value) if is_source else (None, ())
    description = broadcast_object(description, source, group)
    for tensor in tensors:
        dist.broadcast(tensor, src=source, group=group)
    if is_source:
        return value
    return _put_together(description, lambda memory: dist.broadcast(memory, src=source, group=group))


def broadcast_object(value: Any, source: int, group: dist.ProcessGroup | None) -> Any:
    """Returns the picklable value of ``source``, with its small tensors; those of other ranks are not read.

    Called by every rank of the group.
    """
    box = [packed(value) if dist.get_rank() == source else None]
    dist.broadcast_object_list(box, src=source, group=group)
    return value if dist.get_rank() == source else pickle.loads(cast(bytes, box[0]))


def broadcast_tensor(tensor: Tensor, source: int, group: dist.ProcessGroup | None = None) -> None:
    """Gives a tensor of any dtype and layout the values that it has on ``source``. Called by every rank of the group.

    It has one shape and dtype on all of them. Its memory is sent, as gloo and NCCL do not know all dtypes.
    """
    with torch.no_grad():
        if not _is_plain(tensor):
            tensor.detach().copy_(broadcast_value(tensor.detach(), source, group))
            return
        memory = tensor.detach().contiguous()
        dist.broadcast(as_bytes(memory), src=source, group=group)
        if memory.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(memory)


def _taken_apart(value: Any) -> tuple[Any, Iterable[Tensor]]:
    """Returns a description of a value, and the memory of its tensors; of those on another device one copy at a time."""
    described: dict[Any, Tensor | _Sent] = {}
    tensors: dict[int, Tensor] = {}

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        key = identity(leaf)
        if key not in described:
            described[key] = _describe(leaf)
            tensors[id(described[key])] = leaf
        return described[key]

    structure = tree_map(describe, value)
    stand_ins = [entry for entry in described.values() if isinstance(entry, _Sent)]
    memory = (tensors[id(entry)].detach().permute(_inverse(entry.order)) for entry in stand_ins)
    # Pickled together: what stands for a tensor in the structure is then the object in the list, on the other side, too.
    return (structure, stand_ins), (as_bytes(tensor.cpu().contiguous()) for tensor in memory)


def _put_together(description: Any, receive: Callable[[Tensor], Any]) -> Any:
    structure, stand_ins = description
    tensors: dict[int, Tensor] = {}
    for entry in stand_ins:
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        receive(as_bytes(tensor))
        tensors[id(entry)] = tensor.permute(entry.order)
    return tree_map(lambda value: tensors[id(value)] if isinstance(value, _Sent) else value, structure)


def identity(tensor: Tensor) -> Any:
    """Equal for tensors that are the same memory in the same way: further names of a shared parameter."""
    if not _is_plain(tensor) or not tensor.numel():
        return id(tensor)
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized


def _describe(tensor: Tensor) -> Tensor | _Sent:
    """The tensor itself where it is sent by value: it is small, or its bytes are not all."""
    if not _is_plain(tensor):
        return tensor.detach().cpu()
    if tensor.nbytes < _SMALL:
        # A copy, as pickle takes all the memory that a tensor is a view of.
        return tensor.detach().cpu().clone()
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], dim))
    if not tensor.permute(order).is_contiguous():
        order = list(range(tensor.dim()))  # it has gaps, or elements several times: what is sent has not
    return _Sent(tuple(tensor.shape[dim] for dim in order), _inverse(tuple(order)), tensor.dtype)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=lambda dim: order[dim]))
