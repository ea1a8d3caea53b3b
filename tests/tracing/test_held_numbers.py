"""Numbers as inputs of a graph: the same calls follow from them, whatever the code does with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.errors import TraceError
from lightning_fxpipe.tracing.held_numbers import NumberPlace, failing_numbers
from lightning_fxpipe.tracing.trace import trace_region
from tests.traces import call_of, covers


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -ctx.strength * gradients[0], None


class Adversarial(nn.Module):
    strength = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.strength = 0.5
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        applied: Tensor = Reverse.apply(self.layer(x), self.strength)  # type: ignore[no-untyped-call]
        return applied


def test_the_strength_of_an_autograd_function_is_an_input() -> None:
    """Its node's function is made anew in each recording, so that two graphs with the same calls seemed to differ."""
    model, call = Adversarial(), call_of(torch.ones(2, 3))
    plain = trace_region(model, call)
    traced = trace_region(model, replace(call, numbers=(NumberPlace(("", "strength")),)))
    assert traced.is_like(plain)
    assert [str(place) for place in traced.numbers.places.values()] == ["strength"]
    model.strength = 0.25
    assert not covers(plain, call)
    assert covers(traced, call)
    assert [*traced.numbers.now.values()] == [0.25]


USES: dict[str, tuple[Callable[[float, Tensor], Tensor], float]] = {
    "exp": (lambda p, h: h * (2 / (1 + math.exp(-10 * p)) - 1), 0.5),
    "exp of an integer": (lambda p, h: h * math.exp(-p / 10), 3),
    "log": (lambda p, h: h * math.log(p), 0.5),
    "sqrt": (lambda p, h: h / math.sqrt(p), 5),
    "cos": (lambda p, h: h * (1 + math.cos(math.pi * p)) / 2, 0.5),
    "pow": (lambda p, h: h * math.pow(p, 2.0) * 0.9**p, 0.5),
    "dropout": (lambda p, h: nn.functional.dropout(h, p=p), 0.5),
    "label smoothing": (lambda p, h: nn.functional.cross_entropy(h, h.detach().softmax(1), label_smoothing=p), 0.1),
    "tensor": (lambda p, h: h * torch.tensor(p), 0.5),
}


class Uses(nn.Module):
    def __init__(self, use: Callable[[float, Tensor], Tensor], value: float) -> None:
        super().__init__()
        self.use, self.value = use, value
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.value, self.layer(x))


@pytest.mark.parametrize("name", USES)
def test_what_is_made_of_a_number_follows_from_it(name: str) -> None:
    """Functions of ``math`` and kernels of torch ask a symbol for its value, which fixed it: each value was recorded anew."""
    use, value = USES[name]
    model, call = Uses(use, value), call_of(torch.ones(2, 3))
    plain = trace_region(model, call)
    traced = trace_region(model, replace(call, numbers=(NumberPlace(("", "value")),)))
    assert traced.is_like(plain)
    assert not traced.constant_numbers()
    model.value = value + 1 if isinstance(value, int) else value * 1.5
    assert covers(traced, call)
    assert math.exp(0.5) == pytest.approx(1.6487212707)


def test_a_number_is_no_input_if_its_value_is_read_from_a_tensor_made_of_it() -> None:
    """A fake knows the value of what ``torch.tensor`` makes, and would give it to the code for good."""
    model, call = Uses(lambda p, h: h * torch.tensor(p).item(), 0.5), call_of(torch.ones(2, 3))
    with pytest.raises(TraceError, match="cannot be traced"):
        trace_region(model, replace(call, numbers=(NumberPlace(("", "value")),)))


@pytest.mark.parametrize("bad", [{"b"}, {"a", "c"}, {"a", "b", "c", "d"}])
def test_only_numbers_that_cannot_be_inputs_are_constants(bad: set[str]) -> None:
    """An attempt with all of them fails for one, and says nothing of which."""
    places = tuple(NumberPlace(("", name)) for name in "abcd")

    def attempt(some: tuple[NumberPlace, ...]) -> tuple[NumberPlace, ...]:
        return some if any(str(place) in bad for place in some) else ()

    assert {str(place) for place in failing_numbers(places, attempt(places), attempt)} == bad


def test_numbers_that_fail_together_only_are_all_constants() -> None:
    places = tuple(NumberPlace(("", name)) for name in "ab")
    assert failing_numbers(places, places, lambda some: some if len(some) == 2 else ()) == places
