"""A schedule of the user's own: a table of actions, as an object or in a CSV file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lightning_fxpipe.distributed.topology import Placement
from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.reporting.names import canonical_name, suggestion
from lightning_fxpipe.schedules.by_name import SCHEDULES, Schedule
from lightning_fxpipe.simulation.actions import ActionTable, is_table_file
from lightning_fxpipe.simulation.costs import StageCosts
from lightning_fxpipe.simulation.simulator import run_table


def schedule_of(value: object) -> Schedule | None:
    """The schedule that an option's value means: a name, the path of a CSV file, or a table; None where it means none.

    Raises:
        ScheduleError: The file cannot be read, or the table cannot be run.
    """
    name = canonical_name(value, SCHEDULES) if isinstance(value, str) else None
    if name is not None:
        return SCHEDULES[name]
    if isinstance(value, ActionTable):
        return schedule_of_table(value, "ActionTable")
    if isinstance(value, (str, Path)) and is_table_file(value):
        return schedule_of_table(ActionTable.load(value), str(value))
    return None


def expected_schedule(value: object) -> str:
    """Returns what is expected in place of a wrong value."""
    nearest = suggestion(value, SCHEDULES) if isinstance(value, str) else ""
    return f"expected one of {', '.join(map(repr, SCHEDULES))}, or the path of a schedule table (CSV){nearest}"


def wanted_schedule(value: object, num_microbatches: object) -> Schedule:
    """The schedule that the user wants.

    Args:
        value: The option.
        num_microbatches: As the user says.

    Raises:
        ValueError: It is none.
        ScheduleError: It is a table that cannot be run, or not with so many microbatches.
    """
    schedule = schedule_of(value)
    if schedule is None:
        raise ValueError(f"FxPipeStrategy(schedule={value!r}): {expected_schedule(value)}")
    if num_microbatches not in ("auto", schedule.num_microbatches or num_microbatches):
        raise ScheduleError(
            "num_microbatches differs from the number of microbatches in the schedule table.",
            where=schedule.name,
            observed=f"FxPipeStrategy(num_microbatches={num_microbatches!r}) and a table for {schedule.num_microbatches}",
            todo="Omit num_microbatches, or use a table for that number.",
        )
    return schedule


def schedule_of_table(table: ActionTable, name: str) -> Schedule:
    """The schedule that runs a table.

    The lines of a table may be in any order: which rank a line is of follows from its stages. Microbatches go forward and
    backward by turns, in the very order of the table, even where it has all go forward first.

    Args:
        table: The table.
        name: What it is called.

    Raises:
        ScheduleError: Its stages lie as no pipeline's do, or its ranks wait for each other for ever.
    """
    ordered = ActionTable.of(sorted(table.ranks, key=lambda actions: min((action.stage for action in actions), default=-1)))
    placement = _placement(ordered)
    if placement is None:
        raise _not_placed(table, name)
    some = StageCosts(forward_seconds=1.0, input_backward_seconds=1.0, weight_backward_seconds=1.0)
    try:
        run_table(table, [some] * table.num_stages)
    except ScheduleError as error:
        raise ScheduleError(error.what, where=name, observed=error.observed, expected=error.expected, todo=error.todo) from None
    return Schedule(
        name=name,
        stages_per_rank=placement.stages_per_rank,
        is_fixed=True,
        is_v=placement.is_v,
        splits=ordered.is_split,
        table=ordered,
    )


def _placement(table: ActionTable) -> Placement | None:
    """Finds the placement of a table's stages; None if a pipeline has no such placement."""
    held = [table.stages_of(rank) for rank in range(table.num_ranks)]
    return next((one for one in _placements(table) if [one.stages_of(rank) for rank in range(one.num_ranks)] == held), None)


def _placements(table: ActionTable) -> Iterator[Placement]:
    """Yields the placements for these numbers of stages and ranks."""
    each, rest = divmod(table.num_stages, table.num_ranks)
    if rest == 0:
        yield Placement(num_ranks=table.num_ranks, stages_per_rank=each)
        if each == 2:
            yield Placement(num_ranks=table.num_ranks, stages_per_rank=2, is_v=True)


def _not_placed(table: ActionTable, name: str) -> ScheduleError:
    held = (f"{', '.join(map(str, table.stages_of(rank))) or 'none'}" for rank in range(table.num_ranks))
    ways = " or ".join(
        f"{'V-shaped' if one.is_v else 'looped'}: {'; '.join(str(one.stages_of(rank)) for rank in range(one.num_ranks))}"
        for one in _placements(table)
    )
    return ScheduleError(
        "Unsupported placement of stages in the schedule table.",
        where=name,
        observed="; ".join(f"line {number}: stages {stages}" for number, stages in enumerate(held, start=1)),
        expected="the same number of stages in each line, in a looped or V-shaped placement" + (f" ({ways})" if ways else ""),
        todo="Renumber the stages of the table accordingly.",
    )
