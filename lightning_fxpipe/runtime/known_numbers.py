"""Numbers on a device that the host knows without reading them.

The gradient of a batch's loss is one over the number of batches that are accumulated: autograd makes it on the device, out of
numbers that the host has. Were it read, the host would wait until the device has done all that it was given before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_fxpipe._compat.torch import TorchDispatchMode, version_of

_HOST = torch.device("cpu")
_ONE = torch.ops.aten.ones_like.default  # what a backward pass begins with
_FOLLOWED = (torch.ops.aten.detach.default, torch.ops.aten.div.Tensor, torch.ops.aten.mul.Tensor)


class KnownNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In its block, computes on the host, too, what a backward pass makes of the one that it begins with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By identity: the tensor, which is kept, so that this stays its own; its version; the same number on the host.
        self._known: dict[int, tuple[Tensor, int, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _ONE and not result.dim():
            self._note(result, torch.ones((), dtype=result.dtype, device=_HOST))
        elif func in _FOLLOWED and not result.dim():
            numbers = [self._on_host(arg) for arg in args]
            if all(number is not None for number in numbers):
                self._note(result, func(*numbers))
        return result

    def read(self, tensor: Tensor) -> float:
        """The number in a tensor, from the device where nothing else tells it."""
        number = self._on_host(tensor)
        return float(tensor.detach() if number is None else number)

    def _note(self, tensor: Tensor, number: Tensor) -> None:
        self._known[id(tensor)] = tensor, version_of(tensor), number

    def _on_host(self, value: Any) -> Any:
        """A number on the host; None for one that is not known, or has been written to since it was."""
        if not isinstance(value, Tensor) or value.device == _HOST:
            return value
        tensor, version, number = self._known.get(id(value), (None, 0, None))
        return None if tensor is None or version_of(tensor) != version else number
