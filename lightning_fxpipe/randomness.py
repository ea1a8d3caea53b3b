"""Random numbers in a pipeline.

User code outside the stages (samplers, augmentation, noise drawn in the step) must draw the same numbers on every rank, or the
ranks would train on different data; so all ranks of a pipeline start with the same generator states and stay in lock step.
Each stage draws numbers of its own (dropout), seeded by the run's seed, the batch, the microbatch and the stage: two stages do
not repeat each other, and a resumed run repeats itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def stage_generator(*key: int | str, device: torch.device) -> Iterator[None]:
    """Runs the block with torch's default generators seeded from ``key``; afterwards they continue where they were."""
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield
