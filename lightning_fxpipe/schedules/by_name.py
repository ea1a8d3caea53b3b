"""The schedules that a user can ask for, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from lightning_fxpipe.distributed.topology import Placement
from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.planner.stage_costs import costs_of_work
from lightning_fxpipe.planner.stage_work import StageWork
from lightning_fxpipe.simulation.actions import BACKWARD, FORWARD, Action, ActionTable
from lightning_fxpipe.simulation.by_name import FITTED, SimulatedSchedule, table_of
from lightning_fxpipe.simulation.costs import StageCosts

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

# Of stages of which nobody knows what they take: each part as long.
(_EQUAL,) = costs_of_work([StageWork(forward=1.0, input_backward=1.0, weight_backward=1.0, kept_bytes=1)])
# A class of torch's, or a table that torch runs.
Order = type[PipelineScheduleSingle] | type[PipelineScheduleMulti] | ActionTable


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
        """Whether its order is made from what the stages take."""
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


def forward_order(placement: Placement, num_microbatches: int) -> Order:
    """An order for passes that go one way: each stage takes all microbatches before the rank's next stage does."""
    return ScheduleGPipe if placement.stages_per_rank == 1 else breadth_first(placement, num_microbatches)


def training_order(schedule: Schedule, placement: Placement, num_microbatches: int, work: tuple[StageWork, ...] = ()) -> Order:
    """The order of a schedule whose microbatches go forward and backward by turns.

    Where it is none for so few or so odd many microbatches, all go forward first: it takes more memory, and is as right.

    Args:
        schedule: The schedule.
        placement: Where the stages are.
        num_microbatches: How many there are.
        work: What the stages take, for an order that is made from it; nothing where nobody knows: then each takes as long.
    """
    if schedule.is_fitted and work:
        order = _table(schedule.name, costs_of_work(work), num_microbatches)
        if order is not None:
            return order
    make = _of_table if schedule.table is not None else _ORDERS.get(schedule.name, _generated)
    return make(schedule, placement, num_microbatches) or forward_order(placement, num_microbatches)


def breadth_first(placement: Placement, num_microbatches: int) -> ActionTable:
    """All microbatches forward through each of a rank's stages, then back (arXiv 2211.05953)."""
    microbatches = range(num_microbatches)
    return ActionTable.of(
        [
            *(Action(stage, FORWARD, index) for stage in stages for index in microbatches),
            *(Action(stage, BACKWARD, index) for stage in reversed(stages) for index in microbatches),
        ]
        for stages in map(placement.stages_of, range(placement.num_ranks))
    )


def _one_f_one_b(schedule: Schedule, placement: Placement, num_microbatches: int) -> Order | None:
    if placement.stages_per_rank > 1:
        return _in_rounds(ScheduleInterleaved1F1B)(schedule, placement, num_microbatches)
    return Schedule1F1B if num_microbatches >= placement.num_ranks else None


def _in_rounds(kind: type[PipelineScheduleMulti]) -> Callable[[Schedule, Placement, int], Order | None]:
    """Of a class that takes microbatches in rounds, as many in each."""

    def order(schedule: Schedule, placement: Placement, num_microbatches: int) -> Order | None:
        num_rounds = max(1, num_microbatches // placement.num_ranks)
        return kind if num_microbatches % num_rounds == 0 else None

    return order


def _zbv(schedule: Schedule, placement: Placement, num_microbatches: int) -> Order | None:
    return ScheduleZBVZeroBubble


def _dual_pipe_v(schedule: Schedule, placement: Placement, num_microbatches: int) -> Order | None:
    return ScheduleDualPipeV if num_microbatches >= placement.num_stages else None


def _of_table(schedule: Schedule, placement: Placement, num_microbatches: int) -> Order | None:
    return schedule.table if num_microbatches == schedule.num_microbatches else None


def _generated(schedule: Schedule, placement: Placement, num_microbatches: int) -> Order | None:
    """The table that the simulator would run for stages of equal cost."""
    return _table(schedule.name, (_EQUAL,) * placement.num_stages, num_microbatches)


@lru_cache(maxsize=64)
def _table(name: str, costs: tuple[StageCosts, ...], num_microbatches: int) -> ActionTable | None:
    """A search may take seconds, and a batch of other shapes asks for the same table."""
    try:
        return table_of(cast(SimulatedSchedule, name), costs, num_microbatches)
    except ScheduleError:
        return None


_ORDERS: dict[str, Callable[[Schedule, Placement, int], Order | None]] = {
    "auto": _one_f_one_b,
    "1f1b": _one_f_one_b,
    "interleaved_1f1b": _in_rounds(ScheduleInterleaved1F1B),
    "interleaved_zero_bubble": _in_rounds(ScheduleInterleavedZeroBubble),
    "zbv_zero_bubble": _zbv,
    "dualpipev": _dual_pipe_v,
}
