"""Checkpoints in other forms and places than a folder of this machine: a single file, and a folder behind a URL."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from lightning_fxpipe._compat import folder_writer, tree_map
from lightning_fxpipe._compat_lightning import metadata_filename
from lightning_fxpipe.agreement import gathered
from lightning_fxpipe.checkpoint import ENTRY, held, in_order, names_in_parts, taken_parts
from lightning_fxpipe.collect import Key, collect, identity
from lightning_fxpipe.folders import original_errors
from lightning_fxpipe.formats import with_items
from lightning_fxpipe.locations import Location
from lightning_fxpipe.topology import Topology

# In our entry of a file: for each optimizer and group the FQNs of the numbered parameters.
GROUP_FQNS = "group_fqns"


def save_file(location: Location, checkpoint: dict[str, Any], fqns: Collection[str], topology: Topology) -> None:
    """Writes the file that a plain Trainer would write. Called by every rank.

    Rank 0 gets the tensors that it lacks one by one and writes them from where they have been received; the file gets its name
    when it is complete.

    Args:
        location: The file.
        checkpoint: Lightning's checkpoint, with this rank's part of the states of model and optimizers.
        fqns: Names of the whole model's tensors, in their order.
        topology: This rank's place.
    """
    mine = held(checkpoint["state_dict"])
    beside = _of_any_rank(names_in_parts(checkpoint, mine, fqns), topology)
    parts: dict[Key, Any] = {}
    for name in ("state_dict", *beside):
        parts |= {(name, fqn): value for fqn, value in held(checkpoint[name]).items()}
    optimizers = checkpoint.get("optimizer_states", [])
    for index, optimizer in enumerate(optimizers):
        parts |= {(index, fqn): state for fqn, state in optimizer["state"].items()}
    collected = collect(parts, topology)
    if collected is not None:
        del parts
        collected = _on_cpu(collected)
        for name in ("state_dict", *beside):
            found = {fqn: value for (of, fqn), value in collected.items() if of == name}
            checkpoint[name] = in_order(with_items(checkpoint[name], found), fqns)
        fqns_of = [[list(group["params"]) for group in optimizer["param_groups"]] for optimizer in optimizers]
        checkpoint[ENTRY] = {**checkpoint.get(ENTRY, {}), GROUP_FQNS: fqns_of}
        for index, optimizer in enumerate(optimizers):
            states = {fqn: value for (of, fqn), value in collected.items() if of == index}
            optimizers[index] = numbered({**optimizer, "state": states})
        with location.written() as file:
            torch.save(checkpoint, file)
    if dist.is_initialized():
        dist.barrier()


def _of_any_rank(names: list[str], topology: Topology) -> list[str]:
    """The names that any rank has: one that holds all there is sees no parts."""
    found = gathered(topology.control_group, names)
    return list(dict.fromkeys(name for part in found for name in part))


def _on_cpu(values: dict[Key, Any]) -> dict[Key, Any]:
    """The values with tensors on the CPU; what shared memory still does."""
    moved: dict[Any, Tensor] = {}

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            return value
        return moved.setdefault(identity(value), value.cpu())

    result: dict[Key, Any] = tree_map(move, values)
    return result


def numbered(saved: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state by FQN as torch writes it, with parameters numbered in the order of their groups."""
    numbers: dict[str, int] = {}
    groups = [
        {**group, "params": [numbers.setdefault(fqn, len(numbers)) for fqn in group["params"]]}
        for group in saved["param_groups"]
    ]
    known = [(number, saved["state"][fqn]) for fqn, number in numbers.items() if fqn in saved["state"]]
    others = [(key, state) for key, state in saved["state"].items() if key not in numbers]
    return {**saved, "state": dict([*known, *others]), "param_groups": groups}


def save_folder_at(location: Location, checkpoint: dict[str, Any], fqns: Collection[str]) -> None:
    """Writes a folder behind a URL. Called by every rank; each writes its own tensors.

    No file system behind a URL is sure to rename a folder at once, so the file by which Lightning knows a folder is written
    last and removed first: without it a folder is not complete, and not read.
    """
    is_writer = dist.get_rank() == 0
    if is_writer:
        location.inside(metadata_filename()).remove()
        location.remove()
    dist.barrier()
    state = taken_parts(checkpoint, fqns)
    with original_errors():
        dcp_save(state, storage_writer=folder_writer(location.path, location.text, location.options))
    if is_writer:
        with location.inside(metadata_filename()).written() as file:
            torch.save(checkpoint, file)
    dist.barrier()
