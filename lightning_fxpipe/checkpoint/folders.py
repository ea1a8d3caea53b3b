"""Checkpoint folders of ``torch.distributed.checkpoint``: ours, and those of Lightning's FSDP and model parallel strategies.

All have ``optimizer_<i>.state.<fqn>.<name>`` and ``optimizer_<i>.param_groups`` with FQNs; the model's state is under
``model``, or under ``state_dict`` (:class:`~lightning.pytorch.strategies.ModelParallelStrategy`). What a key is made of is read
from the metadata, not from the key: names have dots.
"""

from __future__ import annotations

import io
import pickle
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from lightning_fxpipe._compat.checkpoints import StoredItem, folder_reader, stored_items, unpickled_metadata
from lightning_fxpipe._compat.lightning import metadata_filename
from lightning_fxpipe.checkpoint.checksums import CHECKSUMS_FILE, Checksums, check_archive
from lightning_fxpipe.checkpoint.damage import damage_error, damage_told
from lightning_fxpipe.checkpoint.locations import Location
from lightning_fxpipe.checkpoint.pickles import Reading, unpickled
from lightning_fxpipe.errors import FxPipeError, add_note

# Before the name of an entry of the checkpoint that has tensors of the model, beside "model" itself.
BESIDE = "beside."
_MODEL = ("model", "state_dict")

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Folder:
    """A checkpoint folder.

    Attributes:
        location: Where it is.
        reading: How it is read.
    """

    location: Location
    reading: Reading

    @cached_property
    def checksums(self) -> Checksums | None:
        """Returns the checksums of a folder that this package has written."""
        file = self.location.inside(CHECKSUMS_FILE)
        if not file.exists():
            return None
        with damage_told(file.text), file.local_copy() as path:
            return Checksums.from_json(path.read_bytes())

    @cached_property
    def _metadata(self) -> Metadata:
        with damage_told(self.location.text):
            with self._checked(".metadata") as path:
                metadata = unpickled_metadata(path.read_bytes())
            if outside := [item.file for item in stored_items(metadata) if Path(item.file).name != item.file]:
                raise damage_error(self.location.text, f"its metadata refer to {outside[0]}, which is outside the folder")
            return metadata

    @contextmanager
    def _checked(self, name: str) -> Iterator[Path]:
        """A file beside the values, on this machine, once it has been compared with its checksum."""
        with self.location.inside(name).local_copy() as path:
            if self.checksums is not None:
                self.checksums.check_file(self.location.text, path)
            yield path

    def _reader(self) -> Any:
        return folder_reader(self.location.path, self.location.text, self.location.options, self._metadata)

    def lacks(self) -> Iterator[str]:
        """Yields the parts that are missing or cut."""
        names = [name for name in (".metadata", metadata_filename()) if self.location.inside(name).num_bytes is None]
        yield from (f"no {name}" for name in names)
        if ".metadata" in names:
            return
        needed: dict[str, int] = {}
        for item in stored_items(self._metadata):
            needed[item.file] = max(needed.get(item.file, 0), item.offset + item.num_bytes)
        for name, num_bytes in needed.items():
            found = self.location.inside(name).num_bytes
            if found is None:
                yield f"no {name}"
            elif found < num_bytes:
                yield f"{found} of {num_bytes} bytes of {name}"

    @cached_property
    def paths(self) -> dict[str, KeyPath]:
        """For each key the names and indices that it is made of."""
        with damage_told(self.location.text):
            known = self._metadata.planner_data
            known = known if isinstance(known, Mapping) else {}
            return {key: tuple(known[key]) if key in known else _split(key) for key in self._metadata.state_dict_metadata}

    @cached_property
    def model_root(self) -> str:
        """The entry that has the model's state."""
        found = next((root for root in _MODEL if root in self.roots), None)
        if found is None:
            raise FxPipeError(
                "The checkpoint folder contains no model state.",
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
        with damage_told(self.location.text):
            paths = {key: path for key, path in self.paths.items() if path[0] in roots}
            places = into or {}
            wanted: dict[str, Any] = {key: self._place(key, places.get(path)) for key, path in paths.items() if is_wanted(path)}
            self._load(wanted)
            result: dict[str, Any] = {}
            for key, path in paths.items():
                value = wanted[key] if key in wanted else self._place(key, device="meta")
                if key in wanted or isinstance(value, Tensor):
                    _put(result, path, value)
            return result

    def read_rest(self) -> dict[str, Any]:
        """Reads Lightning's own entries beside the states of model and optimizers: loops, callbacks, hyperparameters."""
        with damage_told(self.location.text), self._checked(metadata_filename()) as path:
            return dict(unpickled(path, self.location.inside(metadata_filename()).text, self.reading))

    def verify(self) -> int:
        """Reads all of it, one value after the other; returns how many have been compared with their checksums.

        Raises:
            FxPipeError: One is not as it was written.
        """
        self.read_rest()
        for key in self.paths:
            with damage_told(self.location.text):
                self._load({key: self._place(key)})
        return len(self.paths)

    def _load(self, wanted: dict[str, Any]) -> None:
        """Reads values; tensors into those that are there. Called by each rank for its own."""
        where = self.location.text
        with warnings.catch_warnings():
            # Each rank reads for itself, which torch takes for a process that is alone, and warns of.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            if self.checksums is None:
                self._check_archives(wanted.keys())
            planner = _LoadPlanner(where, self.checksums)
            try:
                with original_errors():
                    dcp_load(wanted, storage_reader=self._reader(), planner=planner, no_dist=True)
            except pickle.UnpicklingError as error:  # of a tensor, which names nothing but torch's functions
                raise damage_error(where, error) from error
        for key, value in wanted.items():
            if isinstance(value, io.BytesIO):
                wanted[key] = unpickled(value, f"{where}: {key}", self.reading)

    def _check_archives(self, keys: Collection[str]) -> None:
        """In a folder of others: each value is an archive of ``torch.save``, and has the checksums of one."""
        by_file: dict[str, list[StoredItem]] = {}
        for item in stored_items(self._metadata):
            if item.key in keys:
                by_file.setdefault(item.file, []).append(item)
        for name, items in by_file.items():
            with self.location.inside(name).opened() as file:
                for item in items:
                    file.seek(item.offset)
                    content = file.read(item.num_bytes)
                    if content[:2] == b"PK":  # else it is compressed, or written by another library
                        check_archive(io.BytesIO(content), f"{self.location.text}: {item.key} in {name}")


class _LoadPlanner(DefaultLoadPlanner):
    """Torch's, but that what is read is compared with its checksum; what is no tensor stays as it is stored."""

    def __init__(self, where: str, checksums: Checksums | None) -> None:
        # No value is asked for by its place in a dict or list: the keys are those of the metadata as they are.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._where, self._checksums = where, checksums

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Takes a value that is no tensor; torch's would unpickle whatever it is."""
        key = read_item.dest_index.fqn
        if self._checksums is not None:
            self._checksums.check_value(self._where, key, value.getbuffer())
        self.state_dict[key] = value

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Takes a tensor, which is in its place."""
        if self._checksums is not None:
            self._checksums.check_value(self._where, read_item.dest_index.fqn, tensor)


def open_folder(location: Location, reading: Reading) -> Folder:
    """The folder; raises :class:`FxPipeError` where it is not complete."""
    folder = Folder(location, reading)
    if lacking := list(folder.lacks()):
        raise FxPipeError(
            "The checkpoint folder is incomplete: writing or copying it was interrupted, or Lightning did not write it.",
            where=location.text,
            observed=", ".join(lacking),
            expected=f"a folder with .metadata, the files listed there, and {metadata_filename()}, which is written last",
            todo="Use an earlier checkpoint.",
        )
    return folder


@contextmanager
def original_errors() -> Iterator[None]:
    """Raises what a rank has raised in the block, such as an OSError, in place of the exception that torch puts around it."""
    try:
        yield
    except CheckpointException as error:
        rank, (original, stack) = next(iter(error.failures.items()))
        if not isinstance(original, FxPipeError):  # which says all there is
            frames = "".join(traceback.format_list(stack))
            add_note(original, f"while reading or writing a checkpoint on rank {rank}:\n{frames}")
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
