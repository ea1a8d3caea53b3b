"""Casts of weights by autocast, made once for all microbatches of a batch.

Under autocast an operation has its weight in the lower precision, and keeps that for the backward pass: on one device once for
a batch. Lightning switches torch's cache of such copies off (a weight that is used twice is cast twice), so that each
microbatch would bring copies of all weights of a stage: GPipe would hold as many as there are microbatches, 1F1B as many as
there are stages after it. What a batch's microbatches are given is the same, and so is what they compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def sharing_casts(device: torch.device) -> Iterator[None]:
    """In the block, the calls of stages under autocast share what it makes of weights; autocast itself is as it was.

    torch drops its copies where no autocast is around any more, so that one has to be: all that runs in the block. No weight
    may change in it.
    """
    name = device.type
    with torch.autocast(name, torch.get_autocast_dtype(name), enabled=torch.is_autocast_enabled(name), cache_enabled=True):
        try:
            yield
        finally:
            torch.clear_autocast_cache()
