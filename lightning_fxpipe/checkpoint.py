"""A stage's state to and from checkpoints of the whole model, keyed by FQN.

A checkpoint is a folder of ``torch.distributed.checkpoint``: ``model.<fqn>``, ``optimizer_<i>.state.<fqn>.<name>`` and
``optimizer_<i>.param_groups`` with the FQNs of the whole model, beside Lightning's file with everything else. No key names a
stage, so the layout does not depend on how many there were. Plain ``.ckpt`` files of a single device load as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

from lightning_fxpipe._compat import metadata_filename
from lightning_fxpipe.errors import FxPipeError

GroupFQNs = tuple[tuple[str, ...], ...]


def group_fqns(module: nn.Module, optimizer: Optimizer) -> GroupFQNs:
    """FQNs of the parameters of each group, while the optimizer still has those of the whole model."""
    names = {id(parameter): fqn for fqn, parameter in module.named_parameters()}
    return tuple(tuple(names[id(parameter)] for parameter in group["params"]) for group in optimizer.param_groups)


def keep_local_parameters(optimizer: Optimizer) -> None:
    """Drops the parameters of other stages. The user's ``configure_optimizers`` has seen, and grouped, all of them."""
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if not parameter.is_meta]
    for parameter in [parameter for parameter in optimizer.state if parameter.is_meta]:
        del optimizer.state[parameter]


def module_state(module: nn.Module) -> dict[str, Any]:
    """This rank's part of ``module.state_dict()``."""
    return {fqn: value for fqn, value in module.state_dict().items() if not (isinstance(value, Tensor) and value.is_meta)}


def optimizer_state(module: nn.Module, optimizer: Optimizer, groups: GroupFQNs) -> dict[str, Any]:
    """This rank's part of the optimizer's state, keyed by FQN, with the groups of the whole model."""
    names = {id(parameter): fqn for fqn, parameter in module.named_parameters()}
    return {
        "state": {names[id(parameter)]: dict(state) for parameter, state in optimizer.state.items()},
        "param_groups": [
            {**{key: value for key, value in group.items() if key != "params"}, "params": list(fqns)}
            for group, fqns in zip(optimizer.param_groups, groups, strict=True)
        ],
    }


def save_folder(path: Path, checkpoint: dict[str, Any]) -> None:
    """Writes Lightning's checkpoint as a folder. Called by every rank; each writes its own tensors."""
    is_writer = dist.get_rank() == 0
    if is_writer and path.is_file():
        path.unlink()
    path.mkdir(parents=True, exist_ok=True)
    state = {"model": checkpoint.pop("state_dict")}
    for index, optimizer in enumerate(checkpoint.pop("optimizer_states", [])):
        state[f"optimizer_{index}"] = optimizer
    dcp_save(state, checkpoint_id=path)
    if is_writer:
        torch.save(checkpoint, path / metadata_filename())
    dist.barrier()


def load_folder(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[tuple[Optimizer, GroupFQNs]],
    *,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Reads this rank's part of a folder into the module and the optimizers. Called by every rank.

    Returns:
        Lightning's file, for the Trainer to restore the rest from.

    Raises:
        FxPipeError: With ``strict``, the folder's model has other keys than the module.
    """
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    model = module_state(module)
    _check_keys(module.state_dict(), [key[6:] for key in stored if key.startswith("model.")], path, strict)
    wanted = {key: value for key, value in model.items() if f"model.{key}" in stored}
    request: dict[str, Any] = {"model": wanted}
    for index, (optimizer, groups) in enumerate(optimizers):
        if any(key.startswith(f"optimizer_{index}.") for key in stored):
            request[f"optimizer_{index}"] = {
                "state": _optimizer_request(module, stored, index),
                "param_groups": optimizer_state(module, optimizer, groups)["param_groups"],
            }
    dcp_load(request, checkpoint_id=path)
    module.load_state_dict(wanted, strict=False)
    for index, (optimizer, _) in enumerate(optimizers):
        if f"optimizer_{index}" in request:
            loaded = request[f"optimizer_{index}"]
            set_optimizer_state(module, optimizer, loaded["state"], loaded["param_groups"])
    checkpoint: dict[str, Any] = torch.load(path / metadata_filename(), map_location="cpu", weights_only=weights_only)
    checkpoint["state_dict"] = wanted
    return checkpoint


def _optimizer_request(module: nn.Module, stored: Mapping[str, Any], index: int) -> dict[str, dict[str, Any]]:
    """Empty tensors for the stored states of this rank's parameters."""
    local = {fqn for fqn, parameter in module.named_parameters() if not parameter.is_meta}
    request: dict[str, dict[str, Any]] = {}
    for key, meta in stored.items():
        match = re.fullmatch(rf"optimizer_{index}\.state\.(.+)\.([^.]+)", key)
        if match and match[1] in local:
            is_tensor = isinstance(meta, TensorStorageMetadata)
            empty = torch.empty(meta.size, dtype=meta.properties.dtype) if is_tensor else None
            request.setdefault(match[1], {})[match[2]] = empty
    return request


def load_file(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[tuple[Optimizer, GroupFQNs]],
    *,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Reads this rank's part of a single-file checkpoint, as a plain Trainer writes it. Arguments as :func:`load_folder`."""
    checkpoint: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    state = checkpoint["state_dict"]
    _check_keys(module.state_dict(), list(state), path, strict)
    local = module_state(module)
    module.load_state_dict({key: value for key, value in state.items() if key in local}, strict=False)
    for (optimizer, groups), saved in zip(optimizers, checkpoint.get("optimizer_states", []), strict=False):
        # A plain optimizer numbers its parameters in the order of its groups.
        fqn_of = {
            number: fqn
            for saved_group, fqns in zip(saved["param_groups"], groups, strict=True)
            for number, fqn in zip(saved_group["params"], fqns, strict=True)
        }
        by_fqn = {fqn_of[number]: value for number, value in saved["state"].items()}
        set_optimizer_state(module, optimizer, by_fqn, saved["param_groups"])
    return checkpoint


def set_optimizer_state(
    module: nn.Module, optimizer: Optimizer, state: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Gives the optimizer the states of this rank's parameters and the options of its groups."""
    local = {fqn: parameter for fqn, parameter in module.named_parameters() if not parameter.is_meta}
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    for fqn, values in state.items():
        if fqn in local:
            parameter = local[fqn]
            optimizer.state[parameter] = {
                # A 0-dim step counter stays on the CPU, where torch's optimizers keep it.
                key: value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value
                for key, value in values.items()
            }


def _check_keys(expected: Mapping[str, Any], found: Sequence[str], path: Path, strict: bool) -> None:
    missing, unexpected = sorted({*expected} - {*found}), sorted({*found} - {*expected})
    if strict and (missing or unexpected):
        raise FxPipeError(
            "The checkpoint does not fit the model.",
            where=str(path),
            observed=f"missing keys {missing[:8]}, unexpected keys {unexpected[:8]}",
            expected="the keys of the model's state_dict",
            todo="Load it into the model that wrote it, or set strict_loading=False on the module.",
        )


def portable_rng(state: Mapping[str, Any]) -> dict[str, Any]:
    """Generator states as tensors and plain values, which ``torch.load(weights_only=True)`` accepts."""
    portable = {key: value for key, value in state.items() if key in ("python", "torch")}
    if "numpy" in state:
        name, keys, *rest = state["numpy"]
        portable["numpy"] = [name, [int(key) for key in keys], *rest]
    return portable


def usable_rng(portable: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of :func:`portable_rng`."""
    version, internal, gauss = portable["python"]
    return {**portable, "python": (version, tuple(internal), gauss)}
