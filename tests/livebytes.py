"""How much memory tensors take at the peak of something."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors from now on: of those that are there, and of those that come and go.

    Attributes:
        now: Bytes that live.
        peak: The most bytes that have lived at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.now = self.peak = 0
        gc.collect()
        for each in gc.get_objects():
            if issubclass(type(each), Tensor):
                self._note(each)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return result

    def _note(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive or storage.device.type == "meta":  # a fake tensor's is, too
            return
        size = storage.nbytes()

        def forget(_: Any) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


@contextmanager
def without_garbage() -> Iterator[None]:
    """In the block, nothing waits for Python's search for cycles, nor is found by it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
