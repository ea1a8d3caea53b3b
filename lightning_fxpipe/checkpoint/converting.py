"""From one format of checkpoints to another, bit for bit, in one process and without the model."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_fxpipe.checkpoint.atomic import replacing
from lightning_fxpipe.checkpoint.damage import damage_told
from lightning_fxpipe.checkpoint.folders import open_folder
from lightning_fxpipe.checkpoint.formats import VERSION_KEY, Format, read_stored
from lightning_fxpipe.checkpoint.locations import Location
from lightning_fxpipe.checkpoint.pickles import Reading
from lightning_fxpipe.checkpoint.safetensors_files import write_pretrained, write_safetensors
from lightning_fxpipe.checkpoint.saving import write_beside, write_parts
from lightning_fxpipe.checkpoint.single_file import GROUP_FQNS, is_by_fqn, with_numbers
from lightning_fxpipe.checkpoint.stage_state import (
    as_first_step,
    checkpoint_of_folder,
    entry_of,
    is_folder,
    rest_of,
    states_beside,
    taken_states,
    without_notes,
)
from lightning_fxpipe.errors import FxPipeError


class Target(Enum):
    """Formats that a checkpoint can be converted to."""

    FOLDER = "folder"
    FILE = "file"
    SAFETENSORS = "safetensors"
    PRETRAINED = "pretrained"

    @classmethod
    def of(cls, path: str) -> Target:
        """Returns the format that a path's name stands for."""
        if path.endswith("/") or not Path(path).suffix:
            return cls.FOLDER
        return cls.SAFETENSORS if path.endswith(".safetensors") else cls.FILE


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion.

    Attributes:
        source: The format that was found.
        target: What was written.
        submodule: Path of the submodule whose weights were written; empty for the whole module.
        left_out: Names of the source that the target has no place for.
        shared: Names of tensors that the target has under another name, by which loading finds them.
        has_numbers: Whether optimizers stay numbered, as nothing says what parameters the numbers mean.
    """

    source: Format
    target: Target
    submodule: str
    left_out: tuple[str, ...]
    shared: Mapping[str, str]
    has_numbers: bool

    def report(self, path: Path) -> str:
        """Returns the message about a conversion to ``path``."""
        lines = [f"Converted a {self.source.value} to {path} ({self.target.value})"]
        if self.submodule:
            lines.append(f"The weights are those of the submodule {self.submodule}, under its own names")
        if self.left_out:
            lines.append(f"Left out, because the format stores weights only: {', '.join(self.left_out)}")
        if self.shared:
            pairs = ", ".join(f"{name} = {kept}" for name, kept in self.shared.items())
            lines.append(f"Shared tensors, stored under one name only: {pairs}")
        if self.target is Target.FOLDER and self.has_numbers:
            lines.append(
                "The optimizer identifies its parameters by number, so its state is written to a single file of the folder"
            )
        return "\n".join(lines)


def convert(
    source: Location,
    path: Path,
    target: Target,
    *,
    only_weights: bool,
    pickle_is_trusted: bool,
    overwrites: bool,
    submodule: str | None = None,
) -> Conversion:
    """Converts a checkpoint. What is written gets its name when it is complete.

    Args:
        source: Any checkpoint.
        path: Where the new one goes.
        target: What it becomes.
        only_weights: Whether what is not needed to use the model is left out: optimizers, schedulers, callbacks.
        pickle_is_trusted: Whether objects of any class may be unpickled, which can run code.
        overwrites: Whether what is at ``path`` is replaced.
        submodule: Path of the submodule that a folder for ``from_pretrained`` is for; None: of a Trainer's checkpoint the one
            that has all tensors, if there is one.

    Raises:
        FxPipeError: There is no such checkpoint or submodule, or something at ``path``.
    """
    if path.exists() and not overwrites:
        raise FxPipeError("The target exists already.", where=str(path), todo="Pass --force to replace it.")
    if source.path is not None and path.exists() and source.path.resolve() == path.resolve():
        raise FxPipeError(
            "Source and target of a conversion are the same path.", where=str(path), todo="Choose another target."
        )
    form, checkpoint = read_whole(source, Reading(weights_only=not pickle_is_trusted))
    if only_weights:
        checkpoint = {key: value for key, value in checkpoint.items() if key not in _FOR_TRAINING}
    left_out: list[str] = []
    shared: dict[str, str] = {}
    chosen = ""
    if target in (Target.SAFETENSORS, Target.PRETRAINED):
        tensors = {name: value for name, value in checkpoint["state_dict"].items() if isinstance(value, Tensor)}
        if target is Target.PRETRAINED:
            chosen = _submodule_of(tensors, submodule, of_trainer=not form.has_weights_only)
        prefix = f"{chosen}." if chosen else ""
        written = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        left_out = [key for key in checkpoint if key not in ("state_dict", VERSION_KEY)]
        left_out += [name for name in checkpoint["state_dict"] if name not in tensors or not name.startswith(prefix)]
        with replacing(path) as new:
            shared = (write_pretrained if target is Target.PRETRAINED else write_safetensors)(new, written, {"format": "pt"})
    elif target is Target.FILE:
        with Location.of(path).writing() as file:
            torch.save(with_numbers(checkpoint), file)
    else:
        _write_folder(path, checkpoint)
    has_numbers = bool(checkpoint.get("optimizer_states")) and not is_by_fqn(checkpoint)
    return Conversion(form, target, chosen, tuple(left_out), shared, has_numbers)


def _submodule_of(tensors: Mapping[str, Tensor], wanted: str | None, *, of_trainer: bool) -> str:
    """Returns the path of the submodule whose weights are written."""
    if wanted is None:
        first = {name.partition(".")[0] for name in tensors}
        return first.pop() if of_trainer and len(first) == 1 else ""
    if wanted and not any(name.startswith(f"{wanted}.") for name in tensors):
        raise FxPipeError(
            "The checkpoint has no tensors of this submodule.",
            where=wanted,
            expected=f"one of {', '.join(sorted({name.partition('.')[0] for name in tensors}))}, or a path below",
            todo="Pass its path in the LightningModule, such as --submodule model.",
        )
    return wanted


# What `Trainer.save_checkpoint(weights_only=True)` leaves out; the precision plugin's state has the name of its class.
_FOR_TRAINING = ("optimizer_states", "lr_schedulers", "callbacks", "MixedPrecision", "current_model_state", "averaging_state")


def read_whole(source: Location, reading: Reading) -> tuple[Format, dict[str, Any]]:
    """A checkpoint of any format as a Trainer has it, optimizers by FQN where their names are known. Not for ranks."""
    if not is_folder(source):
        with source.local_copy() as path:
            stored = read_stored(path, reading, is_wanted=lambda fqn: True)
        if stored.format.has_weights_only:
            return stored.format, as_first_step(stored.checkpoint["state_dict"])
        with damage_told(source.text):
            return stored.format, _by_fqn(stored.checkpoint)
    folder = open_folder(source, reading)
    return Format.FOLDER, checkpoint_of_folder(folder, rest_of(folder), lambda path: True)


def _by_fqn(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint of a file with optimizers by FQN, where it says which parameters are in which group."""
    states = checkpoint.get("optimizer_states") or []
    known = entry_of(checkpoint).get(GROUP_FQNS)
    if known is None:
        known = [_names_in_groups(state) for state in states]
        # An optimizer made from `self.model.named_parameters()` has names, but not those of the module.
        if not {name for groups in known for group in groups for name in group} <= checkpoint["state_dict"].keys():
            return checkpoint
    if not any(states) or len(known) != len(states) or not all(map(_fits, states, known)):
        return checkpoint
    named = [_with_names(state, groups) for state, groups in zip(states, known, strict=True)]
    return {**without_notes(checkpoint, GROUP_FQNS), "optimizer_states": named}


