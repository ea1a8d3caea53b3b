"""Numbers as inputs of a graph: the same calls follow from them, whatever the code does with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe.tracing.held_numbers import NumberPlace
from lightning_fxpipe.tracing.trace import trace_region
from tests.traces import call_of


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
    assert not plain.covers(call)
    assert traced.covers(call)
    assert [*traced.numbers.now.values()] == [0.25]
