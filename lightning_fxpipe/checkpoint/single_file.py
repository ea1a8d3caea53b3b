"""Checkpoints in other forms and places than a folder of this machine: a single file, and a folder behind a URL."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist

from lightning_fxpipe._compat.checkpoints import folder_writer
from lightning_fxpipe._compat.lightning import metadata_filename
from lightning_fxpipe.checkpoint.atomic import synced_file
from lightning_fxpipe.checkpoint.formats import with_items
from lightning_fxpipe.checkpoint.locations import Location
from lightning_fxpipe.checkpoint.saving import Write, on_cpu, on_every_rank, write_beside, write_parts
from lightning_fxpipe.checkpoint.stage_state import ENTRY, drop_placeholders, entry_of, in_order, names_in_parts, taken_parts
from lightning_fxpipe.distributed.agreement import gather_values
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.distributed.values import receive_value, send_value

# Which state, and what of it.
Key = tuple[str | int, str]

# In our entry of a file: for each optimizer and group the FQNs of the numbered parameters.
GROUP_FQNS = "group_fqns"


def whole_checkpoint(checkpoint: dict[str, Any], fqns: Collection[str], topology: Topology) -> dict[str, Any] | None:
    """The checkpoint that a plain Trainer would write, on rank 0; None on the others. Called by every rank.

    Rank 0 gets the tensors that it lacks one by one, and they are written from where they have been received.

    Args:
        checkpoint: Lightning's checkpoint, with this rank's part of the states of model and optimizers.
        fqns: Names of the whole model's tensors, in their order.
        topology: This rank's place.
    """
    mine = drop_placeholders(checkpoint["state_dict"])
    # Of any rank: one that holds all there is sees no parts.
    partial_names = gather_values(topology.control_group, names_in_parts(checkpoint, mine, fqns))
    beside = list(dict.fromkeys(name for names in partial_names for name in names))
    parts: dict[Key, Any] = {}
    for name in ("state_dict", *beside):
        parts |= {(name, fqn): value for fqn, value in drop_placeholders(checkpoint[name]).items()}
    optimizers = checkpoint.get("optimizer_states", [])
    for index, optimizer in enumerate(optimizers):
        # Where configure_optimizers gives none, Lightning has one that has no state.
        parts |= {(index, fqn): state for fqn, state in optimizer.get("state", {}).items()}
    collected = _collect(parts, topology)
    del parts
    if collected is None:
        return None
    collected = on_cpu(collected, copied=False)
    for name in ("state_dict", *beside):
        found = {fqn: value for (of, fqn), value in collected.items() if of == name}
        checkpoint[name] = in_order(with_items(checkpoint[name], found), fqns)
    for index, optimizer in enumerate(optimizers):
        states = {fqn: value for (of, fqn), value in collected.items() if of == index}
        optimizers[index] = {**optimizer, "state": states} if optimizer else optimizer
    return with_numbers(checkpoint)


def file_writer(whole: dict[str, Any] | None, *, copied: bool) -> Write:
    """Returns a function that writes a checkpoint as a single file.

    Args:
        whole: The checkpoint, on rank 0.
        copied: Whether its values may change before they are written.
    """
    contents = on_cpu(whole, copied=True) if copied else whole

    def write(path: Path, group: dist.ProcessGroup | None) -> None:
        if contents is not None:
            with synced_file(path) as file:
                torch.save(contents, file)

    return write


def save_file_at(location: Location, checkpoint: dict[str, Any], fqns: Collection[str], topology: Topology) -> None:
    """Writes a file behind a URL. Called by every rank."""
    whole = whole_checkpoint(checkpoint, fqns, topology)

    def write() -> None:
        if whole is not None:
            with location.writing() as file:
                torch.save(whole, file)

    on_every_rank(topology.control_group, write)


def _collect(mine: Mapping[Key, Any], topology: Topology) -> dict[Key, Any] | None:
    """Collects the values of all ranks on rank 0, whose own take precedence; returns None on others. Called by every rank.

    Args:
        mine: This rank's values: tensors, containers of tensors, or anything that can be pickled.
        topology: This rank's place.
    """
    if topology.num_ranks == 1:
        return dict(mine)
    names = gather_values(topology.control_group, list(mine))
    known = set(names[0])
    result = dict(mine)
    for rank, theirs in enumerate(names[1:], start=topology.first_rank + 1):
        wanted = [name for name in theirs if name not in known]
        known.update(wanted)
        if rank == dist.get_rank() and wanted:
            send_value({name: mine[name] for name in wanted}, topology.last_rank, topology.control_group)
        elif topology.is_last and wanted:
            result |= receive_value(rank, topology.control_group)
    return result if topology.is_last else None


def with_numbers(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Converts a checkpoint to a plain Trainer's layout: parameters of optimizers numbered, with a table of the numbers
    beside.
    """
    if not is_by_fqn(checkpoint):
        return checkpoint
    states = checkpoint["optimizer_states"]
    fqns = [[list(group["params"]) for group in state["param_groups"]] for state in states]
    entry = {**entry_of(checkpoint), GROUP_FQNS: fqns}
    return {**checkpoint, "optimizer_states": [_number_parameters(state) for state in states], ENTRY: entry}


def is_by_fqn(checkpoint: Mapping[str, Any]) -> bool:
    """Returns True if there are optimizers, and all of their parameters have names."""
    states = checkpoint.get("optimizer_states") or []
    groups = [group for state in states for group in state.get("param_groups", ())]
    return bool(groups) and all(isinstance(name, str) for group in groups for name in group["params"])


def _number_parameters(saved: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state by FQN as torch writes it, with parameters numbered in the order of their groups."""
    numbers: dict[str, int] = {}
    groups = [
        {**group, "params": [numbers.setdefault(fqn, len(numbers)) for fqn in group["params"]]}
        for group in saved["param_groups"]
    ]
    known = [(number, saved["state"][fqn]) for fqn, number in numbers.items() if fqn in saved["state"]]
    others = [(key, state) for key, state in saved["state"].items() if key not in numbers]
    return {**saved, "state": dict([*known, *others]), "param_groups": groups}


def save_folder_at(location: Location, checkpoint: dict[str, Any], fqns: Collection[str], topology: Topology) -> None:
    """Writes a folder behind a URL. Called by every rank; each writes its own tensors.

    No file system behind a URL is sure to rename a folder at once, so the file by which Lightning knows a folder is written
    last and removed first: without it a folder is not complete, and not read.
    """
    group, is_writer = topology.control_group, dist.get_rank() == 0
    parts = taken_parts(checkpoint, fqns)

    def remove_old() -> None:
        if is_writer:
            location.inside(metadata_filename()).remove()
            location.remove()

    def write_rest() -> None:
        if is_writer:
            rest = io.BytesIO()
            torch.save(checkpoint, rest)
            write_beside(location, rest.getbuffer(), checksums)

    on_every_rank(group, remove_old)
    checksums = write_parts(parts, folder_writer(location.path, location.text, location.options), group)
    on_every_rank(group, write_rest)
