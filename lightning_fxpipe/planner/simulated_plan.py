"""A plan, and the time of a step with it under several schedules, on a device described by a few numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from torch import nn

from lightning_fxpipe.distributed.topology import Placement
from lightning_fxpipe.errors import PartitionError, ScheduleError
from lightning_fxpipe.microbatch.split import count_samples, plan_passes
from lightning_fxpipe.planner.cut_rule import BalanceName, CutRule
from lightning_fxpipe.planner.load import Load
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.recorded_step import RecordedStep, SizedStep, check_can_simulate, not_simulated
from lightning_fxpipe.planner.stage_costs import simulate_stages
from lightning_fxpipe.planner.step_plan import make_planned, make_rule
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.reporting.table import human_bytes, human_seconds, render_table
from lightning_fxpipe.simulation.actions import ActionTable, is_table_file
from lightning_fxpipe.simulation.by_name import SimulatedSchedule, schedule_named, stages_of_ranks
from lightning_fxpipe.simulation.devices import Device
from lightning_fxpipe.simulation.simulator import Simulation

_NO_STAGES: Mapping[str, int] = MappingProxyType({})
# Schedules for any number of stages on a rank, from two on.
_ANY_NUMBER = ("looped_bfs", "interleaved_1f1b")
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
    """A plan, and what a step would take with it. ``print`` shows both as tables, the fastest schedule first.

    Attributes:
        plan: The plan.
        num_microbatches: Microbatches of a batch.
        device: The device of each rank.
        simulations: Of a step, by the schedule; by its file for a table of one's own.
        refused: Schedules that cannot run with this number of stages or microbatches or this memory, with the reason.
    """

    plan: PartitionPlan
    num_microbatches: int
    device: Device
    simulations: Mapping[str, Simulation]
    refused: Mapping[str, str]

    @property
    def fastest(self) -> str | None:
        """The schedule with the shortest step among those that fit the device's memory; None if none does."""
        return next((name for name in self.by_time() if self.fits(name)), None)

    def by_time(self) -> list[str]:
        """The schedules, the shortest step first."""
        return sorted(self.simulations, key=lambda name: self.simulations[name].seconds)

    def fits(self, name: str) -> bool:
        """True if every rank has the memory for a schedule."""
        return max(self.simulations[name].peak_bytes) <= self.device.memory_bytes

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as ``fxpipe simulate --json`` prints it."""
        return {
            "plan": asdict(self.plan),
            "num_microbatches": self.num_microbatches,
            "device": self.device.as_dict(),
            "fastest": self.fastest,
            "schedules": [
                {
                    "schedule": name,
                    "num_stages": len((found := self.simulations[name]).costs),
                    "step_seconds": found.seconds,
                    "idle_share": found.bubble_fraction,
                    "peak_bytes": round(max(found.peak_bytes)),
                    "peak_rank": _fullest_rank(found),
                    "fits": self.fits(name),
                }
                for name in self.by_time()
            ],
            "refused": dict(self.refused),
        }

    def __str__(self) -> str:
        rows = [(name, *self._cells(name)) for name in self.by_time()]
        rows += [(name, "-", "-", "-", "-", "-", reason) for name, reason in self.refused.items()]
        headers = ("Schedule", "Stages", "Step", "Idle", "Memory", "Rank", "")
        num_ranks = next((found.table.num_ranks for found in self.simulations.values()), self.plan.num_stages)
        table = render_table(
            f"Simulated step with {self.num_microbatches} microbatches on {num_ranks} x {self.device.name}",
            headers,
            rows,
            right_aligned=headers[1:6],
            caption="Times cover the model's calls only, without the rest of the step, the optimizer and Python overhead. "
            "Memory is the maximum over ranks; rank 0 holds the last stage, as in training.",
        )
        return f"{self.plan}\n\n{table}"

    def _cells(self, name: str) -> tuple[str, ...]:
        found = self.simulations[name]
        note = "fastest" if name == self.fastest else "" if self.fits(name) else "too large"
        seconds, idle = human_seconds(found.seconds), f"{100 * found.bubble_fraction:.1f} %"
        memory = human_bytes(round(max(found.peak_bytes)))
        return str(len(found.costs)), seconds, idle, memory, str(_fullest_rank(found)), note


def simulate_plan(
    module: nn.Module,
    example_batch: object,
    *,
    device: Device,
    num_stages: int | None = None,
    num_microbatches: int = 1,
    schedules: Sequence[SimulatedSchedule | str | Path] = SCHEDULES,
    optimizer_bytes_per_byte: float = 2.0,
    batch_dim: int = 0,
    balance: BalanceName = "parameters",
    split_points: Sequence[str] = (),
    stage_of: Mapping[str, int] = _NO_STAGES,
    num_devices: int | None = None,
    device_speeds: Sequence[float] = (),
    device_memory_gib: float | Sequence[float] = (),
    plan: PartitionPlan | None = None,
) -> SimulatedPlan:
    """Plans the stages of a module, and simulates a step with them.

    Args:
        module, example_batch, num_stages, num_devices, batch_dim: As :func:`~lightning_fxpipe.planner.step_plan.make_plan`.
        balance, split_points, stage_of, device_speeds, device_memory_gib: Likewise.
        device: The device of each rank, such as ``DEVICES["a100"]``; where speeds are given, of the fastest one.
        num_microbatches: Microbatches of the batch.
        schedules: Schedules to compare, by name, or as tables of actions in CSV files. For a schedule with another number of
            stages on each device than the plan, the same graph is cut again, by the balance.
        optimizer_bytes_per_byte: Bytes that the optimizer keeps for each byte of a parameter that trains; for Adam in its
            type 2.
        plan: A plan to simulate as it is, in place of a new one. Schedules with another number of stages on each device are
            refused.

    Returns:
        The plan, and a simulation under each schedule; ``print`` shows both as tables.

    Raises:
        UnsupportedError: Every rank would run the step, which is not simulated.
        TraceError: As ``make_plan``, or a part of the model does not run on tensors without data.
        ScheduleError: A table of actions cannot be read, or a name is no schedule.
        FxPipeError: What ``make_plan`` raises.
    """
    check_can_simulate(module)
    tables = _named_tables(schedules)
    if plan is not None:
        chosen = plan.chosen
        num_devices = num_devices or plan.num_stages // (chosen.stages_per_rank if chosen else 1)
        num_stages, split_points, stage_of = plan.num_stages, (), _NO_STAGES
    rule = make_rule(
        num_stages=num_stages,
        balance=balance,
        num_microbatches=num_microbatches,
        split_points=split_points,
        stage_of=stage_of,
        num_devices=num_devices,
        device_speeds=device_speeds,
        device_memory_gib=device_memory_gib,
        optimizer_bytes_per_byte=optimizer_bytes_per_byte,
    )
    if plan is None:
        made, step = _planned(module, example_batch, rule, batch_dim)
    else:
        made = plan
        step = RecordedStep(module, example_batch, rule, batch_dim=batch_dim, plan=plan).of_microbatches(num_microbatches)
    simulations: dict[str, Simulation] = {}
    refused: dict[str, str] = {}
    for schedule, table in tables.items():
        try:
            named = _with_schedule(rule, table or cast(SimulatedSchedule, schedule), may_cut=plan is None)
            assert named.load is not None
            cuts = step.cuts(named) if named.num_stages == rule.num_stages else named.cuts(step.costs)
            simulations[schedule] = simulate_stages(step.costs, cuts, device, named.load)
        except (ScheduleError, PartitionError) as error:
            refused[schedule] = f"{error.what} ({error.observed})" if table and error.observed else error.what
    return SimulatedPlan(plan=made, num_microbatches=num_microbatches, device=device, simulations=simulations, refused=refused)


def _named_tables(schedules: Sequence[str | Path]) -> dict[str, ActionTable | None]:
    """Schedules by their names, with their tables if they are files."""
    found: dict[str, ActionTable | None] = {}
    for one in schedules:
        if isinstance(one, Path) or is_table_file(one):
            found[str(one)] = ActionTable.load(one)
        else:
            found[schedule_named(one)] = None
    return found


def _with_schedule(rule: CutRule, schedule: SimulatedSchedule | ActionTable, *, may_cut: bool) -> CutRule:
    """The rule for a schedule, which may want another number of stages on each device.

    Raises:
        ScheduleError: It does, and a new cut is not allowed; or a table is for other devices.
    """
    assert rule.load is not None
    num_ranks = rule.load.num_ranks
    stages_per_rank = _stages_per_rank(schedule, rule.load)
    num_stages = num_ranks * stages_per_rank
    is_same = num_stages == rule.num_stages
    if not is_same and not may_cut:
        raise ScheduleError(
            f"The schedule needs {num_stages} stages on {num_ranks} devices, but the plan has {rule.num_stages}.",
            todo="Omit the schedule, or make a plan with that number of stages.",
        )
    load = replace(rule.load, schedule=schedule, stages_per_rank=stages_per_rank)
    return replace(rule, num_stages=num_stages, load=load, split_points=rule.split_points if is_same else ())


def _stages_per_rank(schedule: SimulatedSchedule | ActionTable, load: Load) -> int:
    if not isinstance(schedule, ActionTable):
        takes_any = schedule in _ANY_NUMBER and load.stages_per_rank > 1
        return load.stages_per_rank if takes_any else len(stages_of_ranks(schedule, load.num_ranks)[0])
    each = [len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks)]
    if len(each) != load.num_ranks or len({*each}) > 1:
        raise ScheduleError(
            "The schedule table is for a different number of ranks or stages.",
            observed="; ".join(f"{count} stages" for count in each),
            expected=f"the same number of stages on each of {load.num_ranks} ranks",
            todo="Simulate with that number of stages or with another table.",
        )
    return each[0]


def _planned(module: nn.Module, batch: object, rule: CutRule, batch_dim: int) -> tuple[PartitionPlan, SizedStep]:
    planned = make_planned(module, batch, rule=rule, num_microbatches=rule.num_microbatches, batch_dim=batch_dim)
    if planned.assignment is None or planned.region is None:
        raise not_simulated(planned.plan.joint_reason)
    num_samples = count_samples(batch, rule.num_microbatches, batch_dim).num_samples
    step = SizedStep(UnitCosts(chain=planned.assignment.chain, call=planned.region), planned.assignment.cuts)
    return planned.plan, step.of_samples(plan_passes(num_samples, rule.num_microbatches)[0].size) or step


def placement_of(simulation: Simulation) -> Placement:
    """Which rank has which stages in a simulation."""
    table = simulation.table
    each = len(table.stages_of(0))
    is_v = each > 1 and table.num_ranks > 1 and table.rank_of_stage[-1] == 0
    return Placement(num_ranks=table.num_ranks, stages_per_rank=each, is_v=is_v)


def _fullest_rank(found: Simulation) -> int:
    """The rank with the most memory, by the number that it has in training."""
    place = found.peak_bytes.index(max(found.peak_bytes))
    return placement_of(found).global_rank(place)
