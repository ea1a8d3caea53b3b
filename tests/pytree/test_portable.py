"""Values on their way to the other ranks: their tensors, copied to the CPU together."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe import UnsupportedError
from lightning_fxpipe.pytree.portable import on_host, packed, sendable
from lightning_fxpipe.pytree.sizes import same_bytes
from tests.ranks.synchronisations import DEVICE, renamed_device


def tensors() -> list[Tensor]:
    """Of all sizes of elements, in an order in which those of the larger ones would begin at odd places."""
    made = [torch.tensor(value, dtype=dtype) for value, dtype in ((True, torch.bool), (7, torch.int8), (0.5, torch.bfloat16))]
    made += [torch.arange(3.0, dtype=torch.float64), torch.arange(6.0).reshape(2, 3).T, torch.tensor(1j), torch.empty(0, 2)]
    return [*made, torch.arange(40_000), torch.eye(2).to_sparse(), torch.ones(2, requires_grad=True)]


def test_copies_are_equal_and_the_host_waits_once_for_all_that_are_small() -> None:
    expected = tensors()
    with renamed_device() as device:
        there = [tensor.to(DEVICE, non_blocking=True) if tensor.layout is torch.strided else tensor for tensor in expected]
        found: list[Any] = on_host([{"a": there[:4]}, there[4:], "text", there[0]])
        assert len(device.batches[0]) == 3  # for those that are large, that are empty, and all others
        (flat, rest, text, again) = found
        assert text == "text"
        assert again is flat["a"][0]
        for tensor, copy in zip(expected, [*flat["a"], *rest], strict=True):
            assert not copy.requires_grad
            assert copy.device == torch.device("cpu")
            assert (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
            assert torch.equal(copy.to_dense(), tensor.detach().to_dense())
    assert all(len(pickle.dumps(copy)) < 1000 for copy in flat["a"])  # a view would bring all others along


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="which cannot be pickled"):
        sendable([torch.ones(1), lambda: 0], lambda observed: UnsupportedError("No.", observed=observed))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.complex32, torch.float32, torch.bool])
def test_a_packed_value_has_tensors_of_any_dtype(dtype: torch.dtype) -> None:
    """torch pickles all of them, and cannot read all of them back."""
    memory = torch.arange(48).to(torch.uint8) if dtype is not torch.bool else torch.ones(48, dtype=torch.uint8)
    tensor = memory.view(dtype).view(2, -1).t()
    first, second = pickle.loads(packed({"a": [tensor, "text"], "b": nn.Parameter(torch.ones(2))})).values()
    assert first[0].dtype is dtype
    assert first[0].shape == tensor.shape
    assert same_bytes(first[0], tensor)
    assert first[1] == "text"
    assert isinstance(second, nn.Parameter)
