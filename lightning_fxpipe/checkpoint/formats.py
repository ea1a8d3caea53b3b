"""The formats that checkpoints come in, and the reading of those that are single files.

A *folder* is one of ``torch.distributed.checkpoint`` (``checkpoint.folders``). Every other format is read here into
what a plain Trainer writes, ``{"state_dict": ..., "optimizer_states": [...], ...}``, with tensors that are mapped from the
file: unused parts are never read.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fxpipe._compat.torch import tree_map
from lightning_fxpipe.checkpoint.checksums import has_checksums
from lightning_fxpipe.checkpoint.damage import damage_error, damage_told, unknown_error
from lightning_fxpipe.checkpoint.pickles import Reading, unpickled
from lightning_fxpipe.checkpoint.safetensors_files import CHECKSUMS, read_safetensors

# Lightning's entry by which it knows its checkpoints, and refuses others.
VERSION_KEY = "pytorch-lightning_version"
# Entries that the module loads; averaged weights may be the first, with the others beside them. What hooks have put into other
# entries, they get as it was.
MODULE_STATES = ("state_dict", "current_model_state")
# An entry that has the state of one optimizer.
OPTIMIZER = r"optimizer_\d+"
# Under what other programs keep the weights in a file of theirs.
_WEIGHTS_KEYS = ("state_dict", "model_state_dict", "model")
_SHARDED_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE_FILES = ("model.safetensors", "pytorch_model.bin")


class Format(Enum):
    """Formats of checkpoints on disk."""

    FOLDER = "folder of torch.distributed.checkpoint"
    FILE = "single file of a Trainer"
    STATE_DICT = "state dict"
    SAFETENSORS = "safetensors"
    SHARDED_WEIGHTS = "folder of weight files"

    @property
    def has_weights_only(self) -> bool:
        """True if there is nothing in it that a run could go on with."""
        return self not in (Format.FOLDER, Format.FILE)


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """Contents of a single file, or of a folder of weights.

    Attributes:
        format: What it was read from.
        checkpoint: As a Trainer writes it; of weights only, ``state_dict`` alone.
        metadata: What a safetensors file says about itself.
        has_checksums: Whether all that was read has been compared with checksums.
    """

    format: Format
    checkpoint: dict[str, Any]
    metadata: Mapping[str, str] = field(default_factory=dict)
    has_checksums: bool = False


def is_distributed_folder(path: Path) -> bool:
    """Returns True if torch.distributed.checkpoint has written the folder, to its end or not."""
    return (path / ".metadata").is_file() or (path.is_dir() and any(path.glob("*.distcp")))


def read_stored(path: Path, reading: Reading, is_wanted: Callable[[str], bool]) -> StoredCheckpoint:
    """Reads a checkpoint that is not a folder of torch.distributed.checkpoint.

    Args:
        path: A file of a Trainer, of ``torch.save(module.state_dict())``, a safetensors file, or a folder or index of these
            as Hugging Face writes it.
        reading: How.
        is_wanted: Says by its name whether a tensor of the model is wanted. The others are on the meta device.

    Raises:
        FileNotFoundError: There is nothing.
        FxPipeError: It is damaged, or nothing that is known.
    """
    if not path.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    if path.is_dir() or path.name.endswith(".index.json"):
        return _read_sharded(path, reading, is_wanted)
    if _is_safetensors(path):
        state, metadata = read_safetensors(path, is_wanted)
        weights = {"state_dict": state}
        return StoredCheckpoint(
            format=Format.SAFETENSORS, checkpoint=weights, metadata=metadata, has_checksums=CHECKSUMS in metadata
        )
    stored = stored_of(unpickled(path, str(path), reading), str(path), is_wanted)
    return replace(stored, has_checksums=has_checksums(path))


def stored_of(content: Any, where: str, is_wanted: Callable[[str], bool]) -> StoredCheckpoint:
    """Sorts the contents of a file, by whatever means it was read.

    Args:
        content: A Trainer's checkpoint, or a state dict.
        where: The file.
        is_wanted: As of :func:`read_stored`.

    Raises:
        FxPipeError: It is damaged, or nothing that is known.
    """
    with damage_told(where):
        known = _as_trainer_checkpoint(content)
        if known is None:
            raise unknown_error(where, f"a {type(content).__name__}" + _some_keys(content))
        kind, checkpoint = known
        return StoredCheckpoint(format=kind, checkpoint=_without_unwanted(checkpoint, is_wanted))


def _is_safetensors(path: Path) -> bool:
    """By its beginning: eight bytes that say how long the header is, and the header, which is JSON."""
    with path.open("rb") as file:
        start = file.read(9)
    return path.suffix == ".safetensors" or (len(start) == 9 and start[8:] == b"{" and start[:2] != b"PK")


def _as_trainer_checkpoint(content: Any) -> tuple[Format, dict[str, Any]] | None:
    """Converts a file's contents to the layout of a plain Trainer; returns None for an unknown format."""
    if not isinstance(content, Mapping) or not content:
        return None
    if VERSION_KEY in content:
        checkpoint = dict(content)
        if "state_dict" not in checkpoint and isinstance(checkpoint.get("model"), Mapping):
            # As `python -m lightning.fabric.utilities.consolidate_checkpoint` writes it.
            checkpoint["state_dict"] = checkpoint.pop("model")
            if optimizers := taken_optimizers(checkpoint):
                checkpoint["optimizer_states"] = optimizers
        return (Format.FILE, checkpoint) if isinstance(checkpoint.get("state_dict"), Mapping) else None
    if _is_state_dict(content):
        return Format.STATE_DICT, {"state_dict": content}
    for key in _WEIGHTS_KEYS:
        if isinstance(content.get(key), Mapping) and _is_state_dict(content[key]):
            return Format.STATE_DICT, {"state_dict": content[key]}
    return None


