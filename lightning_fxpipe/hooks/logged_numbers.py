"""Numbers that hooks log: plain ones and tensors with one element."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor

from lightning_fxpipe.pytree.sizes import plain_number


def is_number(value: Any) -> bool:
    """True if ``self.log`` accepts the value as one number."""
    return isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.numel() == 1)


def same_number(one: float, other: float | None) -> bool:
    """True if both are the same number, or both are nan."""
    return other is not None and (one == other or (math.isnan(one) and math.isnan(other)))


def in_form_of(value: Any, number: float) -> Any:
    """The number in the form of the value; the value itself where it is the same."""
    if same_number(plain_number(value), number):
        return value
    return torch.full_like(value, number) if isinstance(value, Tensor) else type(value)(number)


def as_it_is(value: Any) -> Any:
    """The value as it is now, whatever the hook goes on to do with it."""
    return value.detach().clone() if isinstance(value, Tensor) else value
