"""Private names of torch around the files of checkpoints: readers, writers, and what a pickle may name."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any


def folder_reader(path: Any, url: str, options: Mapping[str, Any]) -> Any:
    """Reads a folder of ``torch.distributed.checkpoint``: of this machine, or behind a URL where ``path`` is None."""
    return _for_folder("Reader", path, url, options)


def folder_writer(path: Any, url: str, options: Mapping[str, Any]) -> Any:
    """Writes a folder that :func:`folder_reader` reads."""
    return _for_folder("Writer", path, url, options)


def _for_folder(kind: str, path: Any, url: str, options: Mapping[str, Any]) -> Any:
    """Those for the file systems of fsspec have public names since torch 2.15 only. torch 2.11-2.15."""
    import torch.distributed.checkpoint as public

    if path is not None:
        return getattr(public, f"FileSystem{kind}")(path)
    if hasattr(public, f"Fsspec{kind}"):
        return getattr(public, f"Fsspec{kind}")(url, **options)
    from torch.distributed.checkpoint import _fsspec_filesystem as private

    return getattr(private, f"Fsspec{kind}")(url, **options)


class NamesOnly:
    """A ``pickle_module`` for ``torch.load`` that runs no code of the file: objects of unknown classes become stand-ins.

    Which classes and functions do no harm torch knows for ``weights_only``, privately. torch 2.11-2.15.
    """

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        """As ``pickle.load``."""
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
