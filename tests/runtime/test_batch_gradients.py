"""Gradients of a batch that has gone backward before its loss: away until then, or left where nobody looks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_fxpipe.runtime.batch_gradients import BatchGradients


def made(*, may_stay: bool, before: float | None = None) -> tuple[Any, BatchGradients]:
    """A parameter with the gradient of an earlier batch, if any, and a batch that has given it one of ones."""
    parameter: Any = nn.Parameter(torch.zeros(2))
    parameter.grad = None if before is None else torch.full((2,), before)
    gradients = BatchGradients([parameter, nn.Parameter(torch.zeros(3))], may_stay=may_stay)
    with gradients.computing():
        assert parameter.grad is None
        parameter.sum().backward()
    return parameter, gradients


def test_parked_gradients_are_added_to_those_of_batches_before_once() -> None:
    parameter, gradients = made(may_stay=False, before=1.0)
    assert parameter.grad.tolist() == [1.0] * 2
    gradients.install(0.5)
    assert parameter.grad.tolist() == [1.5] * 2
    gradients.install(1.0)
    assert parameter.grad.tolist() == [1.5] * 2


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_those_that_may_stay_are_there_and_count_by_the_factor(factor: float) -> None:
    parameter, gradients = made(may_stay=True)
    assert gradients.are_in_place
    assert parameter.grad.tolist() == [1.0] * 2
    gradients.install(factor)
    assert not gradients.are_in_place
    gradients.install(1.0)
    assert parameter.grad.tolist() == [factor] * 2


def test_they_do_not_stay_beside_those_of_batches_before() -> None:
    """A factor would count for both."""
    parameter, gradients = made(may_stay=True, before=3.0)
    assert not gradients.are_in_place
    assert parameter.grad.tolist() == [3.0] * 2
    gradients.install(0.5)
    assert parameter.grad.tolist() == [3.5] * 2


def test_a_batch_that_fails_leaves_those_of_batches_before() -> None:
    parameter: Any = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    gradients = BatchGradients([parameter], may_stay=True)

    def fail() -> None:
        with gradients.computing():
            parameter.sum().backward()
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert parameter.grad.tolist() == [1.0] * 2
    assert not gradients.are_in_place
