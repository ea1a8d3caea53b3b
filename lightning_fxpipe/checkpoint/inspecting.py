"""Contents of a checkpoint, listed without reading its tensors and without running code of it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fxpipe._compat.lightning import metadata_filename
from lightning_fxpipe._compat.torch import tree_leaves
from lightning_fxpipe.checkpoint.folders import Folder, open_folder
from lightning_fxpipe.checkpoint.formats import OPTIMIZER, VERSION_KEY, Format, read_stored
from lightning_fxpipe.checkpoint.locations import Location
from lightning_fxpipe.checkpoint.pickles import Reading
from lightning_fxpipe.checkpoint.stage_state import (
    ENTRY,
    checkpoint_of_folder,
    entry_of,
    is_folder,
    rest_of,
    states_beside,
)
from lightning_fxpipe.optim.optimizers import GROUPS
from lightning_fxpipe.reporting.table import human_bytes, human_count, render_table

# What Lightning puts into every checkpoint; shown in words of its own.
_SHOWN = {"epoch", "global_step", VERSION_KEY, "state_dict", "optimizer_states", "callbacks", "lr_schedulers", ENTRY}


@dataclass(frozen=True)
class Contents:
    """A checkpoint without the data of its tensors.

    Attributes:
        location: Where it is.
        format: How it is written.
        checkpoint: What is in it, as a Trainer has it, with tensors on the meta device.
        lacking: Why it is not complete; empty for one that is.
        is_verified: Whether all of it has been compared with checksums; None where that was not asked for.
    """

    location: Location
    format: Format
    checkpoint: Mapping[str, Any]
    lacking: str = ""
    is_verified: bool | None = None

    @property
    def states(self) -> dict[str, Mapping[str, Any]]:
        """The states of the model: one, or also that of weights beside averaged ones."""
        return {"model": self.checkpoint["state_dict"], **states_beside(self.checkpoint)}


def look_into(location: Location, *, verifies: bool = False) -> Contents:
    """Opens a checkpoint of any format.

    Args:
        location: Where it is.
        verifies: Whether all of it is read, and compared with its checksums.

    Raises:
        FxPipeError: It is damaged, or none.
    """
    if not is_folder(location):
        return _look_into_stored(location, Reading(names_only=True, is_checked=lambda number: verifies), reads_all=verifies)
    folder = Folder(location, Reading(names_only=True))
    lacking = ", ".join(folder.lacks())
    if not location.inside(".metadata").exists():
        folder = open_folder(location, folder.reading)  # which says so
    rest = rest_of(folder) if location.inside(metadata_filename()).exists() else {}
    # Of an optimizer the options are read, which are numbers; everything else by its metadata.
    checkpoint = checkpoint_of_folder(
        folder, rest, lambda path: not lacking and re.fullmatch(OPTIMIZER, str(path[0])) is not None and path[1] == GROUPS
    )
    if not verifies or lacking:
        return Contents(location, Format.FOLDER, checkpoint, lacking)
    folder.verify()
    return Contents(location, Format.FOLDER, checkpoint, is_verified=True)


def _look_into_stored(location: Location, reading: Reading, *, reads_all: bool) -> Contents:
    with location.local_copy() as path:
        stored = read_stored(path, reading, is_wanted=lambda fqn: reads_all)
    notes = {"metadata": dict(stored.metadata)} if stored.metadata else {}
    is_verified = stored.has_checksums if reads_all else None
    return Contents(location, stored.format, stored.checkpoint | notes, is_verified=is_verified)


def describe(contents: Contents, *, with_tensors: bool) -> str:
    """The text that a user reads."""
    parts = ["\n".join(f"{name:<13}{value}" for name, value in _facts(contents))]
    tensors = {name: _tensors(list(state.values())) for name, state in contents.states.items()}
    optimizers = contents.checkpoint.get("optimizer_states") or []
    for index, optimizer in enumerate(optimizers):
        states = _states_by_name(optimizer.get("state") or {})
        tensors |= {f"optimizer {index}: {name}": _tensors(values) for name, values in states.items()}
    total = sum(_num_bytes(some) for some in tensors.values())
    parts.append(
        render_table(
            "Tensors",
            ("What", "Tensors", "Elements", "Bytes", "Dtypes"),
            [
                (name, str(len(some)), human_count(sum(t.numel() for t in some)), human_bytes(_num_bytes(some)), _dtypes(some))
                for name, some in tensors.items()
            ],
            right_aligned=("Tensors", "Elements", "Bytes"),
            caption=f"{human_bytes(total)} in total",
        )
    )
    for index, optimizer in enumerate(optimizers):
        parts.append(_groups_table(index, optimizer.get("param_groups", ())))
    if with_tensors:
        parts += [_tensors_table(name, state) for name, state in contents.states.items()]
    return "\n\n".join(parts)


def as_dict(contents: Contents) -> dict[str, Any]:
    """Plain data, as ``fxpipe inspect --json`` prints it."""
    checkpoint = contents.checkpoint
    return {
        "checkpoint": contents.location.text,
        "format": contents.format.value,
        "complete": not contents.lacking,
        "lacking": contents.lacking,
        "verified": contents.is_verified,
        "epoch": checkpoint.get("epoch"),
        "global_step": checkpoint.get("global_step"),
        "facts": dict(_facts(contents)),
        "tensors": {
            name: {
                fqn: {"shape": list(leaf.shape), "dtype": _dtype_words(leaf.dtype), "bytes": leaf.nbytes}
                for fqn, value in state.items()
                for leaf in _tensors(value)
            }
            for name, state in contents.states.items()
        },
        "optimizers": [
            [{key: _plain(value) for key, value in group.items() if key != "params"} for group in each.get("param_groups", ())]
            for each in checkpoint.get("optimizer_states") or []
        ],
    }


def _facts(contents: Contents) -> Iterator[tuple[str, str]]:
    checkpoint = contents.checkpoint
    yield "Checkpoint", contents.location.text
    yield "Format", contents.format.value
    yield "Complete", f"no: {contents.lacking}" if contents.lacking else "yes"
    if contents.is_verified is not None:
        yield "Verified", "yes" if contents.is_verified else "no: it has no checksums"
    if "global_step" in checkpoint:
        yield "Step", f"{checkpoint['global_step']}, epoch {checkpoint.get('epoch')}"
    origin = entry_of(checkpoint)
    versions = dict(origin.get("versions") or {})
    versions.setdefault("lightning", checkpoint.get(VERSION_KEY))
    known = [f"{name} {number}" for name, number in versions.items() if number]
    if known:
        yield "Written by", ", ".join(known)
    if plan := origin.get("plan"):
        microbatches = origin.get("num_microbatches") or "auto"
        schedule = f", schedule {origin['schedule']}, {microbatches} microbatches" if "schedule" in origin else ""
        yield "Stages", f"{len(plan['stages'])}{schedule}"
    if callbacks := checkpoint.get("callbacks"):
        yield "Callbacks", ", ".join(str(name).partition("{")[0] for name in callbacks)
    if schedulers := checkpoint.get("lr_schedulers"):
        yield "Schedulers", str(len(schedulers))
    others = [str(key) for key in checkpoint if key not in _SHOWN and key not in contents.states]
    if others:
        yield "Also", ", ".join(others)
    missing = [name for name, value in contents.states["model"].items() if not isinstance(value, (Tensor, list))]
    if missing:
        yield "No tensors", ", ".join(missing)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _dtypes(tensors: Iterable[Tensor]) -> str:
    """Their dtypes, most bytes first."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.nbytes
    return ", ".join(_dtype_words(dtype) for dtype, _ in sizes.most_common())


