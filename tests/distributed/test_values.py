"""What is sent of a value; ``tests/ranks/test_values.py`` sends it."""

from __future__ import annotations

import torch

from lightning_fxpipe.distributed.values import _taken_apart


def test_a_small_view_is_sent_without_what_it_is_a_view_of() -> None:
    """pickle takes all the memory behind a tensor."""
    (row, _), _ = _taken_apart(torch.zeros(1000, 1000)[0])
    assert row.untyped_storage().nbytes() == 4000
