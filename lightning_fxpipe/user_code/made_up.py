"""Stands for what is not there yet when a step is tried at setup: an optimizer, a schedule that a hook will make.

The trial tells which calls of a step use parameters, and with which shapes; values decide nothing of the plan. A graph with
something made up in it is not kept: the first batch, where everything is there, makes another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class MadeUp(float):
    """A number, an object that has such things as attributes and entries, and a function that returns them.

    As a number it is one. Looked up by a tensor of indices, as in a table of noise levels, it gives a tensor of ones.
    """

    def __new__(cls) -> MadeUp:  # noqa: D102
        return super().__new__(cls, 1.0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MadeUp()

    def __setattr__(self, name: str, value: Any) -> None:
        """Nothing is kept."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of a call as a function or method; ``gather`` and the like look up by a tensor."""
        return self._looked_up(next((arg for arg in args if isinstance(arg, Tensor)), None))

    def __getitem__(self, key: Any) -> Any:
        return self._looked_up(key)

    def _looked_up(self, key: Any) -> Any:
        is_index = isinstance(key, Tensor) and not key.is_floating_point()
        return torch.ones(key.shape, device=key.device) if is_index else MadeUp()

    def __setitem__(self, key: Any, value: Any) -> None:
        """Nothing is kept."""

    def __iter__(self) -> Iterator[MadeUp]:
        return iter([MadeUp()])

    def __len__(self) -> int:
        return 1

    def __contains__(self, value: Any) -> bool:
        return True

    def __index__(self) -> int:
        return 1

    def __enter__(self) -> MadeUp:
        return self

    def __exit__(self, *args: Any) -> None:
        return None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """A function of torch gets the number, or a tensor of it where it takes no number."""
        for stand_in in (1.0, torch.ones(())):
            given = [stand_in if isinstance(arg, cls) else arg for arg in args]
            named = {name: stand_in if isinstance(arg, cls) else arg for name, arg in (kwargs or {}).items()}
            try:
                return func(*given, **named)
            except TypeError:
                continue
        return cls()


class MadeUpOptimizer(MadeUp):
    """Stands for an optimizer."""

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Trains nothing, and calls the closure once."""
        return None if closure is None else closure()


def _made_up(operation: str) -> Any:
    plain = getattr(float, operation)

    def operate(self: MadeUp, *others: Any) -> Any:
        result = plain(self, *others)
        return result if result is NotImplemented else MadeUp()

    return operate


_OPERATIONS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _name in (*_OPERATIONS, *(f"r{operation}" for operation in _OPERATIONS), "neg", "pos", "abs"):
    setattr(MadeUp, f"__{_name}__", _made_up(f"__{_name}__"))
