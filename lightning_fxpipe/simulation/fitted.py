"""The better of two orders for given costs: the one that is made to fit them, and the one for stages that are all equal.

The orders of ``zero_bubble`` and ``zero_bubble_v`` are heuristics: one that knows more is not always better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.simulation.actions import ActionTable
from lightning_fxpipe.simulation.costs import Link, StageCosts, even
from lightning_fxpipe.simulation.simulator import run_table


def fitted(
    make: Callable[..., ActionTable],
    costs: Sequence[StageCosts],
    num_microbatches: int,
    memory_bytes: Sequence[float] | None,
    link: Link,
) -> ActionTable:
    """The order with which a step takes less.

    Args:
        make: ``zero_bubble`` or ``zero_bubble_v``.
        costs, num_microbatches, memory_bytes, link: Its arguments.

    Raises:
        ScheduleError: There is no order for so many stages and microbatches in that memory.
    """
    known, found = [costs], []
    refused: ScheduleError | None = None
    if (same := even(costs)) != [*costs]:
        known.append(same)
    for each in known:
        try:
            found.append(make(each, num_microbatches, memory_bytes=memory_bytes, link=link))
        except ScheduleError as error:
            refused = refused or error
    if not found:
        assert refused is not None
        raise refused
    return min(found, key=lambda table: run_table(table, costs, link=link).pipeline_seconds)
