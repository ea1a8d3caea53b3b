"""A generator in place of a dataloader gives the run all of its batches, though the first one was looked at before."""

from __future__ import annotations

import torch

from lightning_fxpipe.data.begun import BegunIterators


def test_the_first_batch_comes_again_and_is_not_shared() -> None:
    begun, batches = BegunIterators(), (torch.full((2,), float(number)) for number in range(3))
    for _ in range(2):
        begun.first(batches).add_(7)
    assert [float(batch[0]) for batch in begun.whole(batches)] == [0.0, 1.0, 2.0]


def test_what_has_been_given_back_is_left_alone() -> None:
    begun, batches, other = BegunIterators(), iter([1, 2]), iter([3])
    assert begun.first(batches) == 1
    assert begun.whole(other) is other
    whole = begun.whole(batches)
    assert begun.whole(batches) is batches
    assert [*whole, *whole] == [1, 2]
