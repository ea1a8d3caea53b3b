"""A training step recorded once, for any cuts, schedule and size of microbatches.

1. The step is traced for one microbatch, and opened far enough for the most stages that are wanted.
2. For microbatches of another size the same graph is read with other sizes (``Chain.of_samples``). Only a graph that was
   specialised to its size, as by ``if len(x) > 8``, is traced again.
3. Costs of units are computed once for each size, and shared by all cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from lightning_fxpipe.errors import FxPipeError, PartitionError, TraceError, UnsupportedError
from lightning_fxpipe.microbatch.split import count_samples, first_microbatch, plan_passes
from lightning_fxpipe.planner.cut_rule import CutRule
from lightning_fxpipe.planner.follow_plan import follow_plan, trace_for_plan
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.planning import open_regions
from lightning_fxpipe.planner.step_plan import must_run_jointly
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.reporting.messages import telling
from lightning_fxpipe.tracing.discovery import regions
from lightning_fxpipe.tracing.region import StepCall


@dataclass(frozen=True, eq=False)
class SizedStep:
    """A recorded step for microbatches of one size.

    Attributes:
        costs: The table of its chain.
        plan_cuts: Cuts of a given plan; None if a rule decides.
    """

    costs: UnitCosts
    plan_cuts: tuple[int, ...] | None = None

    def of_samples(self, num_samples: int) -> SizedStep | None:
        """Returns the step for another size; None if its graph does not admit that."""
        costs = self.costs.of_samples(num_samples)
        return None if costs is None else replace(self, costs=costs)

    def cuts(self, rule: CutRule) -> tuple[int, ...]:
        """Returns the plan's cuts, or those of a rule. Errors as :meth:`CutRule.choose`."""
        return rule.cuts(self.costs) if self.plan_cuts is None else self.plan_cuts


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
        check_can_simulate(module)
        if plan is not None:
            if plan.joint_reason:
                raise not_simulated(plan.joint_reason)
            plan.check_fits({fqn: tuple(parameter.shape) for fqn, parameter in module.named_parameters()})
        self._module, self._batch, self._rule, self._batch_dim, self._plan = module, batch, rule, batch_dim, plan
        self._traced: list[SizedStep] = []
        self._by_size: dict[int, SizedStep] = {}
        self.num_samples = count_samples(batch, None, batch_dim).num_samples

    def of_microbatches(self, count: int) -> SizedStep:
        """Returns the step for the size of microbatches if a batch is split into ``count``. Errors as ``make_plan``."""
        size = plan_passes(self.num_samples, count)[0].size
        if size not in self._by_size:
            sized = next(filter(None, (step.of_samples(size) for step in self._traced)), None)
            if sized is None:
                with telling("Tracing the training step"):
                    traced = self._trace(count)
                self._traced.append(traced)
                sized = traced.of_samples(size) or traced
            self._by_size[size] = sized
        return self._by_size[size]

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


def check_can_simulate(module: nn.Module) -> None:
    """Raises :class:`UnsupportedError` if every rank has to run the module's step."""
    if reason := must_run_jointly(module):
        raise not_simulated(reason)


def not_simulated(reason: str) -> UnsupportedError:
    """Returns the error for a step that every rank runs."""
    return UnsupportedError(
        "Steps that run on every rank cannot be simulated.",
        observed=reason,
        expected="a step whose calls of the model form a single pipelined region",
        todo="Simulate the module that the step calls, with its input: simulate_plan(module.net, its_input, ...).",
    )