def _names_in_groups(state: Mapping[str, Any]) -> list[list[str]]:
    """The names that torch keeps of an optimizer which was made from ``named_parameters``, or FQNs in place of numbers."""
    groups = state.get("param_groups", ())
    return [list(group.get("param_names") or [name for name in group["params"] if isinstance(name, str)]) for group in groups]


def _fits(state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> bool:
    counts = [len(group["params"]) for group in state.get("param_groups", ())]
    names = [name for group in groups for name in group]
    return counts == [len(group) for group in groups] and len({*names}) == len(names)


def _with_names(state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    names = {
        number: name
        for group, fqns in zip(state["param_groups"], groups, strict=True)
        for number, name in zip(group["params"], fqns, strict=True)
    }
    return {
        **state,
        "state": {names.get(number, number): value for number, value in state["state"].items()},
        "param_groups": [{**g, "params": list(fqns)} for g, fqns in zip(state["param_groups"], groups, strict=True)],
    }


def _write_folder(path: Path, checkpoint: dict[str, Any]) -> None:
    rest = dict(checkpoint)
    state = taken_states(rest, states_beside(checkpoint), checkpoint["state_dict"])
    # Numbers without names stay in the file beside the tensors, as a plain Trainer's: in keys they would become words.
    if is_by_fqn(rest):
        for index, optimizer in enumerate(rest.pop("optimizer_states")):
            (state if optimizer["state"] else rest)[f"optimizer_{index}"] = optimizer
    serialized = io.BytesIO()
    torch.save(rest, serialized)
    with replacing(path) as new:
        new.mkdir()
        write_beside(Location.of(new), serialized.getbuffer(), write_parts(state, FileSystemWriter(new), None))
