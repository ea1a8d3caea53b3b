"""A value of a microbatch knows the batch's, and what is computed from it does, too."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.batchvalues import BatchValue, keep_batch_values, of_batch, unmarked


def value(here: float, of_the_batch: float, taken: dict[float, Any] | None = None) -> BatchValue:
    return BatchValue.of(torch.tensor(here), lambda: torch.tensor(of_the_batch), {} if taken is None else taken)


@pytest.mark.parametrize(
    "compute",
    [
        lambda v: 1 - v,
        lambda v: v.detach().cpu() * 100,
        lambda v: torch.stack([v, torch.tensor(9.0)]).max(),
        lambda v: torch.stack([v, v + 1]).max(0).values,
        lambda v: v.double().pow(2).reshape(1),
        lambda v: v.add_(1).add_(1),
        lambda v: torch.stack([v, v * 2]).unbind()[1],
    ],
)
def test_what_is_computed_from_it_is_computed_again(compute: Callable[[Tensor], Tensor]) -> None:
    found = compute(value(0.25, 0.75))
    for _ in range(2):  # a computation in place must not add up
        torch.testing.assert_close(of_batch(found), compute(torch.tensor(0.75)), rtol=0, atol=0)
    torch.testing.assert_close(unmarked(found), compute(torch.tensor(0.25)), rtol=0, atol=0)
    assert type(unmarked(found)) is Tensor


def test_gradients_flow_through_it() -> None:
    weight = nn.Parameter(torch.tensor(2.0))
    (BatchValue.of(weight * 3, lambda: torch.tensor(0.0), {}) * 5).backward()
    assert float(weight.grad) == 15.0  # type: ignore[arg-type]


def test_python_numbers_that_are_taken_out_are_remembered() -> None:
    taken: dict[float, Any] = {}
    marked = value(0.25, 0.75, taken)
    assert [marked.item(), float(marked + 1)] == [0.25, 1.25]
    assert {number: float(source()) for number, source in taken.items()} == {0.25: 0.75, 1.25: 1.75}


def test_copies() -> None:
    marked = value(0.25, 0.75)
    assert float(of_batch(copy.deepcopy(marked))) == 0.75
    pickled = pickle.loads(pickle.dumps(marked))
    assert (type(pickled), float(pickled)) == (Tensor, 0.25)


def test_what_a_module_has_kept_becomes_the_batchs() -> None:
    module = nn.Module()
    module.best, module.all, module.by_name = value(0.25, 0.75), [1.0, value(0.5, 1.5)], {"a": {"b": value(2.0, 3.0)}}
    kept = module.all
    keep_batch_values(module)
    assert type(module.best) is Tensor
    assert [float(module.best), *map(float, module.all), float(module.by_name["a"]["b"])] == [0.75, 1.0, 1.5, 3.0]
    assert module.all is kept
