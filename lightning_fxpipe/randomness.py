"""Random numbers in a pipeline.

User code outside the stages (samplers, augmentation, noise drawn in the step) must draw the same numbers on every rank, or the
ranks would train on different data; so all ranks of a pipeline start with the same generator states and stay in lock step.
Each stage draws numbers of its own (dropout), seeded by the run's seed, the batch, the microbatch and the stage: two stages do
not repeat each other, and a resumed run repeats itself.

What the step draws after the model's call, only the last stage draws. With one microbatch it continues the common stream, as on
one device, and the other ranks are told the state that it leaves. With several, the stream must go on with the next
microbatch's prelude, so the rest of the step gets numbers of its own.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_fxpipe._compat import isolated_rng


@contextmanager
def own_random_numbers(*key: int | str) -> Iterator[None]:
    """Runs the block with the default generators seeded from ``key``; afterwards they continue where they were."""
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1
    with isolated_rng():
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        yield
