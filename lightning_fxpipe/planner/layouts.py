"""The ways to share out devices among the stages of a pipeline and replicas of it, and what a step would take with each.

For each number of devices of a pipeline: a plan for each number of microbatches, a simulated step under each schedule, and of
those that fit the memory the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from torch import nn

from lightning_fxpipe.errors import PartitionError
from lightning_fxpipe.microbatch.split import count_samples
from lightning_fxpipe.planner.alternatives import Alternative
from lightning_fxpipe.planner.choice import possible_counts
from lightning_fxpipe.planner.cut_rule import BalanceName
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.simulated_plan import SCHEDULES, simulate_plan
from lightning_fxpipe.planner.step_plan import make_planned, make_rule
from lightning_fxpipe.reporting.messages import telling
from lightning_fxpipe.reporting.table import human_bytes, human_seconds, render_table
from lightning_fxpipe.simulation.by_name import SimulatedSchedule, schedule_named, stages_of_ranks
from lightning_fxpipe.simulation.costs import Link
from lightning_fxpipe.simulation.devices import Device
from lightning_fxpipe.simulation.simulator import Simulation

# The second where nothing fits with the first.
_BALANCES: tuple[BalanceName, ...] = ("flops", "memory")


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
    balance: BalanceName
    simulation: Simulation = field(repr=False)

    @property
    def order(self) -> tuple[bool, float]:
        """The best first: what fits, and of that what trains on the most samples in a second."""
        return not self.chosen.fits, -self.samples_per_second


@dataclass(frozen=True, kw_only=True)
class LayoutComparison:
    """What there is to choose from. ``print`` shows it as a table, and the plan.

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

    def __str__(self) -> str:
        rows = [_cells(layout) for layout in self.layouts]
        rows += [
            (str(num_ranks), str(self.num_devices // num_ranks), "-", "-", "-", "-", "-", "-", "-", reason)
            for num_ranks, reason in self.refused
        ]
        headers = (
            *("Devices", "Replicas", "Samples/s", "Step", "Average"),
            *("Schedule", "Stages", "Microbatches", "Memory", "Fits"),
        )
        table = render_table(
            f"{self.num_devices} devices: the first of these is the fastest that fits",
            headers,
            rows,
            right_aligned=headers[:-1],
            caption="Devices are a pipeline's, stages and memory a device's. A step is the model's calls alone, on "
            f"{self.num_samples} samples for each replica, with the average of the replicas' gradients.",
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
) -> LayoutComparison:
    """Simulates a step for each number of stages and replicas that devices can be shared out among.

    Args:
        module, example_batch, batch_dim: As :func:`~lightning_fxpipe.planner.step_plan.make_plan`; the batch is a replica's.
        num_devices: Devices of all replicas.
        device: What each rank runs on, with the link between those of a pipeline.
        replica_link: Between the ranks with the same stages; by default as within a pipeline, but they may lie on other
            machines.
        schedules: Schedules to compare, by name.
        num_microbatches: Of a replica's batch; by default several numbers are looked at, but for modules with BatchNorm.
        optimizer_bytes_per_byte: What the optimizer keeps for each byte of a parameter that trains; for Adam in its type 2.
        shard_optimizer_state: As for ``FxPipeStrategy``: each replica keeps its share of the optimizer state.

    Raises:
        PartitionError: The model cannot be cut into any such number of stages.
        ScheduleError: There is no such schedule.
        UnsupportedError, TraceError: As :func:`~lightning_fxpipe.planner.simulated_plan.simulate_plan`.
    """
    comparing = _Comparing(
        module,
        example_batch,
        num_devices,
        device,
        device.link if replica_link is None else replica_link,
        tuple(dict.fromkeys(map(schedule_named, schedules))),
        num_microbatches,
        optimizer_bytes_per_byte,
        shard_optimizer_state,
        batch_dim,
    )
    layouts: list[Layout] = []
    refused: list[tuple[int, str]] = []
    failure: PartitionError | None = None
    with telling("Simulating all stages and replicas"):
        for num_ranks in (count for count in range(1, num_devices + 1) if num_devices % count == 0):
            try:
                layouts.append(comparing.layout(num_ranks))
            except PartitionError as error:
                failure = failure or error
                refused.append((num_ranks, error.what.removesuffix(".")))
    if not layouts:
        assert failure is not None
        raise failure
    layouts.sort(key=lambda layout: layout.order)
    return LayoutComparison(
        num_devices=num_devices,
        num_samples=comparing.num_samples,
        layouts=tuple(layouts),
        refused=tuple(refused),
        plan=comparing.plan(layouts[0]),
        device=device,
        replica_link=comparing.replica_link,
        shares_out=comparing.shares_out,
    )


@dataclass(frozen=True)
class _Comparing:
    """What is the same for all layouts; see :func:`compare_layouts`."""

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

    @property
    def num_samples(self) -> int:
        """Of a replica's batch."""
        return count_samples(self.batch, self.num_microbatches, self.batch_dim).num_samples

    def layout(self, num_ranks: int) -> Layout:
        """The fastest with so many devices for a pipeline.

        Raises:
            PartitionError: There are not enough legal cuts for any schedule.
        """
        found: list[Layout] = []
        for balance in _BALANCES:
            for count in self._counts(num_ranks):
                found += self._simulated(num_ranks, count, balance)
            if any(layout.chosen.fits for layout in found) or num_ranks == 1:
                break
        if not found:
            raise PartitionError(
                "No schedule is made for so many devices and microbatches.",
                observed=f"{num_ranks} devices, {', '.join(map(str, self._counts(num_ranks)))} microbatches of a batch",
                todo="Take a larger batch, or other schedules.",
            )
        fitting = [layout for layout in found if layout.chosen.fits]
        return min(fitting, key=lambda one: one.order) if fitting else min(found, key=lambda one: one.chosen.peak_bytes)

    def plan(self, layout: Layout) -> PartitionPlan:
        """The plan for one of them."""
        chosen = layout.chosen
        count = chosen.num_microbatches
        rule = make_rule(
            num_stages=layout.num_ranks * chosen.stages_per_rank,
            num_devices=layout.num_ranks,
            balance=layout.balance,
            schedule=cast(SimulatedSchedule, chosen.schedule),
            num_microbatches=count,
            optimizer_bytes_per_byte=self._optimizer_bytes(layout.num_ranks),
        )
        planned = make_planned(self.module, self.batch, rule=rule, num_microbatches=count, batch_dim=self.batch_dim)
        return replace(planned.plan, alternatives=(chosen,))

    def _optimizer_bytes(self, num_ranks: int) -> float:
        """What a replica keeps for each byte of a parameter."""
        return self.optimizer_bytes_per_byte / (self._num_replicas(num_ranks) if self.shares_out else 1)

    def _num_replicas(self, num_ranks: int) -> int:
        return self.num_devices // num_ranks

    def _counts(self, num_ranks: int) -> tuple[int, ...]:
        return possible_counts(self.module, self.num_samples, num_ranks, self.num_microbatches)

    def _schedules(self, num_ranks: int) -> tuple[SimulatedSchedule, ...]:
        """Where there is one device, nothing but the activations that are kept differs: several stages on it gain nothing."""
        one_each = tuple(name for name in self.schedules if len(stages_of_ranks(name, num_ranks)[0]) == 1)
        return self.schedules if num_ranks > 1 else one_each or self.schedules

    def _simulated(self, num_ranks: int, num_microbatches: int, balance: BalanceName) -> Iterator[Layout]:
        simulated = simulate_plan(
            self.module,
            self.batch,
            num_stages=num_ranks,
            device=self.device,
            num_microbatches=num_microbatches,
            schedules=self._schedules(num_ranks),
            optimizer_bytes_per_byte=self._optimizer_bytes(num_ranks),
            batch_dim=self.batch_dim,
            balance=balance,
        )
        for schedule, simulation in simulated.simulations.items():
            yield self._layout_of(schedule, simulation, num_ranks, num_microbatches, balance)

    def _layout_of(
        self, schedule: str, simulation: Simulation, num_ranks: int, num_microbatches: int, balance: BalanceName
    ) -> Layout:
        num_replicas = self._num_replicas(num_ranks)
        seconds = simulation.seconds_of_replicas(num_replicas, self.replica_link, shares_out=self.shares_out)
        peak_bytes = max(simulation.peak_bytes)
        return Layout(
            num_ranks=num_ranks,
            num_replicas=num_replicas,
            chosen=Alternative(
                schedule=schedule,
                stages_per_rank=len(simulation.table.stages_of(0)),
                num_microbatches=num_microbatches,
                step_seconds=seconds,
                idle_share=simulation.bubble_fraction,
                peak_bytes=round(peak_bytes),
                fits=peak_bytes <= self.device.memory_bytes,
            ),
            reduce_seconds=seconds - simulation.seconds,
            samples_per_second=num_replicas * self.num_samples / seconds,
            balance=balance,
            simulation=simulation,
        )


def _cells(layout: Layout) -> tuple[str, ...]:
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
        "yes" if chosen.fits else "no",
    )
