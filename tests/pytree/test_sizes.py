"""Numbers of tensors: each as ``float`` gives it, and read together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sympy
import torch

from lightning_fxpipe.pytree.sizes import SymbolicSize, held_number, plain_number, plain_numbers

NUMBERS: list[Any] = [
    2,
    0.1,
    True,
    torch.tensor(1 / 3),
    torch.tensor([[1 / 3]], dtype=torch.float64),
    torch.tensor(1 / 3, dtype=torch.bfloat16),
    torch.tensor(2**62 + 1),
    torch.tensor(True),
    torch.tensor(math.inf),
    torch.ones((), requires_grad=True),
    torch.ones(()).to_sparse(),
]


def test_numbers_that_are_read_together_are_those_that_are_read_one_by_one() -> None:
    expected = [plain_number(number) for number in NUMBERS]
    assert plain_numbers([], [held_number(number) for number in NUMBERS], [3.0]) == [[], expected, [3.0]]


def test_a_number_is_that_of_the_moment_whatever_happens_to_the_tensor_later() -> None:
    for dtype in (torch.float32, torch.float64):
        loss = torch.tensor(4.0, dtype=dtype)
        held = held_number(loss)
        loss /= 2
        assert plain_numbers([held]) == [[4.0]]


def test_a_complex_number_is_none() -> None:
    with pytest.raises(RuntimeError, match="without overflow"):
        held_number(torch.tensor(1j))


def test_a_float_that_sympy_makes_an_integer_stays_a_float() -> None:
    """``torch.full(shape, 1.0 - n)`` has other numbers' type otherwise; and the number was recorded anew for each value."""
    n = sympy.Symbol("n", integer=True)
    assert repr(SymbolicSize(1.0 - n, is_float=True).value({n: 1})) == "0.0"
    assert repr(SymbolicSize(1 - n).value({n: 1})) == "0"
