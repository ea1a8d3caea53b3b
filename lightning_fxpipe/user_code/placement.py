"""Devices that the tensors of a module will have once Lightning has moved it, for code that runs before that.

The plan is made while the module is whole and still on the CPU: on its device there may be no room for it. The batch is already
there, and the step's code runs as if the module were, too: parameters, buffers and what else ``module.to(device)`` moves lie on
the device, tensors that are plain attributes stay where they are, and ``self.device`` is the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_fxpipe._compat.torch import patched_attributes, tensors_moved_along, tree_map
from lightning_fxpipe.user_code.exchange import named_tensors

_CPU = torch.device("cpu")


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """The device that code with these tensors runs on: that of the first that is not on the CPU, where some, such as lengths
    of sequences, may stay.
    """
    return next((tensor.device for tensor in tensors if tensor.device != _CPU), _CPU)


class Placement:
    """Device of each tensor of a module after the move.

    Args:
        root: The module.
        device: Where it is moved to.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self.device = device
        self._root = root
        own = [tensor for *_, tensor in named_tensors(root)]
        attributes = [value for module in root.modules() for value in vars(module).values() if isinstance(value, Tensor)]
        is_elsewhere = any(tensor.device != device for tensor in attributes)
        # Tensors are kept with their identities, which no other can get then.
        self._moved = {id(tensor): tensor for tensor in (*own, *(tensors_moved_along(root) if is_elsewhere else ()))}

    def device_of(self, tensor: Tensor) -> torch.device:
        """Returns the device of a tensor after the move."""
        return self.device if tensor.is_meta or id(tensor) in self._moved else tensor.device

    def moves(self, tensor: Tensor) -> bool:
        """Returns True if a tensor with data is not there yet."""
        return id(tensor) in self._moved and not tensor.is_meta and tensor.device != self.device

    @contextmanager
    def naming(self) -> Iterator[None]:
        """In the block, the LightningModule, other Lightning modules and metrics say that they are on the device."""
        owners = [module for module in self._root.modules() if isinstance(vars(module).get("_device"), torch.device)]
        with patched_attributes(*((owner, "_device", self.device) for owner in owners)):
            yield

    @contextmanager
    def pretending(self) -> Iterator[None]:
        """In the block, torch calls on the module's tensors get copies of them on the device, made when they are first used."""
        moving = [tensor for tensor in self._moved.values() if self.moves(tensor)]
        with self.naming(), _OnDevice(moving, self.device) if moving else nullcontext():
            yield


class _OnDevice(TorchFunctionMode):
    """Has torch calls on some tensors get copies of them on a device."""

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        super().__init__()
        self._tensors = {id(tensor): tensor for tensor in tensors}
        self._device = device
        self._copies: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*tree_map(self._copy, args), **tree_map(self._copy, kwargs or {}))

    def _copy(self, leaf: Any) -> Any:
        if id(leaf) not in self._tensors:
            return leaf
        if id(leaf) not in self._copies:
            copy = leaf.detach().to(self._device)
            copy = nn.Parameter(copy, requires_grad=False) if isinstance(leaf, nn.Parameter) else copy
            self._copies[id(leaf)] = copy.requires_grad_(leaf.requires_grad)
        return self._copies[id(leaf)]


def move(root: nn.Module, device: torch.device) -> None:
    """Moves a module as Lightning does; placeholders on the meta device stay."""
    with _PlaceholdersStay():
        root.to(device)


class _PlaceholdersStay(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is Tensor.to and args[0].is_meta else func(*args, **(kwargs or {}))
