"""Distributions of ``torch.distributions`` in code that runs without data.

They look at the values of their arguments to check them (``if not valid.all(): raise ValueError``). Where there are no values,
and where the calls of a step are counted, they do not: what they compute is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributions import Distribution

from lightning_fxpipe._compat import patched_attributes


@contextmanager
def unvalidated_distributions() -> Iterator[None]:
    """Distributions that are made in the block check no arguments, whatever their ``validate_args`` says."""
    original = Distribution.__init__

    def init(self: Distribution, batch_shape: Any = (), event_shape: Any = (), validate_args: bool | None = None) -> None:
        original(self, batch_shape, event_shape, validate_args=False)

    with patched_attributes((Distribution, "__init__", init)):
        yield