def taken_optimizers(*entries: dict[str, Any]) -> list[Any]:
    """Takes out the states of optimizers that are entries of their own, in the order of their numbers."""
    found = {name: some.pop(name) for some in entries for name in list(some) if re.fullmatch(OPTIMIZER, name)}
    return [found[name] for name in sorted(found, key=lambda name: int(name.rpartition("_")[2]))]


def _is_state_dict(content: Mapping[Any, Any]) -> bool:
    """Returns True if all is tensors; modules may keep other things beside them (``get_extra_state``), and metrics lists."""
    named = all(isinstance(key, str) for key in content)
    return (
        named
        and any(isinstance(value, Tensor) for value in content.values())
        and all(
            isinstance(value, Tensor)
            or key.endswith("_extra_state")
            or (isinstance(value, list) and all(isinstance(entry, Tensor) for entry in value))
            for key, value in content.items()
        )
    )


def _without_unwanted(checkpoint: dict[str, Any], is_wanted: Callable[[str], bool]) -> dict[str, Any]:
    """The checkpoint with tensors on the meta device for what is not wanted, in the states of the module that it holds."""
    names = checkpoint["state_dict"].keys()

    def stripped(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        items = {key: entry if key not in names or is_wanted(key) else _on_meta(entry) for key, entry in value.items()}
        return with_items(value, items)

    return {key: stripped(value) if key in MODULE_STATES else value for key, value in checkpoint.items()}


def with_items(state: Mapping[str, Any], items: Mapping[str, Any]) -> dict[str, Any]:
    """A state with other entries, of the same type, and with the versions of modules that torch keeps beside the entries."""
    if not isinstance(state, OrderedDict):
        return dict(items)
    result = OrderedDict(items)
    vars(result).update(vars(state))
    return result


def _on_meta(value: Any) -> Any:
    """The value with tensors that have no data in place of its tensors."""

    def stand_in(leaf: Any) -> Any:
        return torch.empty_like(leaf, device="meta", requires_grad=False) if isinstance(leaf, Tensor) else leaf

    return tree_map(stand_in, value)


def _read_sharded(path: Path, reading: Reading, is_wanted: Callable[[str], bool]) -> StoredCheckpoint:
    """Weights in a folder, in one file or several with an index, as Hugging Face's ``save_pretrained`` writes them."""
    weights = reading if reading.names_only else replace(reading, weights_only=True)
    folder = path if path.is_dir() else path.parent
    candidates = _SHARDED_INDICES if path.is_dir() else (path.name,)
    index = next((folder / name for name in candidates if (folder / name).is_file()), None)
    if index is None:
        whole = next((folder / name for name in _WHOLE_FILES if (folder / name).is_file()), None)
        if whole is None:
            raise unknown_error(str(path), _some_files(folder))
        return read_stored(whole, weights, is_wanted)
    with damage_told(str(index)):
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        # An index names files beside it, nothing elsewhere.
        shards = [folder / Path(name).name for name in dict.fromkeys(weight_map.values())]
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise damage_error(str(index), f"{', '.join(missing[:8])} is missing")
    parts = [read_stored(shard, weights, is_wanted) for shard in shards]
    state: dict[str, Tensor] = {name: tensor for part in parts for name, tensor in part.checkpoint["state_dict"].items()}
    if missing := sorted(weight_map.keys() - state.keys()):
        raise damage_error(str(index), f"no file has {', '.join(missing[:8])}")
    is_checked = all(part.has_checksums for part in parts)
    return StoredCheckpoint(format=Format.SHARDED_WEIGHTS, checkpoint={"state_dict": state}, has_checksums=is_checked)


def _some_keys(content: Any) -> str:
    return f" with {', '.join(map(str, list(content)[:8]))}" if isinstance(content, Mapping) else ""


def _some_files(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return f"a folder with {', '.join(names[:8])}" + (", ..." if len(names) > 8 else "") if names else "an empty folder"
