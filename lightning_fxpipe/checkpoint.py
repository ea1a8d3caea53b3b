"""A stage's state to and from checkpoints of the whole model, keyed by FQN.

A checkpoint is a folder of ``torch.distributed.checkpoint``: ``model.<fqn>``, ``optimizer_<i>.state.<fqn>.<name>`` and
``optimizer_<i>.param_groups`` with the FQNs of the whole model, beside Lightning's file with everything else. No key names a
stage, so the layout does not depend on how many there were. Plain ``.ckpt`` files of a single device load as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torchmetrics import Metric

from lightning_fxpipe._compat_lightning import metadata_filename
from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.optimizers import StageOptimizer
from lightning_fxpipe.saving import original_errors


def module_state(module: nn.Module) -> dict[str, Any]:
    """This rank's part of ``module.state_dict()``."""
    return _held(module.state_dict())


def _held(state: Mapping[str, Any]) -> dict[str, Any]:
    return {fqn: value for fqn, value in state.items() if not _is_placeholder(value)}


def taken_parts(checkpoint: dict[str, Any], fqns: Collection[str]) -> dict[str, Any]:
    """Takes out of the checkpoint what ranks have in parts, under the names that it has in a folder."""
    state = {"model": _held(checkpoint.pop("state_dict"))}
    for name in [name for name, value in checkpoint.items() if _is_partial(value, state["model"], fqns)]:
        state[_BESIDE + name] = _held(checkpoint.pop(name))
    for index, optimizer in enumerate(checkpoint.pop("optimizer_states", [])):
        state[f"optimizer_{index}"] = optimizer
    return state


# Before the name of an entry of the checkpoint that has tensors of the model, beside "model" itself.
_BESIDE = "beside."


def _is_partial(value: Any, mine: Mapping[str, Any], fqns: Collection[str]) -> bool:
    return isinstance(value, Mapping) and 0 < len(value) < len(fqns) and _held(value).keys() == mine.keys()


def read_checkpoint(path: Path, module: nn.Module, *, weights_only: bool | None) -> dict[str, Any]:
    """Reads what a rank needs of a checkpoint but for the optimizers' states. Called by every rank.

    Args:
        path: A folder written by :func:`save_folder`, or a single file as a plain Trainer writes it.
        module: The module, with placeholders for other stages' tensors.
        weights_only: For ``torch.load``.

    Returns:
        The checkpoint. In states of the model, placeholders stand for the other stages' tensors.
    """
    if not path.is_dir():
        whole: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        return whole
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    expected = module.state_dict()
    beside = sorted({key.split(".")[1] for key in stored if key.startswith(_BESIDE)})
    request: dict[str, Any] = {"model": _request(stored, "model.", expected)}
    request |= {f"{_BESIDE}{name}": _request(stored, f"{_BESIDE}{name}.", expected) for name in beside}
    with original_errors():
        dcp_load(request, checkpoint_id=path)
    checkpoint: dict[str, Any] = torch.load(path / metadata_filename(), map_location="cpu", weights_only=weights_only)
    checkpoint["state_dict"] = _with_placeholders(request["model"], stored, "model.", expected)
    for name in beside:
        prefix = f"{_BESIDE}{name}"
        checkpoint[name] = _with_placeholders(request[prefix], stored, f"{prefix}.", expected)
    if any(key.startswith("optimizer_") for key in stored):
        checkpoint["optimizer_states"] = []  # Lightning asks whether there are any; they are read when they are restored
    return checkpoint


def _request(stored: Mapping[str, Any], prefix: str, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Empty tensors for this rank's part of a stored state, and for all that the model does not know."""
    found: dict[str, Any] = {}
    lists = [name for name, value in expected.items() if isinstance(value, list)]
    for key, meta in stored.items():
        fqn = _without_index(key.removeprefix(prefix), lists)
        if key.startswith(prefix) and fqn in lists:
            found[fqn] = _stored_list(f"{prefix}{fqn}", stored)
        elif key.startswith(prefix) and not _is_placeholder(expected.get(fqn)):
            is_tensor = isinstance(meta, TensorStorageMetadata)
            found[fqn] = torch.empty(meta.size, dtype=meta.properties.dtype) if is_tensor else None
    return found


def _with_placeholders(
    state: Mapping[str, Any], stored: Mapping[str, Any], prefix: str, expected: Mapping[str, Any]
) -> dict[str, Any]:
    absent = {f: value for f, value in expected.items() if _is_placeholder(value) and f"{prefix}{f}" in stored}
    order = {fqn: index for index, fqn in enumerate(expected)}
    return dict(sorted({**state, **absent}.items(), key=lambda item: order.get(item[0], len(order))))


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def load_model(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Loads this rank's part of a checkpoint's state into the module.

    Raises:
        FxPipeError: With ``strict``, the keys differ.
    """
    _check_keys(module.state_dict(), list(state), strict)
    local = module_state(module)
    _load_into(module, {key: value for key, value in state.items() if key in local})


def load_optimizers(path: Path, checkpoint: Mapping[str, Any], module: nn.Module, optimizers: Sequence[StageOptimizer]) -> None:
    """Restores the optimizers from a checkpoint that has been read. Called by every rank."""
    if not path.is_dir():
        for optimizer, saved in zip(optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load(saved)
        return
    paths = FileSystemReader(path).read_metadata().planner_data
    roots = [f"optimizer_{index}" for index in range(len(optimizers))]
    entries = [p for p in paths.values() if p[0] in roots]
    saved = _read_entries(path, [p for p in entries if p[1] != "state"])
    wanted = {r: o.wanted(saved[r]["param_groups"]) for r, o in zip(roots, optimizers, strict=True) if r in saved}
    known = {r: {key for group in saved[r]["param_groups"] for key in group["params"]} for r in wanted}
    states = _read_entries(path, [p for p in entries if p[1] == "state" and (p[2] in wanted[p[0]] or p[2] not in known[p[0]])])
    for root, optimizer in zip(roots, optimizers, strict=True):
        if root in saved:
            optimizer.load({**saved[root], "state": states.get(root, {}).get("state", {})})


def _read_entries(path: Path, entries: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    stored = FileSystemReader(path).read_metadata()
    keys = {p: key for key, p in stored.planner_data.items()}
    request: dict[str, Any] = {}
    for entry in entries:
        meta = stored.state_dict_metadata[keys[entry]]
        is_tensor = isinstance(meta, TensorStorageMetadata)
        set_element(request, entry, torch.empty(meta.size, dtype=meta.properties.dtype) if is_tensor else None)
    with original_errors():
        dcp_load(request, checkpoint_id=path)
    return request


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


def _check_keys(expected: Mapping[str, Any], found: Sequence[str], strict: bool) -> None:
    missing, unexpected = sorted({*expected} - {*found}), sorted({*found} - {*expected})
    if strict and (missing or unexpected):
        raise FxPipeError(
            "The checkpoint does not fit the model.",
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
