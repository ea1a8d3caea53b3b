"""Brings what the ranks have in parts to rank 0, on the CPU, each tensor once and straight into the memory that is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor, nn

from lightning_fxpipe._compat.torch import storage_key, tree_map
from lightning_fxpipe.distributed.agreement import gathered
from lightning_fxpipe.distributed.topology import Topology

# Which state, and what of it.
Key = tuple[str | int, str]

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


def collect(mine: Mapping[Key, Any], topology: Topology) -> dict[Key, Any] | None:
    """What any rank has, on rank 0, in which the values that it has itself go before; None on others. Called by every rank.

    Args:
        mine: This rank's values: tensors, containers of tensors, or anything that can be pickled.
        topology: This rank's place.
    """
    if topology.num_stages == 1:
        return dict(mine)
    names = gathered(topology.control_group, list(mine))
    known = set(names[topology.last_stage])  # which is on rank 0
    result = dict(mine)
    for stage in range(topology.last_stage):
        wanted = [name for name in names[stage] if name not in known]
        known.update(wanted)
        if stage == topology.stage_index and wanted:
            _send({name: mine[name] for name in wanted}, topology)
        elif topology.is_last and wanted:
            result |= _receive(topology.rank_of(stage), topology)
    return result if topology.is_last else None


def _send(values: dict[Key, Any], topology: Topology) -> None:
    group, target = topology.control_group, topology.last_rank
    described: dict[Any, Tensor | _Sent] = {}
    tensors: dict[int, Tensor] = {}

    def describe(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        key = identity(value)
        if key not in described:
            described[key] = _described(value)
            tensors[id(described[key])] = value
        return described[key]

    structure = tree_map(describe, values)
    stand_ins = [entry for entry in described.values() if isinstance(entry, _Sent)]
    # Pickled together: what stands for a tensor in the structure is then the object in the list, on the other side, too.
    dist.send_object_list([(structure, stand_ins)], dst=target, group=group)
    for entry in stand_ins:
        tensor = tensors[id(entry)].detach().permute(_inverse(entry.order)).cpu()
        dist.send(tensor.reshape(-1).view(torch.uint8), dst=target, group=group)


def _receive(source: int, topology: Topology) -> dict[Key, Any]:
    group = topology.control_group
    message: list[Any] = [None]
    dist.recv_object_list(message, src=source, group=group)
    structure, stand_ins = message[0]
    tensors: dict[int, Tensor] = {}
    for entry in stand_ins:
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        dist.recv(tensor.reshape(-1).view(torch.uint8), src=source, group=group)
        tensors[id(entry)] = tensor.permute(entry.order)
    result: dict[Key, Any] = tree_map(lambda value: tensors[id(value)] if isinstance(value, _Sent) else value, structure)
    return result


def identity(tensor: Tensor) -> Any:
    """Equal for tensors that are the same memory in the same way: further names of a shared parameter."""
    if not _is_plain(tensor) or not tensor.numel():
        return id(tensor)
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized


def _described(tensor: Tensor) -> Tensor | _Sent:
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
