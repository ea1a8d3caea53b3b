"""Puts back the values of tensors that code changes in place: each is copied before the first write to it.

So nothing is copied of what stays as it is, however large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_fxpipe._compat.operators import is_writing, written_arguments
from lightning_fxpipe._compat.torch import TorchDispatchMode, storage_key

_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In its block, copies the memory of tensors before it is written to, or to views of it."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = tensors
        self._before: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not is_writing(func):
            return func(*args, **(kwargs or {}))
        for tensor in written_arguments(func, args, kwargs or {}):
            if _has_memory(tensor):
                key = storage_key(tensor)
                if key in self._known and key not in self._before:
                    storage: Any = tensor.untyped_storage()
                    self._before[key] = storage, storage.clone()
        return func(*args, **(kwargs or {}))

    @property
    def happened(self) -> bool:
        """True if one of the tensors was written to."""
        return bool(self._before)

    @property
    def can_happen(self) -> bool:
        """True if one of the tensors has memory that can be copied."""
        return bool(self._known)

    @cached_property
    def _known(self) -> frozenset[int]:
        return frozenset(storage_key(tensor) for tensor in self._tensors if _has_memory(tensor))

    def undo(self) -> None:
        """Writes the copies back. Not through tensors, so that a graph that has saved one does not take this for a change."""
        for storage, before in self._before.values():
            if storage.nbytes() != before.nbytes():
                storage.resize_(before.nbytes())
            storage.copy_(before)
        self._before.clear()

    def take_back(self) -> Callable[[], None]:
        """Undoes as :meth:`undo`; returns a function that makes the same writes again."""
        after = [(storage, storage.clone()) for storage, _ in self._before.values()]
        self.undo()

        def again() -> None:
            for storage, values in after:
                storage.copy_(values)

        return again


class WritesOfCalls(TorchFunctionMode):
    """:class:`Writes` for those calls of torch only that get parameters or certain tensors: others cannot write to them.

    Most of a step's calls get none, and torch takes many microseconds to show an operator to a dispatch mode. Unlike that mode
    it does not see what code that is no function of torch's, such as TorchScript's, does with memory of its own.

    Args:
        writes: Sees the operators of these calls.
        tensors: The tensors besides parameters. Of a parameter, views are followed that calls make in the block.
    """

    def __init__(self, writes: Writes, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._writes = writes
        self._memory = {storage_key(tensor) for tensor in tensors if _has_memory(tensor)}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._gets_any(args) or (kwargs and self._gets_any(kwargs.values())):
            with self._writes:
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _gets_any(self, arguments: Iterable[Any]) -> bool:
        for argument in arguments:
            if isinstance(argument, Tensor):
                if self._is_one(argument):
                    return True
            elif isinstance(argument, (list, tuple)):
                if self._gets_any(argument):
                    return True
            elif isinstance(argument, dict) and self._gets_any(argument.values()):
                return True
        return False

    def _is_one(self, tensor: Tensor) -> bool:
        """True if a tensor is, or may be, one of them, or a view of one."""
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return True  # it may have others inside
        if tensor.is_meta:
            return False
        try:
            memory = storage_key(tensor)
        except NotImplementedError:  # inside torch.func's transformations
            return True
        if type(tensor) is torch.nn.Parameter:  # which is all that there can be here, and asked without torch's own isinstance
            self._memory.add(memory)
        return memory in self._memory


def _has_memory(tensor: Tensor) -> bool:
    """True if a tensor has memory of the usual kind; those without data, and those of libraries' own classes, have not."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta
