"""Plain numbers among the arguments of the recorded call: a reversal strength, a temperature, a step.

    self.model(x, alpha)        # alpha is computed by the step, and differs in each batch

While the call is compared or recorded they lie in an attribute of the called module, and forward gets what is read from there.
So they are guarded, and become inputs of the graph, as other numbers that recorded code reads (``tracing.held_numbers``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_fxpipe.tracing.guards import NUMBER_ARGUMENTS
from lightning_fxpipe.tracing.held_numbers import is_number

Key = int | str  # position, or name of a keyword


@dataclass(frozen=True)
class Number:
    """Stands for a number of a type in the arguments that a signature is made of."""

    type_name: str


def without_numbers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with a :class:`Number` in the place of each number."""
    return tuple(map(_masked, args)), {name: _masked(value) for name, value in kwargs.items()}


def with_numbers(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with the numbers that lie on the module. Reads them as the module's code reads attributes."""
    if not any(isinstance(value, Number) for value in (*args, *kwargs.values())):
        return args, dict(kwargs)
    numbers = getattr(module, NUMBER_ARGUMENTS)
    return (
        tuple(numbers[index] if isinstance(value, Number) else value for index, value in enumerate(args)),
        {name: numbers[name] if isinstance(value, Number) else value for name, value in kwargs.items()},
    )


@contextmanager
def numbers_on(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """In the block, the numbers among the arguments lie on the module that is called with them."""
    found: dict[Key, Any] = {index: value for index, value in enumerate(args) if is_number(value)}
    found |= {name: value for name, value in kwargs.items() if is_number(value)}
    own = vars(module)
    before = own.get(NUMBER_ARGUMENTS)
    if found:
        own[NUMBER_ARGUMENTS] = found
    try:
        yield
    finally:
        if before is not None:
            own[NUMBER_ARGUMENTS] = before
        elif found:
            own.pop(NUMBER_ARGUMENTS, None)


def _masked(value: Any) -> Any:
    return Number(type(value).__name__) if is_number(value) else value
