"""A stage's state to and from checkpoints of the whole model, keyed by FQN.

A checkpoint is a folder of ``torch.distributed.checkpoint``: ``model.<fqn>``, ``optimizer_<i>.state.<fqn>.<name>`` and
``optimizer_<i>.param_groups`` with the FQNs of the whole model, beside Lightning's file with everything else. No key names a
stage, so the layout does not depend on how many there were. Plain ``.ckpt`` files of a single device load as well.
"""

from __future__ import annotations

import itertools
import re
import shutil
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
from torchmetrics import Metric

from lightning_fxpipe._compat import metadata_filename
from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.optimizers import StageOptimizer


def module_state(module: nn.Module) -> dict[str, Any]:
    """This rank's part of ``module.state_dict()``."""
    return {fqn: value for fqn, value in module.state_dict().items() if not (isinstance(value, Tensor) and value.is_meta)}


def save_folder(path: Path, checkpoint: dict[str, Any]) -> None:
    """Writes Lightning's checkpoint as a folder. Called by every rank; each writes its own tensors.

    The folder gets its name when it is complete, so that a run that dies meanwhile leaves the last good one.
    """
    is_writer = dist.get_rank() == 0
    unfinished = path.with_name(f"{path.name}.unfinished")
    if is_writer:
        _remove(unfinished)
        unfinished.mkdir(parents=True)
    dist.barrier()
    state = {"model": checkpoint.pop("state_dict")}
    for index, optimizer in enumerate(checkpoint.pop("optimizer_states", [])):
        state[f"optimizer_{index}"] = optimizer
    dcp_save(state, checkpoint_id=unfinished)
    if is_writer:
        torch.save(checkpoint, unfinished / metadata_filename())
        _remove(path)
        unfinished.rename(path)
    dist.barrier()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def load_checkpoint(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[StageOptimizer],
    *,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Reads this rank's part of a checkpoint into the module and the optimizers. Called by every rank.

    Args:
        path: A folder written by :func:`save_folder`, or a single file as a plain Trainer writes it.
        module: The module, with placeholders for other stages' tensors.
        optimizers: The optimizers to restore; none, when nothing is trained.
        strict: Whether the checkpoint's model must have the module's keys.
        weights_only: For ``torch.load``.

    Returns:
        The rest of the checkpoint, for the Trainer to restore from.

    Raises:
        FxPipeError: With ``strict``, the keys differ.
    """
    load = _load_folder if path.is_dir() else _load_file
    return load(path, module, optimizers, strict, weights_only)


def _load_folder(
    path: Path, module: nn.Module, optimizers: Sequence[StageOptimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    lists = [key for key, value in module.state_dict().items() if isinstance(value, list)]
    found = {_without_index(key.removeprefix("model."), lists) for key in stored if key.startswith("model.")}
    _check_keys(module.state_dict(), list(found), path, strict)
    wanted = {
        key: _stored_list(f"model.{key}", stored) if key in lists else value
        for key, value in module_state(module).items()
        if key in found
    }
    request: dict[str, Any] = {"model": wanted}
    for index, optimizer in enumerate(optimizers):
        if any(key.startswith(f"optimizer_{index}.") for key in stored):
            request[f"optimizer_{index}"] = {
                "state": _state_request(module, stored, index),
                "param_groups": optimizer.state_dict()["param_groups"],
            }
    dcp_load(request, checkpoint_id=path)
    _load_into(module, wanted)
    for index, optimizer in enumerate(optimizers):
        if f"optimizer_{index}" in request:
            optimizer.load(request[f"optimizer_{index}"]["state"], request[f"optimizer_{index}"]["param_groups"])
    checkpoint: dict[str, Any] = torch.load(path / metadata_filename(), map_location="cpu", weights_only=weights_only)
    checkpoint["state_dict"] = wanted
    return checkpoint


def _load_into(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads this rank's part into the module. A metric takes tensors as they are, from wherever they were read to."""
    module.load_state_dict(state, strict=False)
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.to(metric.device)


def _without_index(key: str, lists: Sequence[str]) -> str:
    """The key of a list, such as a metric's state, for that of one of its entries; other keys as they are."""
    name, _, index = key.rpartition(".")
    return name if index.isdigit() and name in lists else key


def _stored_list(key: str, stored: Mapping[str, Any]) -> list[Any]:
    """Empty tensors for the stored entries of a list."""
    number = itertools.takewhile(lambda i: f"{key}.{i}" in stored, itertools.count())
    metas = [stored[f"{key}.{i}"] for i in number]
    return [torch.empty(meta.size, dtype=meta.properties.dtype) for meta in metas]


def _state_request(module: nn.Module, stored: Mapping[str, Any], index: int) -> dict[str, dict[str, Any]]:
    """Empty tensors for the stored optimizer states of this rank's parameters."""
    local = {fqn for fqn, parameter in module.named_parameters() if not parameter.is_meta}
    request: dict[str, dict[str, Any]] = {}
    for key, meta in stored.items():
        match = re.fullmatch(rf"optimizer_{index}\.state\.(.+)\.([^.]+)", key)
        if match and match[1] in local:
            is_tensor = isinstance(meta, TensorStorageMetadata)
            empty = torch.empty(meta.size, dtype=meta.properties.dtype) if is_tensor else None
            request.setdefault(match[1], {})[match[2]] = empty
    return request


def _load_file(
    path: Path, module: nn.Module, optimizers: Sequence[StageOptimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    state = checkpoint["state_dict"]
    _check_keys(module.state_dict(), list(state), path, strict)
    local = module_state(module)
    _load_into(module, {key: value for key, value in state.items() if key in local})
    for optimizer, saved in zip(optimizers, checkpoint.get("optimizer_states", []), strict=False):
        optimizer.load_plain(saved)
    return checkpoint


def _check_keys(expected: Mapping[str, Any], found: Sequence[str], path: Path, strict: bool) -> None:
    missing, unexpected = sorted({*expected} - {*found}), sorted({*found} - {*expected})
    if strict and (missing or unexpected):
        raise FxPipeError(
            "The checkpoint does not fit the model.",
            where=str(path),
            observed=f"{len(missing)} missing keys {missing[:8]}, {len(unexpected)} unexpected keys {unexpected[:8]}",
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
