"""Measured costs of a stage's actions, and the schedule simulated with them: the step's time without anything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.simulation.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action, ActionTable, Kind
from lightning_fxpipe.simulation.costs import StageCosts
from lightning_fxpipe.simulation.simulator import run_table
from lightning_fxpipe.simulation.timeline import Timeline


def table_of(timeline: Timeline) -> ActionTable | None:
    """The table that ran; None where it was not one pass of a batch forward and back, as in manual optimization."""
    try:
        return ActionTable.of([s.work for s in spans if isinstance(s.work, Action)] for spans in timeline.ranks)
    except ScheduleError:
        return None


def costs_of(timelines: Sequence[Timeline]) -> list[StageCosts]:
    """Returns for each stage the medians of the measured seconds of its actions."""
    found: dict[int, dict[Kind, list[float]]] = defaultdict(lambda: defaultdict(list))
    for timeline in timelines:
        for spans in timeline.ranks:
            for span in spans:
                if isinstance(span.work, Action):
                    found[span.work.stage][span.work.kind].append(span.seconds)
    return [_costs({kind: median(seconds) for kind, seconds in found[stage].items()}) for stage in sorted(found)]


def _costs(seconds: Mapping[Kind, float]) -> StageCosts:
    return StageCosts(
        forward_seconds=seconds[FORWARD],
        input_backward_seconds=seconds[INPUT_BACKWARD] if INPUT_BACKWARD in seconds else seconds[BACKWARD],
        weight_backward_seconds=seconds.get(WEIGHT_BACKWARD, 0.0),
    )


def simulated(measured: Sequence[Timeline]) -> Timeline | None:
    """The last of the measured steps as it would be if transfers took no time, and each action the median of its like.

    Those of the steps count that ran the same table. None where that is no table of a schedule.
    """
    tables = [table_of(timeline) for timeline in measured]
    table = tables[-1] if tables else None
    if table is None or not table.actions:
        return None
    same = [timeline for timeline, its in zip(measured, tables, strict=True) if its == table]
    timeline = Timeline.of_simulation("simulated", run_table(table, costs_of(same)))
    return Timeline(timeline.label, timeline.ranks)  # the bytes that an action keeps are not measured
