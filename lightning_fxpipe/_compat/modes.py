"""torch's modes, and their stack: its names are not public. torch 2.9-2.15; tests/_compat/test_modes.py calls each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


class TorchDispatchMode(_TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators below a torch call; the public modes see the call only. torch 2.9-2.15.

    torch wraps what a mode does in a function that torch.compile shall leave alone, which takes four times as long as what
    ours do, at each operator. torch 2.13-2.15.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class function_mode_removed:
    """Takes an active mode off torch's stack for the block, wherever it lies: calls then cost nothing more.

    Inside ``__torch_function__`` torch has taken it off already. torch 2.9-2.15.
    """

    # No generator: such a block is around each microbatch.
    def __init__(self, mode: TorchFunctionMode) -> None:
        self._mode = mode
        self._above: list[Any] = []

    def __enter__(self) -> None:
        above, mode = self._above, self._mode
        if mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            while not above or above[-1] is not mode:
                above.append(_pop_mode())  # type: ignore[no-untyped-call]
            for other in reversed(above[:-1]):
                _push_mode(other)  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: object) -> None:
        for _ in self._above[:-1]:
            _pop_mode()  # type: ignore[no-untyped-call]
        for other in reversed(self._above):
            _push_mode(other)  # type: ignore[no-untyped-call]
        self._above.clear()


def has_function_mode() -> bool:
    """True if a function mode is active; the public query also counts tensor subclasses. torch 2.9-2.15."""
    return _get_current_function_mode() is not None  # type: ignore[no-untyped-call]


def is_watched() -> bool:
    """True if a function mode or a dispatch mode is active. torch 2.9-2.15."""
    return has_function_mode() or bool(_get_current_dispatch_mode_stack())


def makes_fakes() -> bool:
    """True if new tensors have no data, as while a step is recorded. torch 2.9-2.15."""
    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


def unwatched_torch() -> AbstractContextManager[None]:
    """No function mode sees the torch calls of the block. torch 2.9-2.15."""
    # As it is, in no generator: such blocks are around each call of a step.
    return torch._C.DisableTorchFunction()


@contextmanager
def without_modes() -> Iterator[None]:
    """No mode of either kind sees the block: its tensors have data even while a module is made without any. torch 2.9-2.15."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
