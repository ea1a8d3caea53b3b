"""The ways to share out devices among the stages of a pipeline and replicas of it, and what a step would take with each.

For each number of devices of a pipeline: a plan for each number of microbatches, a simulated step under each schedule, and of
those that fit the memory the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

from lightning_fxpipe.errors import PartitionError, ScheduleError
from lightning_fxpipe.planner.alternatives import Alternative
from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.choice import Combination, combinations, possible_counts
from lightning_fxpipe.planner.cut_rule import CutRule
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.planning import opened_by_a_cut
from lightning_fxpipe.planner.recorded_step import RecordedStep
from lightning_fxpipe.planner.simulated_plan import SCHEDULES
from lightning_fxpipe.planner.stage_costs import simulate_stages
from lightning_fxpipe.planner.step_plan import check_rule, make_planned, make_rule
from lightning_fxpipe.reporting.messages import inform, telling, went_on
from lightning_fxpipe.reporting.table import human_bytes, human_seconds, render_table
from lightning_fxpipe.simulation.by_name import SimulatedSchedule, schedule_named
from lightning_fxpipe.simulation.costs import Link
from lightning_fxpipe.simulation.devices import Device
from lightning_fxpipe.simulation.simulator import Simulation

# Those that need no clock: the devices are not here.
LayoutBalanceName = Literal["parameters", "flops", "memory"]
# The second where nothing fits with the first.
_BALANCES: tuple[LayoutBalanceName, ...] = ("flops", "memory")
_NO_STAGES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Replicas of a pipeline.

    Attributes:
        num_ranks: Devices of a pipeline.
        num_replicas: Pipelines.
        chosen: The schedule and the microbatches that a step is fastest with, and what it takes, with the
            average of the gradients.
        reduce_seconds: Of that time, how much longer it takes than with one pipeline.
        samples_per_second: Of all replicas.
        balance: What the stages have equal shares of.
        simulation: Of a step of one of the pipelines, without the average.
    """

    num_ranks: int
    num_replicas: int
    chosen: Alternative
    reduce_seconds: float
    samples_per_second: float
    balance: LayoutBalanceName
    simulation: Simulation = field(repr=False)

    @property
    def order(self) -> tuple[bool, float]:
        """The best first: what fits, and of that what trains on the most samples in a second."""
        return not self.chosen.fits, -self.samples_per_second

    @property
    def words(self) -> str:
        """One line for a log."""
        chosen = self.chosen
        return (
            f"{self.num_ranks} x {self.num_replicas} (devices x replicas): {self.samples_per_second:,.1f} samples/s, "
            f"{human_seconds(chosen.step_seconds)} per step ({chosen.schedule}, microbatches: {chosen.num_microbatches})"
        )


