"""Undoes what a run of user code leaves behind, where it is one run more than the user's.

Everything that can be reached from the modules is looked at: attributes, lists, dicts, sets, tensors, arrays, random
generators, and objects of the user's own classes. What torch and Lightning keep for themselves is left alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_fxpipe.exchange import kept_generators, remembered_generators
from lightning_fxpipe.rng import isolated_rng

# Beyond this many objects (a replay buffer in the module) remembering them would take longer than what they are needed for.
_MAX_OBJECTS = 20_000

_UNCHANGING = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    ModuleType,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
)
_CONTAINERS = (dict, list, set, deque)
_OTHERS_OWN = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_fxpipe"})


class TooMuchToUndo(Exception):
    """There are too many objects to remember."""


@contextmanager
def undone(root: nn.Module, parameters: Iterable[nn.Parameter] = ()) -> Iterator[None]:
    """After the block the module and all that it holds are what they were, and so are the random generators.

    Args:
        root: The module.
        parameters: Those that the block may change in place; others are taken to stay as they are.

    Raises:
        TooMuchToUndo: Nothing has run then.
    """
    memory = _Memory()
    for module in root.modules():
        memory.remember_attributes(module)
    for parameter in parameters:
        memory.remember_tensor(parameter)
    with isolated_rng(), kept_generators(root):
        try:
            yield
        finally:
            memory.restore()


@contextmanager
def undone_if_raised(kind: type[Exception], root: nn.Module) -> Iterator[None]:
    """Where the block raises an error of a kind, the module and all that it holds are what they were before it, but for what
    lies deeper than can be remembered.

    Args:
        kind: The kind.
        root: The module.
    """
    memory = _Memory()
    with suppress(TooMuchToUndo):
        for module in root.modules():
            memory.remember_attributes(module)
    rewind_generators = remembered_generators(root)
    try:
        yield
    except kind:
        memory.restore()
        rewind_generators()
        raise


class _Memory:
    """Contents of objects at one moment."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # the object is kept, so that its id stays its own
        self._restorers: list[Callable[[], object]] = []

    def restore(self) -> None:
        """Makes all objects what they were."""
        with torch.no_grad():
            for restorer in self._restorers:
                restorer()

    def remember_attributes(self, owner: Any) -> None:
        """An object's attributes, and what they hold."""
        if not self._is_new(owner):
            return
        before = dict(vars(owner))

        def restore() -> None:
            if not _same(vars(owner), before):
                vars(owner).clear()
                vars(owner).update(before)

        self._restorers.append(restore)
        for value in before.values():
            self._remember(value)

    def remember_tensor(self, tensor: Tensor) -> None:
        """A tensor's values."""
        if tensor.is_meta or not self._is_new(tensor):
            return
        values = tensor.detach().clone()
        # Always: not every change is counted in the tensor's version, batch norm's is not. Through `data`, so that a graph
        # that has saved the tensor does not take this for a change.
        self._restorers.append(lambda: tensor.data.copy_(values))

    def _remember(self, value: Any) -> None:
        if isinstance(value, _UNCHANGING):
            return
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter):
                self.remember_tensor(value)
        elif isinstance(value, np.ndarray):
            self._remember_array(value)
        elif isinstance(value, _CONTAINERS):
            self._remember_container(value)
        elif isinstance(value, (tuple, frozenset)):
            for entry in value:
                self._remember(entry)
        elif _is_users(value):
            self.remember_attributes(value)

    def _remember_array(self, array: np.ndarray) -> None:
        if not self._is_new(array) or not array.flags.writeable:
            return
        values = array.copy()
        self._restorers.append(lambda: np.copyto(array, values))

    def _remember_container(self, container: Any) -> None:
        if not self._is_new(container):
            return
        before = container.copy()

        def restore() -> None:
            if not _same(container, before):
                container.clear()
                container.extend(before) if isinstance(container, (list, deque)) else container.update(before)

        self._restorers.append(restore)
        for entry in list(container.values()) if isinstance(container, dict) else list(container):
            self._remember(entry)

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        if len(self._seen) >= _MAX_OBJECTS:
            raise TooMuchToUndo(f"the module holds more than {_MAX_OBJECTS} objects, which would all have to be remembered")
        self._seen[id(value)] = value
        return True


def _is_users(value: Any) -> bool:
    """Whether an object is of a class of the user's, a metric's included, and not part of torch or of the Trainer."""
    return hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in _OTHERS_OWN


def _same(one: Any, other: Any) -> bool:
    """Whether two containers hold the same objects."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(a is b and one[a] is other[b] for a, b in zip(one, other, strict=True))
    return isinstance(one, (set, frozenset)) and one == other or all(a is b for a, b in zip(one, other, strict=True))
