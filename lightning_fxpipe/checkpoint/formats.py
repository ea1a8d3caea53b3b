"""The formats that checkpoints come in, and the reading of those that are single files.

A *folder* is one of ``torch.distributed.checkpoint`` (``checkpoint.folders``). Every other format is read here into
what a plain Trainer writes, ``{"state_dict": ..., "optimizer_states": [...], ...}``, with tensors that are mapped from the
file: what nobody looks at is never read.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fxpipe._compat.torch import tree_map
from lightning_fxpipe.checkpoint.safetensors_files import read_safetensors
from lightning_fxpipe.errors import FxPipeError

# Lightning's entry by which it knows its checkpoints, and refuses others.
VERSION_KEY = "pytorch-lightning_version"
# An entry that has the state of one optimizer.
OPTIMIZER = r"optimizer_\d+"
# Under what other programs keep the weights in a file of theirs.
_WEIGHTS_KEYS = ("state_dict", "model_state_dict", "model")
_PICKLE_START = b"\x80"
_SHARDED_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE_FILES = ("model.safetensors", "pytorch_model.bin")


class Format(Enum):
    """What a checkpoint is written as."""

    FOLDER = "folder of torch.distributed.checkpoint"
    FILE = "single file of a Trainer"
    STATE_DICT = "state dict"
    SAFETENSORS = "safetensors"
    SHARDED_WEIGHTS = "folder of files with weights"

    @property
    def has_weights_only(self) -> bool:
        """Whether there is nothing in it that a run could go on with."""
        return self not in (Format.FOLDER, Format.FILE)


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """What a single file or a folder of weights holds.

    Attributes:
        format: What it was read from.
        checkpoint: As a Trainer writes it; of weights only, ``state_dict`` alone.
        metadata: What a safetensors file says about itself.
    """

    format: Format
    checkpoint: dict[str, Any]
    metadata: Mapping[str, str] = field(default_factory=dict)


def is_distributed_folder(path: Path) -> bool:
    """Whether torch.distributed.checkpoint has written the folder, to its end or not."""
    return (path / ".metadata").is_file() or (path.is_dir() and any(path.glob("*.distcp")))


def read_stored(
    path: Path, *, is_wanted: Callable[[str], bool], weights_only: bool | None = None, pickle_module: Any = None
) -> StoredCheckpoint:
    """Reads a checkpoint that is not a folder of torch.distributed.checkpoint.

    Args:
        path: A file of a Trainer, of ``torch.save(module.state_dict())``, a safetensors file, or a folder or index of these
            as Hugging Face writes it.
        is_wanted: Says by its name whether a tensor of the model is wanted. The others are on the meta device.
        weights_only: For ``torch.load``.
        pickle_module: For ``torch.load``.

    Raises:
        FileNotFoundError: There is nothing.
        FxPipeError: It is damaged, or nothing that is known.
    """
    if not path.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    if path.is_dir() or path.name.endswith(".index.json"):
        return _read_sharded(path, is_wanted)
    if _is_safetensors(path):
        state, metadata = read_safetensors(path, is_wanted)
        return StoredCheckpoint(format=Format.SAFETENSORS, checkpoint={"state_dict": state}, metadata=metadata)
    content = load_file(path, weights_only=weights_only, pickle_module=pickle_module)
    known = _as_trainer_checkpoint(content)
    if known is None:
        raise _unknown(path, f"a {type(content).__name__}" + _some_keys(content))
    kind, checkpoint = known
    return StoredCheckpoint(format=kind, checkpoint=_without_unwanted(checkpoint, is_wanted))


def _is_safetensors(path: Path) -> bool:
    """By its beginning: eight bytes that say how long the header is, and the header, which is JSON."""
    with path.open("rb") as file:
        start = file.read(9)
    return path.suffix == ".safetensors" or (len(start) == 9 and start[8:] == b"{" and start[:2] != b"PK")


def load_file(path: Path, *, weights_only: bool | None, pickle_module: Any = None) -> Any:
    """What ``torch.save`` has written, with tensors mapped from the file; raises :class:`FxPipeError` where it is damaged."""
    with path.open("rb") as file:
        start = file.read(2)
    is_archive = start == b"PK"
    if not start:
        raise _damage_error(path, "it is empty")
    if is_archive and not zipfile.is_zipfile(path):
        raise _damage_error(path, "its end is missing")
    if not is_archive and start[:1] != _PICKLE_START:
        raise _unknown(path, f"a file that begins with {start!r}")
    try:
        # torch's format from before 1.6 cannot be mapped.
        return torch.load(path, "cpu", pickle_module, weights_only=weights_only, mmap=is_archive)
    except pickle.UnpicklingError as error:
        if "weights_only" in str(error):
            raise  # torch says which class it was, and what to do about it
        raise _damage_error(path, error) from error
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError, ImportError, OSError) as error:
        raise _damage_error(path, error) from error


def _as_trainer_checkpoint(content: Any) -> tuple[Format, dict[str, Any]] | None:
    """What a file holds in the layout of a plain Trainer; None for something unknown."""
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
    """Whether all is tensors; modules may keep other things beside them (``get_extra_state``), and metrics lists."""
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
    """The checkpoint with tensors on the meta device for what is not wanted, in every state of the model that it holds."""
    names = checkpoint["state_dict"].keys()

    def stripped(value: Any) -> Any:
        # Weights beside averaged ones have the same names.
        if not isinstance(value, Mapping) or not value or not names & value.keys():
            return value
        items = {key: entry if key not in names or is_wanted(key) else _on_meta(entry) for key, entry in value.items()}
        return with_items(value, items)

    return {key: stripped(value) for key, value in checkpoint.items()}


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


def _read_sharded(path: Path, is_wanted: Callable[[str], bool]) -> StoredCheckpoint:
    """Weights in a folder, in one file or several with an index, as Hugging Face's ``save_pretrained`` writes them."""
    folder = path if path.is_dir() else path.parent
    candidates = _SHARDED_INDICES if path.is_dir() else (path.name,)
    index = next((folder / name for name in candidates if (folder / name).is_file()), None)
    if index is None:
        whole = next((folder / name for name in _WHOLE_FILES if (folder / name).is_file()), None)
        if whole is None:
            raise _unknown(path, _some_files(folder))
        return read_stored(whole, is_wanted=is_wanted, weights_only=True)
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise _damage_error(index, error) from error
    state: dict[str, Tensor] = {}
    for name in dict.fromkeys(weight_map.values()):
        shard = folder / Path(name).name  # an index names files beside it, nothing elsewhere
        if not shard.is_file():
            raise _damage_error(index, f"{name} is missing")
        state |= read_stored(shard, is_wanted=is_wanted, weights_only=True).checkpoint["state_dict"]
    if missing := sorted(weight_map.keys() - state.keys()):
        raise _damage_error(index, f"no file has {', '.join(missing[:8])}")
    return StoredCheckpoint(format=Format.SHARDED_WEIGHTS, checkpoint={"state_dict": state})


def _damage_error(path: Path, observed: object) -> FxPipeError:
    return FxPipeError(
        "The checkpoint cannot be read: it is damaged, or none.",
        where=str(path),
        observed=str(observed).splitlines()[0] if str(observed) else type(observed).__name__,
        expected="a checkpoint of a Trainer, a state dict, or a safetensors file",
    )


def _unknown(path: Path, observed: str) -> FxPipeError:
    return FxPipeError(
        "This is no checkpoint of a kind that is known.",
        where=str(path),
        observed=observed,
        expected="a folder of torch.distributed.checkpoint, a checkpoint of a Trainer, a state dict, or safetensors",
    )


def _some_keys(content: Any) -> str:
    return f" with {', '.join(map(str, list(content)[:8]))}" if isinstance(content, Mapping) else ""


def _some_files(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return f"a folder with {', '.join(names[:8])}" + (", ..." if len(names) > 8 else "") if names else "an empty folder"
