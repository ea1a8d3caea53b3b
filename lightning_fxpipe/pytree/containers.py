"""Containers in a batch, or in the result of a step: those that people use, opened and built again.

``torch.utils.pytree`` knows dicts, lists and tuples; a tokenizer's ``BatchEncoding`` is another mapping and a batch may be a
dataclass. To it they are single objects, and the tensors in them would be overlooked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fxpipe._compat.torch import SUPPORTED_NODES, tree_flatten, tree_flatten_with_path, tree_unflatten

_PLAIN_TYPES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True)
class Container:
    """A container's entries, and how to make one like it.

    Attributes:
        entries: Name and value of each entry; the name as it is written after the container.
        rebuilt: Makes a container of the same type with other values.
    """

    entries: Sequence[tuple[str, Any]]
    rebuilt: Callable[[Sequence[Any]], Any]


def container_of(value: Any) -> Container | None:
    """The container that the value is; None for anything else."""
    if isinstance(value, (Tensor, str, bytes, int, float)) or value is None:
        return None
    if not isinstance(value, (dict, list, tuple)) and type(value) in SUPPORTED_NODES:
        return _pytree_of(value)  # as a TensorDict is, a mapping whose iteration gives rows
    if isinstance(value, Mapping):  # before dataclasses, which some are, too
        keys = list(value)
        return Container([(f"[{key!r}]", value[key]) for key in keys], lambda values: _mapping_like(value, keys, values))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Container([(f".{n}", v) for n, v in zip(value._fields, value, strict=True)], lambda values: type(value)(*values))
    if isinstance(value, (list, tuple)):
        return Container([(f"[{index}]", entry) for index, entry in enumerate(value)], type(value))
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if hasattr(value, field.name)]
        return Container([(f".{n}", getattr(value, n)) for n in names], lambda values: _object_like(value, names, values))
    return _pytree_of(value) if type(value) in SUPPORTED_NODES else None


def _pytree_of(value: Any) -> Container:
    try:
        leaves, structure = tree_flatten_with_path(value)
        entries = [("".join(str(key) for key in path), leaf) for path, leaf in leaves]
    except ValueError:  # a class that is registered without names of its entries
        values, structure = tree_flatten(value)
        entries = [(f"[{index}]", entry) for index, entry in enumerate(values)]
    return Container(entries, lambda values: tree_unflatten(list(values), structure))


def leaves_with_path(
    value: Any, path: str = "", is_left_out: Callable[[Any], bool] = lambda value: False
) -> Iterator[tuple[str, Any]]:
    """Everything in nested containers that is no container, each with its path, such as ``['image'].mask[0]``."""
    if is_left_out(value):
        return
    container = container_of(value)
    if container is None:
        yield path, value
        return
    for name, entry in container.entries:
        yield from leaves_with_path(entry, path + name, is_left_out)


def fingerprint(value: Any) -> Hashable | None:
    """Equal for values with equal constants and with tensors of equal shape and kind in equal containers. None where the value
    holds something that cannot be compared: an array, or an object that is neither a container nor a plain value.
    """
    if isinstance(value, Tensor):
        return Tensor, tuple(value.shape), value.dtype, value.requires_grad
    if value is None or isinstance(value, _PLAIN_TYPES):
        return type(value), value
    container = container_of(value)
    if container is None:
        return None
    entries = tuple((name, fingerprint(entry)) for name, entry in container.entries)
    return None if any(entry is None for _, entry in entries) else (type(value), entries)


def _mapping_like(value: Mapping[Any, Any], keys: Sequence[Any], values: Sequence[Any]) -> Any:
    if not isinstance(value, MutableMapping):
        return type(value)(dict(zip(keys, values, strict=True)))  # type: ignore[call-arg]
    made = copy.copy(value)
    for key, entry in zip(keys, values, strict=True):
        made[key] = entry
    return made


def _object_like(value: Any, names: Sequence[str], values: Sequence[Any]) -> Any:
    """A copy, not a new object: a field may be none of the constructor's arguments."""
    made = copy.copy(value)
    for name, entry in zip(names, values, strict=True):
        object.__setattr__(made, name, entry)  # a frozen dataclass refuses setattr
    return made