def _dtype_words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _states_by_name(states: Mapping[Any, Any]) -> dict[str, list[Any]]:
    """Lists an optimizer's entries for its parameters, by its own names for these."""
    found: dict[str, list[Any]] = {}
    for state in states.values():
        for name, value in state.items() if isinstance(state, Mapping) else ():
            found.setdefault(str(name), []).append(value)
    return found


def _groups_table(index: int, groups: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for number, group in enumerate(groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        rows.append((str(number), str(len(group["params"])), ", ".join(f"{k}={_short(v)}" for k, v in options.items())))
    return render_table(f"Optimizer {index}", ("Group", "Parameters", "Options"), rows, right_aligned=("Parameters",))


def _short(value: Any) -> str:
    if isinstance(value, Tensor) and value.is_meta:
        return "tensor"
    return str(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)


def _plain(value: Any) -> Any:
    """Converts a value to plain JSON data."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    is_plain = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else _short(value)


def _tensors_table(name: str, state: Mapping[str, Any]) -> str:
    rows = [
        (fqn, "×".join(map(str, leaf.shape)) or "scalar", _dtype_words(leaf.dtype), human_bytes(leaf.nbytes))
        for fqn, value in state.items()
        for leaf in _tensors(value)
    ]
    return render_table(f"Tensors of {name}", ("Name", "Shape", "Dtype", "Bytes"), rows, right_aligned=("Bytes",))
