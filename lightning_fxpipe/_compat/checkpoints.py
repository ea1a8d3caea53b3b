"""Private names of torch around the files of checkpoints: readers, writers, and what a pickle may name."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any


def folder_reader(path: Any, url: str, options: Mapping[str, Any]) -> Any:
    """Reads a folder of ``torch.distributed.checkpoint``: of this machine, or behind a URL where ``path`` is None.

    The reader and writer for the file systems of fsspec have public names since torch 2.15 only. torch 2.11-2.15.
    """
    if path is not None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        return FileSystemReader(path)
    return _of_fsspec("FsspecReader")(url, **options)


def folder_writer(path: Any, url: str, options: Mapping[str, Any]) -> Any:
    """Writes a folder that :func:`folder_reader` reads. torch 2.11-2.15."""
    if path is not None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        return FileSystemWriter(path)
    return _of_fsspec("FsspecWriter")(url, **options)


def _of_fsspec(name: str) -> Any:
    import torch.distributed.checkpoint as public

    if hasattr(public, name):
        return getattr(public, name)
    from torch.distributed.checkpoint import _fsspec_filesystem as private

    return getattr(private, name)


def names_only() -> Any:
    """A ``pickle_module`` for ``torch.load`` that runs no code of the file: objects of unknown classes become stand-ins.

    Which classes and functions do no harm torch knows for ``weights_only``, privately. torch 2.11-2.15.
    """
    return _NamesOnly


class _NamesOnly:
    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        """As ``pickle.load``."""
        return _NamesOnly.Unpickler(file, **options).load()

    class Unpickler(pickle.Unpickler):
        """Knows harmless names."""

        def find_class(self, module: str, name: str) -> Any:
            """The class or function; a stand-in for one that is not known to be harmless."""
            from torch._weights_only_unpickler import _get_allowed_globals

            known = _get_allowed_globals()
            if f"{module}.{name}" in known:
                return known[f"{module}.{name}"]
            return type(name, (_StandIn,), {"__module__": module})


class _StandIn:
    """Takes whatever a pickle gives an object, and keeps nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _ignore(self, *args: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = _ignore

    def __hash__(self) -> int:
        return id(self)
