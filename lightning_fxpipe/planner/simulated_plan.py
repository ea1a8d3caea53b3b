"""A plan, and what a step would take with it under several schedules, on a device that nobody needs to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import cast

from torch import nn

from lightning_fxpipe.errors import PartitionError, ScheduleError, UnsupportedError
from lightning_fxpipe.planner.cut_rule import BalanceName, CutRule
from lightning_fxpipe.planner.fastest_cut import on_device
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.planning import Planned
from lightning_fxpipe.planner.stage_costs import stage_costs
from lightning_fxpipe.planner.step_plan import make_planned, make_rule, must_run_jointly
from lightning_fxpipe.planner.unit_costs import unit_costs
from lightning_fxpipe.planner.weighing import state_weights
from lightning_fxpipe.reporting.table import human_bytes, human_seconds, render_table
from lightning_fxpipe.simulation.actions import ActionTable, is_table_file, running_ranks
from lightning_fxpipe.simulation.by_name import SimulatedSchedule, schedule_named, simulate, stages_of_ranks
from lightning_fxpipe.simulation.devices import Device
from lightning_fxpipe.simulation.simulator import Simulation

_NO_STAGES: Mapping[str, int] = MappingProxyType({})
# With one stage a rank, and with two.
SCHEDULES: tuple[SimulatedSchedule, ...] = (
    "gpipe",
    "1f1b",
    "zb_h1",
    "zb_h2",
    "zero_bubble",
    "interleaved_1f1b",
    "zbv_zero_bubble",
    "v_half",
    "v_min",
)


@dataclass(frozen=True, kw_only=True)
class SimulatedPlan:
    """A plan, and what a step would take with it. ``print`` shows both as tables.

    Attributes:
        plan: The plan, with a stage on each device.
        num_microbatches: Microbatches of a batch.
        device: What each stage runs on.
        simulations: Of a step, by the schedule; by its file for a table of one's own.
        refused: Schedules that there are not for so many stages or microbatches or so little memory, with the reason.
    """

    plan: PartitionPlan
    num_microbatches: int
    device: Device
    simulations: Mapping[str, Simulation]
    refused: Mapping[str, str]

    def __str__(self) -> str:
        rows = [(name, *_cells(found, self.device)) for name, found in self.simulations.items()]
        rows += [(name, "-", "-", "-", reason) for name, reason in self.refused.items()]
        headers = ("Schedule", "Step", "Idle", "Most memory", "On rank")
        table = render_table(
            f"A step with {self.num_microbatches} microbatches would take",
            headers,
            rows,
            right_aligned=headers[1:4],
            caption="The model's calls alone: without the rest of the step, the optimizer and what Python takes.",
        )
        return f"{self.plan}\n\n{table}"


def simulate_plan(
    module: nn.Module,
    example_batch: object,
    *,
    num_stages: int,
    device: Device,
    num_microbatches: int = 1,
    schedules: Sequence[SimulatedSchedule | str | Path] = SCHEDULES,
    optimizer_bytes_per_byte: float = 2.0,
    batch_dim: int = 0,
    balance: BalanceName = "parameters",
    split_points: Sequence[str] = (),
    stage_of: Mapping[str, int] = _NO_STAGES,
    device_speeds: Sequence[float] = (),
    device_memory_gib: float | Sequence[float] = (),
) -> SimulatedPlan:
    """Plans the stages of a module, and simulates a step with them.

    Args:
        module, example_batch, num_stages, batch_dim, balance, split_points, stage_of, device_speeds, device_memory_gib: As
            :func:`~lightning_fxpipe.planner.step_plan.make_plan`.
        device: What each rank runs on, such as ``DEVICES["a100"]``; where speeds are given, the fastest one.
        num_microbatches: Microbatches of the batch.
        schedules: Schedules to compare, by name, or as tables of actions in CSV files. Those with two stages on each of the
            ``num_stages`` devices have the same graph cut into twice as many, by the balance.
        optimizer_bytes_per_byte: What the optimizer keeps for each byte of a parameter that trains; for Adam in its type 2.

    Raises:
        UnsupportedError: Every rank runs the whole step, with each call a pipeline of its own.
        ScheduleError: There is no such schedule or file, or the file is no table.
        FxPipeError: What ``make_plan`` raises.
    """
    if reason := must_run_jointly(module):
        raise _not_simulated(reason)
    tables = _named_tables(schedules)
    rule = make_rule(
        num_stages=num_stages,
        balance=balance,
        num_microbatches=num_microbatches,
        split_points=split_points,
        stage_of=stage_of,
        device_speeds=device_speeds,
        device_memory_gib=device_memory_gib,
        optimizer_bytes_per_byte=optimizer_bytes_per_byte,
    )
    planned = make_planned(module, example_batch, rule=rule, num_microbatches=num_microbatches, batch_dim=batch_dim)
    assignment = planned.assignment
    if assignment is None:
        raise _not_simulated(planned.plan.joint_reason)
    assert planned.region is not None
    of_units = unit_costs(assignment.chain)
    states = state_weights(assignment.chain, planned.region, optimizer_bytes_per_byte)
    simulations: dict[str, Simulation] = {}
    refused: dict[str, str] = {}
    for schedule, table in tables.items():
        try:
            held = _held(schedule, table, num_stages)
            assert rule.load is not None
            named = table or cast(SimulatedSchedule, schedule)
            load = replace(rule.load, schedule=named, num_ranks=num_stages, stages_per_rank=len(held[0]))
            finer = replace(rule, num_stages=load.num_stages, split_points=(), load=load)
            cuts = assignment.cuts if len(held[0]) == 1 else _cuts(planned, finer)
            costs = stage_costs(assignment.chain, of_units, cuts, device, optimizer_bytes_per_byte=optimizer_bytes_per_byte)
            costs = [*map(on_device, costs, load.speed_shares or [1.0] * len(costs))]
            # With what several stages hold in each of them.
            costs = [replace(cost, state_bytes=bytes_) for cost, bytes_ in zip(costs, states.of_stages(cuts), strict=True)]
            simulations[schedule] = simulate(
                costs,
                num_microbatches=num_microbatches,
                schedule=table or cast(SimulatedSchedule, schedule),
                stages_per_rank=len(held[0]),
                memory_bytes=[device.memory_bytes - sum(costs[stage].state_bytes for stage in stages) for stages in held],
                link=device.link,
            )
        except (ScheduleError, PartitionError) as error:
            refused[schedule] = error.what if table is None else f"{error.what} ({error.observed})"
    return SimulatedPlan(
        plan=planned.plan,
        num_microbatches=num_microbatches,
        device=device,
        simulations=simulations,
        refused=refused,
    )


def _named_tables(schedules: Sequence[str | Path]) -> dict[str, ActionTable | None]:
    """Schedules by their names, with their tables if they are files."""
    found: dict[str, ActionTable | None] = {}
    for one in schedules:
        if isinstance(one, Path) or is_table_file(one):
            found[str(one)] = ActionTable.load(one)
        else:
            found[schedule_named(one)] = None
    return found


def _not_simulated(reason: str) -> UnsupportedError:
    return UnsupportedError(
        "A step that every rank runs cannot be simulated.",
        observed=reason,
        expected="a step whose calls of the model are one region",
        todo="Simulate the module that the step calls, with its input: simulate_plan(module.net, its_input, ...).",
    )


def _held(schedule: str, table: ActionTable | None, num_ranks: int) -> Sequence[tuple[int, ...]]:
    """The stages of each rank."""
    if table is None:
        return stages_of_ranks(cast(SimulatedSchedule, schedule), num_ranks)
    held = [table.stages_of(rank) for rank in range(table.num_ranks)]
    if len(held) != num_ranks or len({len(stages) for stages in held}) > 1:
        raise ScheduleError(
            "A table is made for other ranks.",
            where=schedule,
            observed="; ".join(f"{len(stages)} stages" for stages in held),
            expected=f"as many stages on each of {num_ranks} ranks",
            todo="Simulate with that number of stages, or with another table.",
        )
    return held


def _cuts(planned: Planned, rule: CutRule) -> tuple[int, ...]:
    """The cuts of the same graph by another rule."""
    assert planned.assignment is not None
    assert planned.region is not None
    chain = planned.assignment.chain
    return rule.cuts(chain, planned.region)


def _cells(found: Simulation, device: Device) -> tuple[str, str, str, str]:
    peak = max(found.peak_bytes)
    table = found.table
    rank = str(running_ranks(table.num_ranks, table.rank_of_stage[-1])[found.peak_bytes.index(peak)])
    fits = "" if peak <= device.memory_bytes else ": more than there is"
    return human_seconds(found.seconds), f"{100 * found.bubble_fraction:.1f} %", human_bytes(round(peak)), rank + fits
