"""The engine's names that are not public do what the package takes them for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fxpipe._compat.autograd import (
    after_backward,
    backward_keeps_graph,
    has_gradient_hooks,
    runs_before,
)


class _Notes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: list[Any]) -> Tensor:
        ctx.notes = notes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.notes.append(backward_keeps_graph())
        after_backward(lambda: ctx.notes.append("over"))
        return gradient, None


@pytest.mark.parametrize("keeps", [False, True])
def test_an_operation_knows_whether_its_graph_is_kept_and_when_the_pass_is_over(keeps: bool) -> None:
    notes: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda tensor: notes.append("gradient"))
    _Notes.apply(x, notes).sum().backward(retain_graph=keeps)
    assert notes == [keeps, "gradient", "over"]


class _Asks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, notes: list[bool]) -> Tensor:
        ctx.notes = notes
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.notes += [runs_before(ctx, 0), runs_before(ctx, 1)]
        return gradient, gradient, None


def test_an_operation_knows_which_of_its_inputs_a_pass_goes_on_to() -> None:
    notes: list[bool] = []
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    total = _Asks.apply(x, y * 2, notes).sum()
    torch.autograd.grad(total, y, retain_graph=True)
    total.backward()
    assert notes == [False, True, True, True]


def test_a_parameters_gradient_hooks_are_seen() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not has_gradient_hooks(parameter)
    handle = parameter.register_hook(lambda gradient: gradient)
    assert has_gradient_hooks(parameter)
    handle.remove()
    assert not has_gradient_hooks(parameter)
    parameter.register_post_accumulate_grad_hook(lambda tensor: None)
    assert has_gradient_hooks(parameter)
