"""A training step recorded once, and simulated with any cuts, schedule and size of microbatches.

1. The step is traced for one microbatch and opened far enough for the most stages that are wanted.
2. For microbatches of another size the same graph is read with other sizes (``Chain.of_samples``). Only a graph that was
   specialised to its size, as by ``if len(x) > 8``, is traced again.
3. What units cost is computed once for each size, and shared by all cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from lightning_fxpipe.errors import FxPipeError, PartitionError, ScheduleError, TraceError, UnsupportedError
from lightning_fxpipe.microbatch.split import count_samples, first_microbatch, plan_passes
from lightning_fxpipe.planner.cut_rule import CutRule
from lightning_fxpipe.planner.follow_plan import follow_plan, trace_for_plan
from lightning_fxpipe.planner.load import Load
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.planning import open_regions
from lightning_fxpipe.planner.stage_costs import stage_costs
from lightning_fxpipe.planner.step_plan import must_run_jointly
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.reporting.messages import telling
from lightning_fxpipe.simulation.actions import ActionTable
from lightning_fxpipe.simulation.by_name import SimulatedSchedule, simulate, stages_of_ranks
from lightning_fxpipe.simulation.devices import Device
from lightning_fxpipe.simulation.simulator import Simulation
from lightning_fxpipe.tracing.discovery import regions
from lightning_fxpipe.tracing.region import StepCall

# Schedules for any number of stages on a rank, from two on.
_ANY_NUMBER = ("looped_bfs", "interleaved_1f1b")


@dataclass(frozen=True, eq=False)
class SizedStep:
    """A recorded step for microbatches of one size.

    Attributes:
        costs: The table of its chain.
        cuts: Those of a plan; None if a rule decides.
    """

    costs: UnitCosts
    cuts: tuple[int, ...] | None = None

    def simulate(
        self, rule: CutRule, device: Device, schedule: SimulatedSchedule | ActionTable, *, may_cut: bool = True
    ) -> tuple[Simulation, tuple[int, ...]]:
        """Simulates a step; returns the cuts as well.

        Args:
            rule: Decides the cuts, unless there are some for its number of stages; its load describes the devices and the
                microbatches.
            device: The device of each rank.
            schedule: A name, or a table of actions.
            may_cut: False if a schedule for another number of stages is refused.

        Raises:
            PartitionError: The rule finds no cuts.
            ScheduleError: There is no such schedule for these stages.
        """
        assert rule.load is not None
        ranks = _stages_of_ranks(schedule, rule.load)
        load = replace(rule.load, schedule=schedule, stages_per_rank=len(ranks[0]))
        cuts = self.cuts
        if cuts is None or load.num_stages != len(cuts) + 1:
            if not may_cut:
                raise ScheduleError(
                    f"The schedule needs {load.num_stages} stages on {load.num_ranks} devices, but the plan has "
                    f"{rule.num_stages}.",
                    todo="Omit the schedule, or make a plan with that number of stages.",
                )
            is_same = load.num_stages == rule.num_stages
            rule = replace(rule, num_stages=load.num_stages, load=load, split_points=rule.split_points if is_same else ())
            cuts = rule.cuts(self.costs)
        kept = load.optimizer_bytes_per_byte
        costs = stage_costs(self.costs, cuts, device, optimizer_bytes_per_byte=kept, speeds=load.speed_shares)
        simulation = simulate(
            costs,
            num_microbatches=load.num_microbatches,
            schedule=schedule,
            stages_per_rank=len(ranks[0]),
            memory_bytes=[device.memory_bytes - sum(costs[stage].state_bytes for stage in stages) for stages in ranks],
            link=device.link,
        )
        return simulation, cuts


def _stages_of_ranks(schedule: SimulatedSchedule | ActionTable, load: Load) -> Sequence[tuple[int, ...]]:
    num_ranks = load.num_ranks
    if not isinstance(schedule, ActionTable):
        if schedule in _ANY_NUMBER and load.stages_per_rank > 1:
            return [tuple(range(rank, load.num_stages, num_ranks)) for rank in range(num_ranks)]
        return stages_of_ranks(schedule, num_ranks)
    ranks = [schedule.stages_of(rank) for rank in range(schedule.num_ranks)]
    if len(ranks) != num_ranks or len({len(stages) for stages in ranks}) > 1:
        raise ScheduleError(
            "The schedule table is for a different number of ranks or stages.",
            observed="; ".join(f"{len(stages)} stages" for stages in ranks),
            expected=f"the same number of stages on each of {num_ranks} ranks",
            todo="Simulate with that number of stages or with another table.",
        )
    return ranks


class RecordedStep:
    """A module's training step for microbatches of any size.

    Args:
        module, batch, batch_dim: As those of ``make_plan``.
        rule: How far the step is opened: for its number of stages.
        plan: A plan whose cuts are used; None if rules decide.
    """

    def __init__(
        self, module: nn.Module, batch: object, rule: CutRule, *, batch_dim: int = 0, plan: PartitionPlan | None = None
    ) -> None:
        if reason := must_run_jointly(module):
            raise not_simulated(reason)
        if plan is not None:
            if plan.joint_reason:
                raise not_simulated(plan.joint_reason)
            plan.check_fits({fqn: tuple(parameter.shape) for fqn, parameter in module.named_parameters()})
        self._module, self._batch, self._rule, self._batch_dim, self._plan = module, batch, rule, batch_dim, plan
        self._traced: list[SizedStep] = []
        self._by_size: dict[int, SizedStep] = {}
        self.num_samples = count_samples(batch, None, batch_dim).num_samples

    def of_microbatches(self, count: int) -> SizedStep:
        """The step for the size that microbatches have if a batch is split into ``count``. Errors as ``make_plan``."""
        size = plan_passes(self.num_samples, count)[0].size
        if size not in self._by_size:
            sized = next(filter(None, (self._resized(step, size) for step in self._traced)), None)
            if sized is None:
                with telling("Tracing the training step"):
                    traced = self._trace(count)
                self._traced.append(traced)
                sized = self._resized(traced, size) or traced
            self._by_size[size] = sized
        return self._by_size[size]

    def _resized(self, step: SizedStep, size: int) -> SizedStep | None:
        costs = step.costs.of_samples(size)
        return None if costs is None else SizedStep(costs, step.cuts)

    def _trace(self, count: int) -> SizedStep:
        batch, size = first_microbatch(self._batch, count, self._rule.num_stages, self._batch_dim)
        step = StepCall.of_training(self._module, batch)
        calls = regions(self._module, step, batch_size=size, batch_dim=self._batch_dim)
        if self._plan is None:
            return SizedStep(open_regions(self._module, calls, rule=self._rule))
        first: FxPipeError | None = None
        for call in calls:
            try:
                assignment = follow_plan(self._plan, trace_for_plan(self._module, call, self._plan))
                return SizedStep(UnitCosts(chain=assignment.chain, call=call), assignment.cuts)
            except (TraceError, PartitionError) as error:
                first = first or error
        assert first is not None
        raise first


def not_simulated(reason: str) -> UnsupportedError:
    """The error for a step that every rank runs."""
    return UnsupportedError(
        "Steps that run on every rank cannot be simulated.",
        observed=reason,
        expected="a step whose calls of the model form a single pipelined region",
        todo="Simulate the module that the step calls, with its input: simulate_plan(module.net, its_input, ...).",
    )
