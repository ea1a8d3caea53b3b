"""A step that runs for single microbatches, which must not do there what means something for the whole batch only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ClassVar

from lightning_fxpipe.errors import UnsupportedError

_is_for_microbatch: ContextVar[bool] = ContextVar("is_for_microbatch", default=False)


class NeedsWholeBatch(UnsupportedError):
    """A step does something where it runs for a microbatch that it may do for the whole batch only.

    Attributes:
        does: What, as a verb of which the step is the subject.
    """

    does: ClassVar[str]


@contextmanager
def for_microbatch() -> Iterator[None]:
    """In the block a step runs for a microbatch, or for the batch to be compared with these."""
    token = _is_for_microbatch.set(True)
    try:
        yield
    finally:
        _is_for_microbatch.reset(token)


def is_for_microbatch() -> bool:
    """Returns True if user code runs so now."""
    return _is_for_microbatch.get()
