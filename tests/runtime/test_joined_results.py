"""Results of microbatches, put together as they come."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_fxpipe.runtime.joined_results import JoinedResults
from lightning_fxpipe.stages.build import TensorSpec


def joined(batch: Tensor, dim: int | None, sizes: list[int], num_rows: int) -> Tensor:
    order = tuple(sorted(range(batch.dim()), key=lambda each: -batch.stride(each)))
    spec = TensorSpec(shape=tuple(batch.shape), dtype=batch.dtype, requires_grad=False, memory_order=order)
    results, start = JoinedResults([spec], [dim], num_rows), 0
    for rows in sizes:
        assert not results.are_complete
        entries = 1 if dim is None else batch.shape[dim] // num_rows
        part = batch if dim is None else batch.narrow(dim, start * entries, rows * entries)
        results.put([part], start, rows)
        start += rows
    assert results.are_complete
    (found,) = results.take()
    assert not results.take()
    return found


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    dim=st.integers(0, 2),
    entries=st.integers(1, 3),
    other=st.just(2),
)
def test_parts_come_to_their_places(sizes: list[int], dim: int, entries: int, other: int) -> None:
    """Also where a result has several entries for each row, and where the last microbatch is smaller."""
    shape = [2, 2, 2]
    shape[dim] = sum(sizes) * entries
    batch = torch.arange(torch.Size(shape).numel()).view(shape)
    assert torch.equal(joined(batch, dim, sizes, sum(sizes)), batch)


def test_what_has_no_samples_is_the_firsts() -> None:
    assert joined(torch.tensor([1.0, 2.0]), None, [2, 1], 3).tolist() == [1.0, 2.0]


def test_images_stay_in_their_memory_format() -> None:
    images = torch.rand(4, 3, 5, 6).to(memory_format=torch.channels_last)
    found = joined(images, 0, [2, 2], 4)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, images)
