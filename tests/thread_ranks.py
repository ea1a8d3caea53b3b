"""Ranks as threads of one process, for what needs no process group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

_TIMEOUT_SECONDS = 60.0


class ThreadRanks:
    """Some ranks, which can gather values.

    Args:
        world_size: How many.
        on_values: Called with all values when they are gathered, before any rank has them.
    """

    def __init__(self, world_size: int, on_values: Callable[[list[Any]], None] = lambda values: None) -> None:
        self._values: list[Any] = [None] * world_size
        self._given = threading.Barrier(world_size, lambda: on_values(list(self._values)), timeout=_TIMEOUT_SECONDS)
        self._taken = threading.Barrier(world_size, timeout=_TIMEOUT_SECONDS)

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Gives the values of all ranks."""
        self._values[rank] = value
        self._given.wait()
        found = list(self._values)
        self._taken.wait()
        return found

    def run(self, jobs: Sequence[Callable[[Callable[[Any], list[Any]]], Any]]) -> list[Any]:
        """Calls each rank's job with its ``gather``; returns the results."""
        results: list[Any] = [None] * len(jobs)

        def call(rank: int) -> None:
            results[rank] = jobs[rank](lambda value: self.gather(rank, value))

        threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_TIMEOUT_SECONDS)
            assert not thread.is_alive(), "a rank hangs"
        return results
