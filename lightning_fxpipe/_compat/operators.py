"""Which arguments an operator writes into, by its schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors that an operator writes into; none for a function that is no operator."""
    found: list[Any] = []
    for position, name in _written_places(func) if isinstance(func, torch._ops.OpOverload) else ():
        value = kwargs[name] if name in kwargs else (*args, *[None] * (position + 1))[position]
        found += value if isinstance(value, (list, tuple)) else [value]
    return [value for value in found if isinstance(value, Tensor)]


def is_writing(func: Any) -> bool:
    """True for an operator that writes into an argument."""
    return isinstance(func, torch._ops.OpOverload) and bool(_written_places(func))


@cache  # an operator is there as long as the process
def _written_places(operator: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that an operator writes into, by its schema, to which there is no public way.

    The schemas of batch norm do not say that they write their running statistics. torch 2.9-2.15.
    """
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(operator._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in ("running_mean", "running_var")
    )