@dataclass(frozen=True, kw_only=True)
class LayoutComparison:
    """Layouts to choose from. ``print`` shows them as a table, and the plan.

    Attributes:
        num_devices: Devices.
        num_samples: Of a replica's batch.
        layouts: The best first.
        refused: Numbers of devices of a pipeline for which there is no plan, with the reason.
        plan: For the best of them; ``FxPipeStrategy(plan=...)`` on so many devices makes the replicas, and takes its schedule
            and its number of microbatches.
        device: What each rank runs on.
        replica_link: Between the ranks with the same stages.
        shares_out: Whether replicas share out the optimizer.
    """

    num_devices: int
    num_samples: int
    layouts: tuple[Layout, ...]
    refused: tuple[tuple[int, str], ...]
    plan: PartitionPlan
    device: Device
    replica_link: Link
    shares_out: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as ``fxpipe layouts --json`` prints it."""
        rows = [
            {
                "num_ranks": layout.num_ranks,
                "num_replicas": layout.num_replicas,
                "samples_per_second": layout.samples_per_second,
                "reduce_seconds": layout.reduce_seconds,
                "balance": layout.balance,
                **asdict(layout.chosen),
            }
            for layout in self.layouts
        ]
        return {
            "num_devices": self.num_devices,
            "num_samples": self.num_samples,
            "device": self.device.as_dict(),
            "layouts": rows,
            "refused": [{"num_ranks": num_ranks, "reason": reason} for num_ranks, reason in self.refused],
            "plan": asdict(self.plan),
        }

    def __str__(self) -> str:
        rows = [_cells(layout, is_fastest=layout is self.layouts[0]) for layout in self.layouts]
        rows += [(str(num_ranks), str(self.num_devices // num_ranks), *"-" * 7, reason) for num_ranks, reason in self.refused]
        headers = (
            *("Devices", "Replicas", "Samples/s", "Step", "Average"),
            *("Schedule", "Stages", "Microbatches", "Memory", ""),
        )
        table = render_table(
            f"{self.num_devices} x {self.device.name}, simulated",
            headers,
            rows,
            right_aligned=("Devices", "Replicas", "Samples/s", "Step", "Average", "Stages", "Microbatches", "Memory"),
            caption="Devices are per pipeline; stages and memory are per device. A step covers the model's calls on "
            f"{self.num_samples} samples per replica and the gradient average over replicas.",
        )
        return f"{replace(self.plan, alternatives=())}\n\n{table}"


def compare_layouts(
    module: nn.Module,
    example_batch: object,
    *,
    num_devices: int,
    device: Device,
    replica_link: Link | None = None,
    schedules: Sequence[SimulatedSchedule | str] = SCHEDULES,
    num_microbatches: int | None = None,
    optimizer_bytes_per_byte: float = 2.0,
    shard_optimizer_state: bool = False,
    batch_dim: int = 0,
    balance: LayoutBalanceName | None = None,
    split_points: Sequence[str] = (),
    stage_of: Mapping[str, int] = _NO_STAGES,
    device_speeds: Sequence[float] = (),
    device_memory_gib: float | Sequence[float] = (),
    plan: PartitionPlan | None = None,
) -> LayoutComparison:
    """Simulates a step for each number of stages and replicas that devices can be shared out among.

    The module's step is traced once for all of them, and each result is logged as soon as it is there.

    Args:
        module, example_batch, batch_dim: As :func:`~lightning_fxpipe.planner.step_plan.make_plan`; the batch is a replica's.
        num_devices: Devices of all replicas.
        device: The device of each rank, with the link between those of a pipeline.
        replica_link: Between the ranks with the same stages; by default as within a pipeline, but they may lie on other
            machines.
        schedules: Those to compare.
        num_microbatches: Of a replica's batch; by default several numbers are compared, but for modules with BatchNorm.
        optimizer_bytes_per_byte: Bytes that the optimizer keeps for each byte of a parameter that trains; for Adam in its
            type 2.
        shard_optimizer_state: As for ``FxPipeStrategy``: each replica keeps its share of the optimizer state.
        balance: As of ``make_plan``; by default flops, and memory where nothing fits otherwise.
        split_points, stage_of, device_speeds, device_memory_gib: As of ``make_plan``. Split points allow layouts with their
            number of stages only.
        plan: A plan whose cuts are used as they are, so that layouts have its number of stages.

    Raises:
        PartitionError: The model cannot be cut into any such number of stages.
        ScheduleError: There is no such schedule.
        UnsupportedError, TraceError: As :func:`~lightning_fxpipe.planner.simulated_plan.simulate_plan`.
    """
    points = () if plan is not None else tuple(split_points)
    comparing = _Comparing(
        module=module,
        batch=example_batch,
        num_devices=num_devices,
        device=device,
        replica_link=device.link if replica_link is None else replica_link,
        schedules=tuple(dict.fromkeys(map(schedule_named, schedules))),
        num_microbatches=num_microbatches,
        optimizer_bytes_per_byte=optimizer_bytes_per_byte,
        shares_out=shard_optimizer_state,
        batch_dim=batch_dim,
        balances=_BALANCES if balance is None else (balance,),
        make_rule=partial(
            make_rule,
            split_points=points,
            stage_of={} if plan is not None else stage_of,
            device_speeds=device_speeds,
            device_memory_gib=device_memory_gib,
        ),
        plan=plan,
        num_stages=plan.num_stages if plan is not None else len(points) + 1 if points else None,
    )
    layouts, refused = comparing.layouts()
    return LayoutComparison(
        num_devices=num_devices,
        num_samples=comparing.step.num_samples,
        layouts=tuple(layouts),
        refused=tuple(refused),
        plan=comparing.plan_for(layouts[0]),
        device=device,
        replica_link=comparing.replica_link,
        shares_out=shard_optimizer_state,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Comparing:
    """Simulates the layouts of a module; see :func:`compare_layouts`.

    Attributes:
        balances: Those to try, one after the other, until something fits.
        make_rule: Makes the rule for a layout, from what differs between layouts.
        num_stages: Of all layouts; None for any.
    """

    module: nn.Module
    batch: object
    num_devices: int
    device: Device
    replica_link: Link
    schedules: tuple[SimulatedSchedule, ...]
    num_microbatches: int | None
    optimizer_bytes_per_byte: float
    shares_out: bool
    batch_dim: int
    balances: tuple[LayoutBalanceName, ...]
    make_rule: Callable[..., CutRule]
    plan: PartitionPlan | None
    num_stages: int | None

    @cached_property
    def step(self) -> RecordedStep:
        """The step, which is opened for the most stages of all layouts."""
        rules = [
            self._rule(num_ranks, each, self.balances[0])
            for num_ranks in self._ranks
            for each in self._combinations(num_ranks, (1,))
        ]
        if not rules:
            raise PartitionError(
                "No parallel layout has the requested number of stages.",
                observed=f"{self.num_stages} stages and {self.num_devices} devices",
                expected="a number of devices over which the stages can be distributed, and a schedule for it",
                todo="Change num_devices or the schedules.",
            )
        rule = max(rules, key=lambda rule: rule.num_stages)
        return RecordedStep(self.module, self.batch, rule, batch_dim=self.batch_dim, plan=self.plan)

    def layouts(self) -> tuple[list[Layout], list[tuple[int, str]]]:
        """The fastest for each number of devices of a pipeline, the best first; and those that there are not."""
        found: list[Layout] = []
        refused: list[tuple[int, str]] = []
        failure: PartitionError | None = None
        _ = self.step  # whose errors are of all layouts
        num_steps = sum(len(self._combinations(num_ranks)) for num_ranks in self._ranks)
        with telling("Simulating all combinations of stages and replicas", total=num_steps):
            for index, num_ranks in enumerate(self._ranks, 1):
                try:
                    found.append(self._layout(num_ranks))
                    inform(f"{index} of {len(self._ranks)}: {found[-1].words}")
                except PartitionError as error:
                    failure = failure or error
                    refused.append((num_ranks, error.what.removesuffix(".")))
        if not found:
            assert failure is not None
            raise failure
        return sorted(found, key=lambda layout: layout.order), refused

    def _layout(self, num_ranks: int) -> Layout:
        found = list[Layout]()
        failure: PartitionError | None = None
        for balance in self.balances:
            for combination in self._combinations(num_ranks):
                try:
                    found.append(self._simulated(num_ranks, combination, balance))
                except (ScheduleError, PartitionError) as error:
                    failure = error if isinstance(error, PartitionError) and failure is None else failure
                went_on()
            if any(layout.chosen.fits for layout in found) or num_ranks == 1:
                break
        if not found:
            raise failure or PartitionError(
                "No schedule supports this number of devices and microbatches.",
                observed=f"{num_ranks} devices, {', '.join(map(str, self._counts(num_ranks)))} microbatches per batch",
                todo="Use a larger batch or other schedules.",
            )
        fitting = [layout for layout in found if layout.chosen.fits]
        return min(fitting, key=lambda one: one.order) if fitting else min(found, key=lambda one: one.chosen.peak_bytes)

    def _simulated(self, num_ranks: int, combination: Combination, balance: LayoutBalanceName) -> Layout:
        num_replicas = self.num_devices // num_ranks
        rule = self._rule(num_ranks, combination, balance)
        check_rule(rule, self.module)
        assert rule.load is not None
        step = self.step.of_microbatches(combination.num_microbatches)
        simulation = simulate_stages(step.costs, step.cuts(rule), self.device, rule.load)
        seconds = simulation.seconds_of_replicas(num_replicas, self.replica_link, shares_out=self.shares_out)
        fits = max(simulation.peak_bytes) <= self.device.memory_bytes
        return Layout(
            num_ranks=num_ranks,
            num_replicas=num_replicas,
            chosen=Alternative.of(combination.schedule, simulation, fits=fits, step_seconds=seconds),
            reduce_seconds=seconds - simulation.seconds,
            samples_per_second=num_replicas * self.step.num_samples / seconds,
            balance=balance,
            simulation=simulation,
        )

    def plan_for(self, layout: Layout) -> PartitionPlan:
        """Returns the plan for a layout."""
        chosen, count = layout.chosen, layout.chosen.num_microbatches
        if self.plan is not None:
            return replace(self.plan, alternatives=(chosen,))
        rule = self._rule(layout.num_ranks, chosen, layout.balance)
        step = self.step.of_microbatches(count)
        opened = opened_by_a_cut(Assignment(chain=step.costs.chain, cuts=step.cuts(rule)))
        rule = replace(rule, opened=frozenset(opened))
        planned = make_planned(self.module, self.batch, rule=rule, num_microbatches=count, batch_dim=self.batch_dim)
        return replace(planned.plan, alternatives=(chosen,))

    # ------------------------------------------------------------------ what there is to compare

    @property
    def _ranks(self) -> list[int]:
        return [count for count in range(1, self.num_devices + 1) if self.num_devices % count == 0]

    def _counts(self, num_ranks: int) -> tuple[int, ...]:
        return possible_counts(self.module, self.step.num_samples, num_ranks, self.num_microbatches)

    def _combinations(self, num_ranks: int, counts: Sequence[int] | None = None) -> list[Combination]:
        """All of a number of devices. On one device several stages only change the memory."""
        found = combinations(self.schedules, self._counts(num_ranks) if counts is None else counts, None, num_ranks)
        if self.num_stages is not None:
            return [each for each in found if each.stages_per_rank * num_ranks == self.num_stages]
        one_each = [each for each in found if each.stages_per_rank == 1]
        return one_each if num_ranks == 1 and one_each else [*found]

    def _rule(self, num_ranks: int, chosen: Combination | Alternative, balance: LayoutBalanceName) -> CutRule:
        return self.make_rule(
            num_stages=num_ranks * chosen.stages_per_rank,
            num_devices=num_ranks,
            balance=balance,
            schedule=chosen.schedule,
            num_microbatches=chosen.num_microbatches,
            optimizer_bytes_per_byte=self.optimizer_bytes_per_byte / (self.num_devices // num_ranks if self.shares_out else 1),
        )


def _cells(layout: Layout, *, is_fastest: bool) -> tuple[str, ...]:
    chosen = layout.chosen
    return (
        str(layout.num_ranks),
        str(layout.num_replicas),
        f"{layout.samples_per_second:,.1f}",
        human_seconds(chosen.step_seconds),
        human_seconds(layout.reduce_seconds),
        chosen.schedule,
        str(chosen.stages_per_rank),
        str(chosen.num_microbatches),
        human_bytes(chosen.peak_bytes),
        "too large" if not chosen.fits else "fastest" if is_fastest else "",
    )
