"""Private names of torch around the files of checkpoints: readers, writers, and what a pickle may name."""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as public_metadata
from torch.distributed.checkpoint.metadata import Metadata


def folder_reader(path: Any, url: str, options: Mapping[str, Any], metadata: Metadata) -> Any:
    """Reads a folder of ``torch.distributed.checkpoint``: of this machine, or behind a URL where ``path`` is None.

    It takes the metadata that it is given: its own way to read them unpickles whatever there is.
    """
    reader = _for_folder("Reader", path, url, options)
    reader.read_metadata = lambda *args, **kwargs: metadata
    return reader


def folder_writer(path: Any, url: str, options: Mapping[str, Any]) -> Any:
    """Writes a folder that :func:`folder_reader` reads."""
    return _for_folder("Writer", path, url, options)


def _for_folder(kind: str, path: Any, url: str, options: Mapping[str, Any]) -> Any:
    """Makes a reader or a writer; those for fsspec have public names since torch 2.15 only. torch 2.9-2.15."""
    import torch.distributed.checkpoint as public

    if path is not None:
        return getattr(public, f"FileSystem{kind}")(path)
    if hasattr(public, f"Fsspec{kind}"):
        return getattr(public, f"Fsspec{kind}")(url, **options)
    from torch.distributed.checkpoint import _fsspec_filesystem as private

    return getattr(private, f"Fsspec{kind}")(url, **options)


@dataclass(frozen=True)
class StoredItem:
    """One entry of a folder: a tensor, a part of one, or another value, and its place.

    Attributes:
        key: Of the value.
        file: Name of a file of the folder.
        offset: First byte.
        num_bytes: How many.
    """

    key: str
    file: str
    offset: int
    num_bytes: int


def stored_items(metadata: Metadata) -> Iterator[StoredItem]:
    """Yields the contents of a folder's files, which torch keeps in records of a private class. torch 2.9-2.15."""
    for index, info in (metadata.storage_data or {}).items():
        yield StoredItem(index.fqn, info.relative_path, info.offset, info.length)


def unpickled_metadata(content: bytes) -> Metadata:
    """Reads the file ``.metadata`` of a folder; torch's own reader would run the code that it names. torch 2.2-2.15.

    Raises:
        pickle.UnpicklingError: It names what no regular one does.
    """
    found = _MetadataUnpickler(io.BytesIO(content)).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"a {type(found).__name__} instead of metadata")
    return found


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the names that torch writes into a folder's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or function."""
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            return pathlib.PurePosixPath  # where it was saved, perhaps on another system
        if module.startswith("torch.distributed.") and name in _METADATA_CLASSES:
            return _METADATA_CLASSES[name]
        if (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            from torch.distributed.checkpoint.filesystem import _StorageInfo

            return _StorageInfo
        if (module, name) == ("torch.serialization", "_get_layout"):
            from torch.serialization import _get_layout

            return _get_layout
        if (module, name) == ("builtins", "getattr"):  # as which Python 3.11.0 to 3.11.3 write a member of an enumeration
            return _memory_format
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _memory_format(kind: Any, name: Any) -> Any:
    """The one enumeration that there is in metadata: ``getattr`` of anything else is refused."""
    if kind is not _METADATA_CLASSES["_MEM_FORMAT_ENCODING"] or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it asks {kind} for {name!r}")
    return kind[name]


# In torch 2.2 two of them were in another module, and one had no underscore.
_METADATA_CLASSES = {
    name.lstrip("_") if is_old else name: getattr(public_metadata, name)
    for name in (*public_metadata.__all__, "_MEM_FORMAT_ENCODING")
    for is_old in (False, True)
}


class NamesOnly:
    """A ``pickle_module`` for ``torch.load`` that runs no code of the file: objects of unknown classes become stand-ins.

    Which classes and functions do no harm torch knows for ``weights_only``, privately. torch 2.9-2.15.
    """

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        """Replaces ``pickle.load``."""
        return NamesOnly.Unpickler(file, **options).load()

    class Unpickler(pickle.Unpickler):
        """Knows harmless names."""

        def find_class(self, module: str, name: str) -> Any:
            """The class or function; a stand-in for one that is not known to be harmless."""
            from torch._weights_only_unpickler import _get_allowed_globals

            stand_in = type(name, (_StandIn,), {"__module__": module})
            return _get_allowed_globals().get(f"{module}.{name}", stand_in)


class _StandIn:
    """Takes whatever a pickle gives an object, and keeps nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _ignore(self, *args: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = _ignore

    def __hash__(self) -> int:
        return id(self)
