"""Distributions of ``torch.distributions`` in code that runs without data.

They look at the values of their arguments to check them (``if not valid.all(): raise ValueError``). Where there are no values,
and where the calls of a step are counted, they do not: what they compute is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from lightning_fxpipe._compat.torch import patched_attributes, standard_normals


@contextmanager
def unvalidated_distributions() -> Iterator[None]:
    """Distributions that are made in the block check no arguments, whatever their ``validate_args`` says, and normal ones draw
    by ``torch.randn``.
    """
    original = Distribution.__init__

    def init(self: Distribution, batch_shape: Any = (), event_shape: Any = (), validate_args: bool | None = None) -> None:
        original(self, batch_shape, event_shape, validate_args=False)

    with patched_attributes((Distribution, "__init__", init), *standard_normals(_randn)):
        yield


def _randn(shape: Any, dtype: Any, device: Any) -> Tensor:
    """Returns numbers of the same distribution, made by a call that can be drawn for the whole batch."""
    return torch.randn(shape, dtype=dtype, device=device)
