"""Checkpoint folders of ``torch.distributed.checkpoint``: ours, and those of Lightning's FSDP and model parallel strategies.

All have ``optimizer_<i>.state.<fqn>.<name>`` and ``optimizer_<i>.param_groups`` with FQNs; the model's state is under
``model``, or under ``state_dict`` (:class:`~lightning.pytorch.strategies.ModelParallelStrategy`). What a key is made of is read
from the metadata, not from the key: names have dots.
"""

from __future__ import annotations

import pickle
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from lightning_fxpipe._compat.checkpoints import folder_reader
from lightning_fxpipe._compat.lightning import metadata_filename
from lightning_fxpipe.checkpoint.formats import load_file
from lightning_fxpipe.checkpoint.locations import Location
from lightning_fxpipe.errors import FxPipeError

# Before the name of an entry of the checkpoint that has tensors of the model, beside "model" itself.
BESIDE = "beside."
_MODEL = ("model", "state_dict")

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Folder:
    """A checkpoint folder that is there, and complete.

    Attributes:
        location: Where it is.
    """

    location: Location

    @cached_property
    def _metadata(self) -> Any:
        try:
            return self._reader().read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError, ValueError, KeyError, AttributeError, ImportError) as error:
            raise FxPipeError(
                "The checkpoint folder cannot be read.", where=self.location.text, observed=f"{type(error).__name__}: {error}"
            ) from error

    def _reader(self) -> Any:
        return folder_reader(self.location.path, self.location.text, self.location.options)

    @cached_property
    def paths(self) -> dict[str, KeyPath]:
        """For each key the names and indices that it is made of."""
        known = self._metadata.planner_data
        known = known if isinstance(known, Mapping) else {}
        return {key: tuple(known[key]) if key in known else _split(key) for key in self._metadata.state_dict_metadata}

    @cached_property
    def model_root(self) -> str:
        """The entry that has the model's state."""
        found = next((root for root in _MODEL if root in self.roots), None)
        if found is None:
            raise FxPipeError(
                "The checkpoint folder has no state of a model.",
                where=self.location.text,
                observed=f"entries {', '.join(sorted(self.roots)[:8])}",
                expected=f"an entry named {' or '.join(_MODEL)}",
            )
        return found

    @cached_property
    def roots(self) -> list[str]:
        """The entries: first parts of keys."""
        return list(dict.fromkeys(str(path[0]) for path in self.paths.values()))

    def entries(self, pattern: str) -> list[str]:
        """The entries that a pattern matches."""
        return [root for root in self.roots if re.fullmatch(pattern, root)]

    def _place(self, key: str, given: Tensor | None = None, device: str = "cpu") -> Tensor | None:
        """A tensor for what is stored under a key, the given one if it fits; None for what is no tensor."""
        meta = self._metadata.state_dict_metadata[key]
        if not isinstance(meta, TensorStorageMetadata):
            return None
        if given is not None and (given.shape, given.dtype) == (meta.size, meta.properties.dtype):
            return given
        return torch.empty(meta.size, dtype=meta.properties.dtype, device=device)

    def read(
        self, roots: Collection[str], is_wanted: Callable[[KeyPath], bool], into: Mapping[KeyPath, Tensor] | None = None
    ) -> dict[str, Any]:
        """The values of some entries, nested as they were when they were saved. Called by every rank, each for its own.

        Args:
            roots: The entries.
            is_wanted: Says by its path whether a value is read. Other tensors are on the meta device, other values left out.
            into: Tensors that values are read into, by their paths, where dtype and shape are those of what is stored.
        """
        paths = {key: path for key, path in self.paths.items() if path[0] in roots}
        places = into or {}
        wanted: dict[str, Any] = {key: self._place(key, places.get(path)) for key, path in paths.items() if is_wanted(path)}
        with original_errors(), warnings.catch_warnings():
            # Each rank reads for itself, which torch takes for a process that is alone, and warns of.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            # No value is asked for by its place in a dict or list: the keys are those of the metadata as they are.
            dcp_load(wanted, storage_reader=self._reader(), no_dist=True)
        result: dict[str, Any] = {}
        for key, path in paths.items():
            value = wanted[key] if key in wanted else self._place(key, device="meta")
            if key in wanted or isinstance(value, Tensor):
                _put(result, path, value)
        return result

    def read_rest(self, *, weights_only: bool | None, pickle_module: Any = None) -> dict[str, Any]:
        """What Lightning keeps beside the states of model and optimizers: loops, callbacks, hyperparameters."""
        with self.location.inside(metadata_filename()).local_copy() as path:
            rest: dict[str, Any] = load_file(path, weights_only=weights_only, pickle_module=pickle_module)
        return rest


def open_folder(location: Location) -> Folder:
    """The folder; raises :class:`FxPipeError` where it is not complete."""
    lacking = [name for name in (".metadata", metadata_filename()) if not location.inside(name).exists()]
    if lacking:
        raise FxPipeError(
            "The checkpoint folder is not complete: what wrote it was interrupted, or it is none of Lightning's.",
            where=location.text,
            observed=f"no {' and no '.join(lacking)}",
            expected=f"a folder with .metadata and {metadata_filename()}, which is written last",
            todo="Use the checkpoint before it.",
        )
    return Folder(location)


@contextmanager
def original_errors() -> Iterator[None]:
    """Raises what a rank has raised in the block, such as an OSError, in place of the exception that torch puts around it."""
    try:
        yield
    except CheckpointException as error:
        rank, (original, stack) = next(iter(error.failures.items()))
        original.add_note(f"while reading or writing a checkpoint on rank {rank}:\n{''.join(traceback.format_list(stack))}")
        raise original from None


def _split(key: str) -> KeyPath:
    """The parts of a key that the metadata says nothing about."""
    state = re.fullmatch(r"(optimizer_\d+)\.(state)\.(.+)\.([^.]+)", key)
    if state:
        return state.groups()
    group = re.fullmatch(r"(optimizer_\d+)\.(param_groups)\.(\d+)\.(.+)", key)
    if group:
        return group[1], group[2], int(group[3]), group[4]
    if key.startswith(BESIDE):
        _, name, fqn = key.split(".", 2)
        return f"{BESIDE}{name}", fqn
    root, _, fqn = key.partition(".")
    return (root, fqn) if root in _MODEL else (key,)


def _put(tree: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Sets a value in nested dicts and lists, which are made as they are needed: a list where an index follows."""
    container: Any = tree
    for part, following in zip(path, path[1:], strict=False):
        fresh: Any = [] if isinstance(following, int) else {}
        if isinstance(container, list):
            assert isinstance(part, int)
            container.extend([None] * (part + 1 - len(container)))
            container[part] = fresh if container[part] is None else container[part]
            container = container[part]
        else:
            container = container.setdefault(part, fresh)
    if isinstance(container, list):
        assert isinstance(path[-1], int)
        container.extend([None] * (path[-1] + 1 - len(container)))
    container[path[-1]] = value
