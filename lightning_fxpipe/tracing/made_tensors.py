"""Which module has made which tensor, without keeping any of them."""

from __future__ import annotations

import weakref

from torch import Tensor


class MadeTensors:
    """Tensors by whom they were made. By id, which another tensor can get later: that one is not known then."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def add(self, tensor: Tensor, path: str) -> None:
        """The module at ``path`` has made a tensor."""
        self._made[id(tensor)] = weakref.ref(tensor), path

    def forget(self, tensor: Tensor) -> None:
        """It does not matter any more who has made a tensor."""
        self._made.pop(id(tensor), None)

    def maker(self, tensor: Tensor) -> str | None:
        """The path of the module that has made a tensor; None for others."""
        ref, path = self._made.get(id(tensor), (None, None))
        return path if ref is not None and ref() is tensor else None
