"""Tells every rank why the run ended.

A rank that fails writes its traceback to the store at which the ranks met, and leaves; its neighbours then fail with a broken
connection, which says nothing. They look into the store and raise what really happened.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from lightning_fxpipe._compat import default_store
from lightning_fxpipe.errors import PeerError

_KEY = "lightning_fxpipe/failure"


@contextmanager
def failures_reach_every_rank() -> Iterator[None]:
    """Reports an error of the block to the other ranks, or raises theirs in its place.

    Raises:
        PeerError: Another rank failed first.
    """
    try:
        yield
    except Exception as error:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            raise
        if _is_lost_connection(error):
            reported = _reported()
            if reported:
                raise PeerError("Another rank of the pipeline failed.", observed=f"its traceback:\n{reported}") from None
        else:
            default_store().set(_KEY, f"rank {dist.get_rank()}:\n{''.join(traceback.format_exception(error))}")
        raise


def _is_lost_connection(error: Exception) -> bool:
    """Whether the error only says that a neighbour has gone; torch has no type for that with gloo."""
    if isinstance(error, dist.DistBackendError):
        return True
    return type(error) is RuntimeError and any(
        word in str(error) for word in ("Connection closed by peer", "Connection reset", "Broken pipe", "gloo")
    )


def _reported() -> str | None:
    store = default_store()
    try:
        store.wait([_KEY], timedelta(seconds=1))
        return str(store.get(_KEY).decode())
    except Exception:
        return None  # the rank that holds the store has gone: its own error is on the terminal


def peer_failure() -> PeerError:
    """The error of another rank that is known to have failed."""
    return PeerError("Another rank of the pipeline failed.", observed=f"its traceback:\n{_reported() or 'not there yet'}")
