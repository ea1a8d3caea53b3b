"""The entry: what a schedule takes, by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, cast, get_args

from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.reporting.names import canonical_name, suggestion
from lightning_fxpipe.simulation.actions import ActionTable
from lightning_fxpipe.simulation.costs import Link, Overhead, StageCosts
from lightning_fxpipe.simulation.fitted import fitted
from lightning_fxpipe.simulation.orders import (
    gpipe,
    hand_made_zero_bubble,
    interleaved,
    looped_breadth_first,
    one_forward_one_backward,
)
from lightning_fxpipe.simulation.simulator import Simulation, run_table
from lightning_fxpipe.simulation.v_orders import dual_pipe_v, zbv
from lightning_fxpipe.simulation.v_shape import v_half, v_min
from lightning_fxpipe.simulation.zero_bubble import zero_bubble
from lightning_fxpipe.simulation.zero_bubble_v import zero_bubble_v

SimulatedSchedule = Literal[
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
_LOOPED = ("looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble")
_V_SHAPED = ("zbv_zero_bubble", "dualpipev", "zero_bubble_v", "v_half", "v_min")
# Made to fit the costs of stages.
FITTED = ("zero_bubble", "zero_bubble_v")
_NO_LINK, _NO_OVERHEAD = Link(), Overhead()


def schedule_named(text: str) -> SimulatedSchedule:
    """Returns the schedule that a text names, such as ``"1f1b"``, or as torch spells it: ``"1F1B"``, ``"ZBVZeroBubble"``.

    Raises:
        ScheduleError: There is no such schedule.
    """
    names = get_args(SimulatedSchedule)
    name = canonical_name(text, names)
    if name is None:
        raise ScheduleError(
            "The schedule does not exist.",
            observed=repr(text),
            expected=f"one of {', '.join(names)}{suggestion(text, names)}",
            todo="Use one of these names. FxPipeStrategy and `fxpipe simulate` also accept a CSV file with a schedule table.",
        )
    return cast(SimulatedSchedule, name)


def simulate(
    costs: Sequence[StageCosts],
    *,
    num_microbatches: int,
    schedule: SimulatedSchedule | str | ActionTable = "1f1b",
    stages_per_rank: int = 1,
    memory_bytes: Sequence[float] | None = None,
    link: Link = _NO_LINK,
    overhead: Overhead = _NO_OVERHEAD,
) -> Simulation:
    """When each action of a step begins and ends, and so what the step takes.

    Args:
        costs: Of each stage, for one microbatch.
        num_microbatches: How many a batch is cut into.
        schedule: A name (:func:`schedule_named`), or a table of one's own (``ActionTable.from_csv``). "zero_bubble" and
            "zero_bubble_v" are made to fit the costs and the memory. For "zbv_zero_bubble", "dualpipev", "zero_bubble_v",
            "v_half" and "v_min" a rank has two stages, the first and the last of those that are left.
        stages_per_rank: For "looped_bfs", "interleaved_1f1b" and "interleaved_zero_bubble": of P ranks, the one at place r has
            the stages r, r + P, r + 2 P and so on.
        memory_bytes: For each rank, what its activations may take, for schedules that are made to fit.
        link: What it takes to send something to another rank.
        overhead: What is not computed, and takes time all the same.

    Raises:
        ScheduleError: There is no such schedule for so many stages or microbatches, or not in that memory.
    """
    if isinstance(schedule, ActionTable):
        table = schedule
    else:
        table = table_of(schedule_named(schedule), costs, num_microbatches, stages_per_rank, memory_bytes, link)
    if table.num_microbatches != num_microbatches:
        raise ScheduleError(
            "The schedule table is for a different number of microbatches.",
            observed=str(table.num_microbatches),
            expected=str(num_microbatches),
            todo="Use that number of microbatches, or another table.",
        )
    return run_table(table, costs, link=link, overhead=overhead)


def is_v_shaped(schedule: SimulatedSchedule) -> bool:
    """Returns True if a schedule's stages come back through the ranks in a V."""
    return schedule in _V_SHAPED


def on_stages(schedule: SimulatedSchedule, stages_per_rank: int) -> SimulatedSchedule:
    """Returns the schedule of a name for this number of stages on each rank: the runtime takes several with names for one,
    too.
    """
    several: dict[SimulatedSchedule, SimulatedSchedule] = {"gpipe": "looped_bfs", "1f1b": "interleaved_1f1b"}
    return several.get(schedule, schedule) if stages_per_rank > 1 else schedule


def stages_of_ranks(schedule: SimulatedSchedule, num_ranks: int) -> list[tuple[int, ...]]:
    """Returns the default number of stages of each rank with a schedule."""
    if schedule in _V_SHAPED:
        return [(rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)]
    return [(rank, rank + num_ranks) if schedule in _LOOPED else (rank,) for rank in range(num_ranks)]


def table_of(
    schedule: SimulatedSchedule,
    costs: Sequence[StageCosts],
    num_microbatches: int,
    stages_per_rank: int = 1,
    memory_bytes: Sequence[float] | None = None,
    link: Link = _NO_LINK,
) -> ActionTable:
    """The table of a schedule. Arguments and errors as :func:`simulate`."""
    if num_microbatches < 1:
        raise ScheduleError(
            "A step cannot be simulated without microbatches.",
            observed=str(num_microbatches),
            expected="at least 1",
            todo="Use at least one microbatch.",
        )
    per_rank = stages_per_rank if schedule in _LOOPED else len(stages_of_ranks(schedule, 1)[0])
    is_other = stages_per_rank not in (1, per_rank) and schedule not in _LOOPED
    if is_other or per_rank < 1 or not costs or len(costs) % per_rank:
        raise ScheduleError(
            "The number of stages does not fit the schedule.",
            observed=f"{schedule} for {len(costs)} stages, {stages_per_rank} on each rank",
            expected=f"the same number on each rank; several only with {' or '.join(_LOOPED)}"
            + (", and exactly two with this schedule" if schedule in _V_SHAPED else ""),
            todo="Pass the costs of all stages of all ranks.",
        )
    num_ranks = len(costs) // per_rank
    if schedule in FITTED:
        make = zero_bubble if schedule == "zero_bubble" else zero_bubble_v
        return fitted(make, costs, num_microbatches, memory_bytes, link)
    if schedule in _LOOPED:
        return _BY_COUNTS[schedule](num_ranks, num_microbatches, stages_per_rank=per_rank)
    return _BY_COUNTS[schedule](num_ranks, num_microbatches)


_BY_COUNTS: dict[str, Callable[..., ActionTable]] = {
    "looped_bfs": looped_breadth_first,
    "interleaved_1f1b": interleaved,
    "interleaved_zero_bubble": partial(interleaved, delays_weights=True),
    "zbv_zero_bubble": zbv,
    "dualpipev": dual_pipe_v,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "zb_h1": partial(hand_made_zero_bubble, times_memory=1),
    "zb_h2": partial(hand_made_zero_bubble, times_memory=2),
    "v_half": v_half,
    "v_min": v_min,
}
