"""The arguments of the microbatches become those of the batch: data joined, numbers by their kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_fxpipe.joining import BatchLoss, joined, joined_log

NO_LOSS = BatchLoss()


def of(sizes: list[int], *values: Any, loss: BatchLoss = NO_LOSS) -> list[Any]:
    """What one positional argument becomes."""
    return [args[0] for args, _ in joined([((value,), {}) for value in values], sizes, loss)]


def plain(value: Any) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 3))
def test_a_batch_that_was_cut_is_whole_again(sizes: list[int], width: int) -> None:
    batch = torch.arange(sum(sizes) * width).reshape(-1, width)
    texts = [str(i) for i in range(sum(sizes))]
    calls = [
        ((part, text.tolist()), {"array": part.numpy(), "flat": part.reshape(-1)})
        for part, text in zip(batch.split(sizes), np.split(np.array(texts), np.cumsum(sizes)[:-1]), strict=True)
    ]
    ((args, kwargs),) = joined(calls, sizes, NO_LOSS)
    assert plain(args) == [batch.tolist(), texts]
    assert plain(kwargs) == {"array": batch.tolist(), "flat": batch.flatten().tolist()}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((torch.tensor(1.0), torch.tensor(4.0)), [1.75]),
        ((1.0, 4.0), [1.75]),
        ((0.5, 0.5), [0.5]),
        ((torch.tensor(2), torch.tensor(1)), [3]),
        ((3, 1), [4]),
        ((2, 2), [4]),
        ((True, True), [True]),
        ((True, False), [True, False]),
        (("macro", "macro"), ["macro"]),
        (("a", "b"), ["a", "b"]),
        ((None, None), [None]),
        ((torch.ones(5), torch.ones(2)), [[1.0] * 7]),  # selected tokens
        ((torch.ones(3, 2), torch.ones(1, 4)), [[[1.0] * 2] * 3, [[1.0] * 4]]),  # padded to the longest of each
        (([{"boxes": 1}] * 3, [{"boxes": 2}]), [[{"boxes": 1}] * 3 + [{"boxes": 2}]]),
        (({"p": torch.ones(3)}, {"p": torch.zeros(1)}), [{"p": [1.0, 1.0, 1.0, 0.0]}]),
        (({"a": 1.0}, {"b": 1.0}), [{"a": 1.0}, {"b": 1.0}]),
    ],
)
def test_each_kind_of_argument(values: tuple[Any, ...], expected: list[Any]) -> None:
    assert plain(of([3, 1], *values)) == expected


def test_the_same_object_is_no_part_of_the_batch() -> None:
    weights = torch.ones(4)
    (found,) = of([2, 2], weights, weights)
    assert found is weights


def test_tensors_of_one_length_for_any_size_are_no_samples() -> None:
    classes = torch.arange(5.0)
    assert plain(of([3, 1], classes, classes.clone())) == [classes.tolist()]
    assert plain(of([3, 1], classes, classes + 1)) == [classes.tolist(), (classes + 1).tolist()]


def test_as_many_tensors_as_samples_are_layers_where_each_is_a_batch() -> None:
    layers = [[torch.full((2,), float(10 * part + layer)) for layer in range(2)] for part in range(2)]
    assert plain(of([2, 2], *layers)) == [[[0.0, 0.0, 10.0, 10.0], [1.0, 1.0, 11.0, 11.0]]]


@pytest.mark.parametrize(
    "calls",
    [
        [((torch.tensor(3.0), 2), {}), ((torch.tensor(1.0), 1), {})],  # a sum and its number
        [((3.0,), {"weight": 0.5}), ((1.0,), {"weight": 1.5})],  # a mean and its weight
        [((torch.ones(2), 2), {}), ((torch.ones(1), 1), {})],  # data and a count
        [((1.0,), {}), ((1.0, 2.0), {})],
    ],
)
def test_numbers_that_belong_together_stay_with_their_microbatch(calls: list[Any]) -> None:
    assert joined(calls, [2, 1], NO_LOSS) == calls


def test_a_number_that_is_the_loss_is_the_batchs_loss() -> None:
    loss = BatchLoss.of([torch.tensor(1.0), torch.tensor(5.0)], (1.0, 1.0))
    assert plain(of([2, 2], torch.tensor(1.0), torch.tensor(5.0), loss=loss)) == [6.0]
    assert plain(of([2, 2], torch.tensor(1.0), torch.tensor(6.0), loss=loss)) == [3.5]


def test_what_is_written_to_a_log_is_always_one_call() -> None:
    calls: list[Any] = [
        (({"loss": 1.0, "epoch": 3, "right": 2}, 7), {"picture": torch.zeros(3, 2, 2)}),
        (({"loss": 4.0, "epoch": 3, "right": 6}, 7), {"picture": torch.ones(3, 2, 2)}),
    ]
    args, kwargs = joined_log(calls, [4, 4], NO_LOSS)
    assert args == ({"loss": 2.5, "epoch": 3, "right": 4.0}, 7)
    assert plain(kwargs["picture"]) == plain(torch.zeros(3, 2, 2))
