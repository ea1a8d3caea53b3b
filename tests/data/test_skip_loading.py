"""Batches without values."""

from __future__ import annotations

import pickle
from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fxpipe.data.skip_loading import describe_batch, without_values

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Sample:
    pixels: Tensor
    name: str


def test_a_batch_without_values_is_of_the_same_types_shapes_and_constants() -> None:
    batch = {
        "sample": Sample(torch.rand(3, 4).t(), "cat"),
        "pair": Pair(torch.arange(5), [7, None]),
        "none": torch.empty(0, 3, dtype=torch.bfloat16),
        "expanded": torch.ones(2, 1).expand(2, 3),
        "part": torch.rand(4, 6)[1:3, ::2],
        "number": torch.tensor(4.0),
    }
    zeros = without_values(batch, torch.device("cpu"))
    assert (zeros["sample"].name, type(zeros["pair"]), zeros["pair"].second) == ("cat", Pair, [7, None])
    pairs = [
        (zeros["sample"].pixels, batch["sample"].pixels),  # type: ignore[attr-defined]
        (zeros["pair"].first, batch["pair"].first),  # type: ignore[attr-defined]
        *((zeros[name], batch[name]) for name in ("none", "expanded", "part", "number")),
    ]
    for zero, tensor in pairs:
        assert isinstance(tensor, Tensor)
        assert (zero.shape, zero.stride(), zero.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert not zero.any()


def test_what_is_sent_does_not_grow_with_the_batch() -> None:
    small, large = ({"x": torch.rand(size, 100)} for size in (1, 1000))
    assert len(describe_batch(large)) < len(describe_batch(small)) + 10
    assert len(pickle.dumps(large)) > 400_000


def test_tensors_of_other_layouts_and_kinds_stay_what_they_are() -> None:
    batch = {"sparse": torch.eye(3).to_sparse(), "quantized": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)}
    found = without_values(batch, torch.device("cpu"))
    assert (found["sparse"].layout, found["sparse"].shape) == (torch.sparse_coo, (3, 3))
    assert (found["quantized"].is_quantized, found["quantized"].shape) == (True, (2,))
