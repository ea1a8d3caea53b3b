"""The schedules that a user can ask for, by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast

from lightning_fxpipe.distributed.topology import Placement
from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.simulation.actions import BACKWARD, FORWARD, Action, ActionTable
from lightning_fxpipe.simulation.by_name import FITTED, SimulatedSchedule, on_stages, table_of
from lightning_fxpipe.simulation.costs import StageCosts, StageWork

ScheduleName = Literal[
    "auto",
    "gpipe",
    "1f1b",
    "looped_bfs",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv_zero_bubble",
    "dualpipev",
    "zb_h1",
    "zb_h2",
    "zero_bubble",
    "zero_bubble_v",
    "v_half",
    "v_min",
]

# Costs of a stage of which nothing is known: forward and both halves of backward take the same time.
_EQUAL = StageWork(forward=1.0, input_backward=1.0, weight_backward=1.0, kept_bytes=1).costs


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How training batches go through the stages.

    Attributes:
        name: Of the schedule; of a table of the user's own the path of its file.
        alternates: Whether a microbatch goes back before all have come forward; then the loss must be a sum over them.
        stages_per_rank: How many stages a rank has by default.
        is_fixed: Whether it can have no other number.
        is_v: Whether the stages come back through the ranks in a V.
        splits: Whether gradients of weights come later than those of inputs.
        table: Of the user's own, the order, for so many ranks and microbatches as it has.
    """

    name: str
    alternates: bool = True
    stages_per_rank: int = 1
    is_fixed: bool = False
    is_v: bool = False
    splits: bool = False
    table: ActionTable | None = None

    @property
    def is_fitted(self) -> bool:
        """True if its order is made from what the stages take."""
        return self.name in FITTED

    @property
    def num_microbatches(self) -> int | None:
        """Microbatches that it is made for; None where it is made for any number."""
        return None if self.table is None else self.table.num_microbatches


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="auto"),
        Schedule(name="gpipe", alternates=False),
        Schedule(name="1f1b"),
        Schedule(name="looped_bfs", alternates=False, stages_per_rank=2),
        Schedule(name="interleaved_1f1b", stages_per_rank=2),
        Schedule(name="interleaved_zero_bubble", stages_per_rank=2, splits=True),
        Schedule(name="zbv_zero_bubble", stages_per_rank=2, is_fixed=True, is_v=True, splits=True),
        Schedule(name="dualpipev", stages_per_rank=2, is_fixed=True, is_v=True, splits=True),
        Schedule(name="zb_h1", is_fixed=True, splits=True),
        Schedule(name="zb_h2", is_fixed=True, splits=True),
        Schedule(name="zero_bubble", is_fixed=True, splits=True),
        Schedule(name="zero_bubble_v", stages_per_rank=2, is_fixed=True, is_v=True, splits=True),
        Schedule(name="v_half", stages_per_rank=2, is_fixed=True, is_v=True, splits=True),
        Schedule(name="v_min", stages_per_rank=2, is_fixed=True, is_v=True, splits=True),
    )
}


def forward_order(placement: Placement, num_microbatches: int) -> ActionTable:
    """Returns the order of GPipe: all microbatches forward through each of a rank's stages, then back (arXiv 2211.05953).

    Its forward actions alone are the order of an evaluation.
    """
    microbatches = range(num_microbatches)
    return ActionTable.of(
        [
            *(Action(stage, FORWARD, index) for stage in stages for index in microbatches),
            *(Action(stage, BACKWARD, index) for stage in reversed(stages) for index in microbatches),
        ]
        for stages in map(placement.stages_of, range(placement.num_ranks))
    )


def training_order(
    schedule: Schedule, placement: Placement, num_microbatches: int, work: tuple[StageWork, ...] = ()
) -> ActionTable:
    """Returns the order of a schedule whose microbatches go forward and backward by turns.

    Where it has none for so few or so odd many microbatches, all go forward first, which takes more memory.

    Args:
        schedule: The schedule.
        placement: The ranks of the stages.
        num_microbatches: Number of microbatches.
        work: Work of each stage, for an order that is made to fit it; empty if it is unknown: then it is the same for all.
    """
    if schedule.table is not None:
        return schedule.table if num_microbatches == schedule.num_microbatches else forward_order(placement, num_microbatches)
    name = on_stages("1f1b" if schedule.name == "auto" else cast(SimulatedSchedule, schedule.name), placement.stages_per_rank)
    of_stages = [tuple(each.costs for each in work)] if schedule.is_fitted and work else []
    tables = (
        _table(name, costs, num_microbatches, placement.stages_per_rank)
        for costs in (*of_stages, (_EQUAL,) * placement.num_stages)
    )
    return next(filter(None, tables), None) or forward_order(placement, num_microbatches)


@lru_cache(maxsize=64)
def _table(
    name: SimulatedSchedule, costs: tuple[StageCosts, ...], num_microbatches: int, stages_per_rank: int
) -> ActionTable | None:
    """A search may take seconds, and a batch of other shapes asks for the same table."""
    try:
        return table_of(name, costs, num_microbatches, stages_per_rank)
    except ScheduleError:
        return None
