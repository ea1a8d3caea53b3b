"""Symbolic sizes as arguments of graph nodes.

They stay expressions of the inputs' sizes until a stage is built, which computes them from a tensor that it has; so no integer
ever crosses a cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from lightning_fxpipe._compat.torch import size_hint, symbolic_expression


@dataclass(frozen=True, slots=True)
class SymbolicSize:
    """A number among a call's arguments that follows from the inputs' sizes; a stage computes it anew.

    Attributes:
        expression: The number as sympy has it.
        is_float: True if it is a float also where sympy has an integer: of ``1.0 - n`` at 1 it makes 0.
    """

    expression: Any
    is_float: bool = False

    def value(self, sizes: Mapping[Any, int | float]) -> int | float | bool:
        """The number for given values of the symbols."""
        return self.as_number(self.expression.subs(dict(sizes)))

    def as_number(self, known: Any) -> int | float | bool:
        """Converts the expression, of which all symbols are replaced, to a number of Python's."""
        return float(known) if self.is_float else as_number(known)


def as_size(value: Any) -> Any:
    """A plain number where a symbolic one has a fixed value, else a :class:`SymbolicSize`."""
    expression = symbolic_expression(value)
    if isinstance(expression, int):
        return expression
    size = SymbolicSize(expression, isinstance(value, torch.SymFloat))
    return size.as_number(expression) if expression.is_number else size


def as_size_of(size: SymbolicSize, values: Mapping[Any, int | float]) -> Any:
    """Returns a size with the values of some symbols: a number where none are left, else a :class:`SymbolicSize`."""
    known = size.expression.subs(dict(values))
    return size.as_number(known) if known.is_number or known.is_Boolean else SymbolicSize(known, size.is_float)


def as_number(expression: Any) -> int | float | bool:
    """A sympy number as Python's."""
    if expression.is_Boolean:
        return bool(expression)
    return int(expression) if expression.is_integer else float(expression)


def size_symbols(arguments: Any) -> set[Any]:
    """Symbols of the symbolic sizes in a node's arguments."""
    found: set[Any] = set()

    def visit(value: Any) -> Any:
        if isinstance(value, SymbolicSize):
            found.update(value.expression.free_symbols)
        return value

    map_aggregate(arguments, visit)
    return found


def tensor_bytes(value: Tensor) -> int:
    """Bytes of a (fake) tensor at the sizes that it was traced with. Raises ``ValueError`` where they depend on data."""
    return math.prod(map(size_hint, value.shape)) * value.dtype.itemsize


def plain_number(value: Any) -> float:
    """A number, or a tensor of one element, as a float. It may require a gradient, of which torch would warn."""
    return float(value.detach() if isinstance(value, Tensor) else value)


def held_number(value: Any) -> float | Tensor:
    """Returns a tensor from which :func:`plain_number` can be read later, with the value that the given one has now."""
    if not isinstance(value, Tensor) or value.is_complex() or value.layout is not torch.strided:
        return plain_number(value)
    return value.detach().reshape(()).to(torch.float64, copy=True)


def plain_numbers(*groups: Sequence[float | Tensor]) -> list[list[float]]:
    """Groups of numbers, with those for which tensors stand.

    Tensors of one device are read together: for each reading the host waits until the device has done all that it was given.

    Args:
        *groups: Numbers, and what :func:`held_number` has given.
    """
    places: dict[torch.device, list[Tensor]] = {}
    for value in (value for group in groups for value in group if isinstance(value, Tensor)):
        places.setdefault(value.device, []).append(value)
    read = {device: iter(torch.stack(tensors).tolist()) for device, tensors in places.items()}
    return [[next(read[value.device]) if isinstance(value, Tensor) else value for value in group] for group in groups]


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """True if two tensors of one dtype have equal shapes and bits; ``torch.equal`` does not know all dtypes."""
    return one.shape == other.shape and torch.equal(as_bytes(one.contiguous()), as_bytes(other.contiguous()))


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes: not every transport knows every dtype."""
    return tensor.detach().reshape(-1).view(torch.uint8)
