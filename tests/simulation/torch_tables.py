"""The tables of torch's own schedules, for comparison. What it asks of a stage for one is made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def rows_of(schedule: Any) -> list[list[str]]:
    """The actions of each rank; an action that is two at once (DualPipeV) is written as these, one after the other."""
    order: dict[int, list[Any]] = schedule.pipeline_order
    rows = []
    for rank in sorted(order):
        actions = (action for action in order[rank] if action is not None)
        rows.append([str(part) for action in actions for part in (action.sub_actions or (action,))])
    return rows


def rows_of_class(kind: Any, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> list[list[str]]:
    """As :func:`rows_of`, of a schedule of this class."""
    stages = [
        SimpleNamespace(num_stages=num_ranks * stages_per_rank, group_size=num_ranks, group_rank=0, submod=None)
        for _ in range(stages_per_rank)
    ]
    return rows_of(kind(stages, num_microbatches))
