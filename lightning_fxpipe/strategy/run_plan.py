"""The plan of a run: the given one, the one of the module's last run, or a new one from the first batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_fxpipe._compat.lightning import has_validation, num_optimizers, own_replaced, run_state_stood_in
from lightning_fxpipe._compat.torch import patched_attributes
from lightning_fxpipe.distributed.topology import Placement, Topology
from lightning_fxpipe.errors import FxPipeError, PartitionError, ScheduleError, TraceError, UnsupportedError
from lightning_fxpipe.microbatch.split import (
    count_samples,
    default_num_microbatches,
    first_microbatch,
    plan_passes,
    tensors_without_batch,
)
from lightning_fxpipe.planner.cut_rule import BalanceName, CutRule
from lightning_fxpipe.planner.load import ADAM_BYTES_PER_BYTE, Load, memory_of_each
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.planning import Planned, plan_regions
from lightning_fxpipe.planner.recompute_rule import ActivationCheckpointing, RecomputeRule
from lightning_fxpipe.planner.step_plan import (
    check_rule,
    must_run_jointly,
    plan_jointly,
    plan_of_microbatch,
    region_or_joint_plan,
)
from lightning_fxpipe.reporting.messages import inform, logger, telling
from lightning_fxpipe.reporting.own_faults import is_own_fault, own_fault_words
from lightning_fxpipe.reporting.wording import error_words
from lightning_fxpipe.schedules.by_name import SCHEDULES, Schedule, ScheduleName
from lightning_fxpipe.simulation.by_name import SimulatedSchedule, on_stages
from lightning_fxpipe.strategy.first_batch import FirstBatches
from lightning_fxpipe.strategy.plan_report import report_plan
from lightning_fxpipe.strategy.search_space import search_space
from lightning_fxpipe.strategy.support import check_batch_dim, check_has_batch, placement_for
from lightning_fxpipe.tracing.discovery import first_regions
from lightning_fxpipe.tracing.region import NoModelCall, StepCall, holds_any, trains
from lightning_fxpipe.user_code.frames import raising_source
from lightning_fxpipe.user_code.inference_mode import without_inference_modes
from lightning_fxpipe.user_code.made_up import MadeUp, MadeUpOptimizer
from lightning_fxpipe.user_code.step import StepKind
from lightning_fxpipe.user_code.step_code import assigned_anywhere
from lightning_fxpipe.user_code.undo import undo_after

_STEPS = {
    TrainerFn.FITTING: StepKind.TRAIN,
    TrainerFn.VALIDATING: StepKind.VALIDATE,
    TrainerFn.TESTING: StepKind.TEST,
    TrainerFn.PREDICTING: StepKind.PREDICT,
}


def step_of_run(trainer: Trainer) -> StepKind:
    """The step that a run is about, and is planned by."""
    assert trainer.state.fn is not None
    return _STEPS[trainer.state.fn]


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of the user about the plan.

    Attributes:
        given: A plan to use instead of making one.
        num_stages: Number of stages, or ``"auto"``.
        stages_per_rank: Of each device, or ``"auto"``.
        num_microbatches: Microbatches of a batch; None chooses by the batch's size.
        batch_dim: Dimension of the batch in its tensors.
        balance: What is equal on all stages.
        split_points: Paths of the modules that the stages after the first begin with, instead of a balance.
        stage_of: Patterns of modules' paths, and the stage that each of them has to be in.
        device_speeds: How fast each device is, by its rank; empty where all are equal.
        device_memory_gib: What each device has for its stages; None: nothing goes by it.
        schedule: For training.
        activation_checkpointing: Modules whose activations are recomputed in the backward pass.
        compile: Whether modules inside of stages are compiled.
        shard_optimizer_state: True if each replica keeps its share of the optimizer's states.
    """

    given: PartitionPlan | None
    num_stages: int | Literal["auto"]
    stages_per_rank: int | Literal["auto"]
    num_microbatches: int | None
    batch_dim: int
    balance: BalanceName | Literal["auto"] = "parameters"
    split_points: Sequence[str] = ()
    stage_of: Mapping[str, int] = field(default_factory=dict)
    device_speeds: Sequence[float] = ()
    device_memory_gib: float | Sequence[float] | Literal["auto"] | None = None
    schedule: Schedule = SCHEDULES["auto"]
    activation_checkpointing: ActivationCheckpointing = False
    compile: bool = False
    shard_optimizer_state: bool = False

    def optimizer_bytes_per_byte(self, num_replicas: int) -> float:
        """Returns the bytes that the optimizer, if it is Adam, keeps on a device for each byte of its stages' trained
        parameters.
        """
        return ADAM_BYTES_PER_BYTE / (num_replicas if self.shard_optimizer_state else 1)

    @property
    def needs_memory(self) -> bool:
        """True if the plan depends on the free memory of the devices."""
        return self.given is None and (
            self.balance == "auto" or self.activation_checkpointing == "auto" or self.device_memory_gib == "auto"
        )

    def memory_of(self, left: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
        """Bytes that each device has for its stages: what the user says, or what is left.

        Raises:
            UnsupportedError: The free memory shall count, and is unknown.
        """
        if self.device_memory_gib == "auto" and not left:
            raise UnsupportedError(
                "The free memory of the devices is unknown.",
                observed='device_memory_gib="auto" on devices whose system does not report free memory',
                todo="Set device_memory_gib to a number, or to one number per device.",
            )
        if self.device_memory_gib in (None, "auto"):
            return left
        return memory_of_each(cast("float | Sequence[float]", self.device_memory_gib), num_ranks)

    def placement(self, num_ranks: int, plan: PartitionPlan | None = None) -> Placement:
        """Which rank has which stages, with the plan of a run; None: with the given one, or as long as there is none.

        Errors as :func:`placement_for`.
        """
        if plan is None and self.given is not None and self.num_stages not in ("auto", self.given.num_stages):
            raise UnsupportedError(
                "The plan does not have the requested number of stages.",
                observed=f"FxPipeStrategy(num_stages={self.num_stages}) and a plan with {self.given.num_stages} stages",
                todo="Make a plan with that number of stages, or omit the option.",
            )
        plan = plan or self.given
        schedule, num_stages, stages_per_rank = self.schedule, self.num_stages, self.stages_per_rank
        if plan is not None:
            num_stages = plan.num_stages
            if self.schedule.name == "auto" and plan.chosen is not None:
                schedule = SCHEDULES[plan.chosen.schedule]
                if stages_per_rank == "auto":
                    stages_per_rank = plan.chosen.stages_per_rank
        elif self.split_points and num_stages == "auto":
            num_stages = len(self.split_points) + 1
        return placement_for(num_ranks, schedule, num_stages=num_stages, stages_per_rank=stages_per_rank)


class RunPlans:
    """Plans the runs of a strategy, one after the other.

    Args:
        options: What the user says about the plan.
    """

    def __init__(self, options: PlanOptions) -> None:
        self.options = options
        self._last: tuple[LightningModule, PartitionPlan, TrainerFn | None] | None = None
        self._num_samples: int | None = None  # of the batch that the last plan was made from

    def report(
        self, plan: PartitionPlan, module: LightningModule, placement: Placement, ranks_per_machine: int, topology: Topology
    ) -> None:
        """Logs a plan that :meth:`make` has made, with its placement on the ranks."""
        report_plan(
            plan,
            module,
            schedule=self.options.schedule,
            num_microbatches=self.options.schedule.num_microbatches or self.options.num_microbatches,
            num_samples=self._num_samples,
            placement=placement,
            ranks_per_machine=ranks_per_machine,
            topology=topology,
        )

    def last_plan(self, trainer: Trainer, module: LightningModule) -> PartitionPlan | None:
        """The plan of the module's last run, if it holds for this one: what trains decides."""
        if self._last is None or self._last[0] is not module:
            return None
        _, plan, planned_for = self._last
        if trainer.state.fn == TrainerFn.FITTING and planned_for != TrainerFn.FITTING:
            return None
        return plan if plan.parameter_shapes == _shapes(module) else None

    def make(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        placement: Placement,
        device: torch.device,
        context: Callable[[StepKind], AbstractContextManager[None]],
        first_batches: FirstBatches,
        memory_left: tuple[int, ...] = (),
        num_replicas: int = 1,
    ) -> Planned:
        """The given plan, or one made by running the step that comes first on its first microbatch.

        Args:
            trainer: The Trainer, about to run.
            module: The module, whole.
            placement: How many stages there are, and on how many ranks.
            device: This rank's device.
            context: Makes the precision plugin's context for a step.
            first_batches: The batches from which a plan is made, for the loops of the run.
            memory_left: Bytes that the stages of each rank may take; empty if unknown or not needed.
            num_replicas: Pipelines side by side.

        Raises:
            UnsupportedError: There is no batch.
            FxPipeError: As ``make_plan`` of ``planner.planning``.
        """
        options = self.options
        plan = options.given
        if plan is not None:
            plan.check_fits(_shapes(module))
            check_batch_dim(options.batch_dim, plan.batch_dim)
            planned = Planned(plan=plan)
        else:
            kept = options.optimizer_bytes_per_byte(num_replicas)
            note = partial(setattr, self, "_num_samples")
            trial = _Trial(trainer, module, options, placement, device, memory_left, kept, context, first_batches, note)
            kind = step_of_run(trainer)
            with telling(f"Tracing the {kind.words}"):
                planned = trial.plan(kind)
        self._last = module, planned.plan, trainer.state.fn
        return planned


@dataclass(frozen=True)
class _Trial:
    """Runs a step before the run to see what of it is pipelined; see :meth:`RunPlans.make` for the attributes."""

    trainer: Trainer
    module: LightningModule
    options: PlanOptions
    placement: Placement
    device: torch.device
    memory_left: tuple[int, ...]
    optimizer_bytes_per_byte: float
    context: Callable[[StepKind], AbstractContextManager[None]]
    first_batches: FirstBatches
    note_samples: Callable[[int], None]

    def plan(self, kind: StepKind) -> Planned:
        """A plan from the step that comes first.

        What the step reads before it calls the model may not be there yet: hooks of the run make it, and optimizers are made
        later. Such a step is tried once more with things made up in their place, which the plan does not depend on; then, in a
        fit, the validation step is. A graph with something made up in it is not kept: the first batch, when everything is
        there, makes another.

        Raises:
            UnsupportedError: No step can be tried, or there is no batch.
        """
        set_up_validation = partial(self.first_batches.set_up_validation, self.trainer)
        with run_state_stood_in(self.trainer, MadeUp(), set_up_validation) as made_up, self.first_batches.shown():
            batch = self._batch(kind)  # an error of the data's is no failure of the step
            self.note_samples(count_samples(batch, None, self.options.batch_dim).num_samples)
            try:
                planned = self._plan(kind, batch)
                return Planned(plan=planned.plan) if made_up else planned
            except FxPipeError:
                raise
            except Exception as error:
                failure = error
            attempts = [kind]
            if kind is StepKind.TRAIN and has_validation(self.trainer):
                attempts.append(StepKind.VALIDATE)
            with patched_attributes(*_not_made_yet(self.trainer, self.module)):
                for attempt in attempts:
                    try:
                        found = batch if attempt is kind else self._batch(attempt)
                        planned = self._plan(attempt, found, for_training=kind is StepKind.TRAIN, is_first=False)
                        return Planned(plan=planned.plan)
                    except Exception as error:
                        logger.debug(
                            "%s failed in the trial before the run: %s: %s", attempt.value, type(error).__name__, error
                        )
        raise _not_tried(kind, failure) from failure

    def _is_validation_of_fit(self, kind: StepKind) -> bool:
        return kind is StepKind.VALIDATE and self.trainer.state.fn == TrainerFn.FITTING

    def _batch(self, kind: StepKind) -> Any:
        with self.context(kind), torch.set_grad_enabled(kind is StepKind.TRAIN):
            of_validation = self._is_validation_of_fit(kind)
            return check_has_batch(self.first_batches.batch(self.trainer, kind, of_validation=of_validation))

    def _plan(self, kind: StepKind, batch: Any, *, for_training: bool = True, is_first: bool = True) -> Planned:
        trains_here = kind is StepKind.TRAIN or self._is_validation_of_fit(kind)
        with self.context(kind), torch.set_grad_enabled(trains_here and for_training), without_inference_modes():
            of_region = partial(self._plan_of_region, kind, batch, trains if trains_here else holds_any)
            jointly = partial(self._plan_jointly, batch, accepts_part=not is_first)
            planned = self._chosen(kind, batch, of_region)
            if planned is None and kind is StepKind.TRAIN:
                planned = region_or_joint_plan(self.module, partial(of_region, self._rule(batch)), jointly, self._rule(batch))
            elif planned is None:
                planned = of_region(self._rule(batch))
            without_batch = tensors_without_batch(batch)
            plan = replace(planned.plan, batch_dim=self.options.batch_dim, without_batch=without_batch)
            return replace(planned, plan=plan)

    def _chosen(self, kind: StepKind, batch: Any, of_region: Callable[[CutRule], Planned]) -> Planned | None:
        """A plan of what is fastest, where the user wants it and that can be said of the step."""
        options = self.options
        if options.balance != "auto" or kind is not StepKind.TRAIN or must_run_jointly(self.module):
            return None
        if torch.are_deterministic_algorithms_enabled():
            inform('balance="auto" uses "flops", because Trainer(deterministic=True) excludes choices by measured times.')
            rule = replace(self._rule(batch), balance="flops")
        elif options.schedule.table is not None:  # all that is left to choose is where to cut
            rule = replace(self._rule(batch), balance="seconds")
        else:
            search = search_space(
                self.module,
                batch,
                schedule=cast(ScheduleName, options.schedule.name),
                splits=not options.compile,
                stages_per_rank=self.placement.stages_per_rank if options.num_stages != "auto" else options.stages_per_rank,
                num_microbatches=options.num_microbatches,
                batch_dim=options.batch_dim,
                num_ranks=self.placement.num_ranks,
                memory_bytes=options.memory_of(self.memory_left, self.placement.num_ranks),
                device_speeds=options.device_speeds,
                optimizer_bytes_per_byte=self.optimizer_bytes_per_byte,
            )
            rule = CutRule(
                num_stages=search.most_stages,
                search=search,
                stage_of=tuple(options.stage_of.items()),
                recompute=RecomputeRule.of(options.activation_checkpointing),
                tells_work=options.schedule.is_fitted,
            )
        try:
            return of_region(rule)
        except NoModelCall:
            raise
        except (TraceError, PartitionError, UnsupportedError, ScheduleError) as error:
            inform(f'balance="auto" falls back to "parameters" for this step: {error.what} {error.observed or ""}')
            return None

    def _plan_of_region(self, kind: StepKind, batch: Any, fallback: Callable[[nn.Module], bool], rule: CutRule) -> Planned:
        """A plan for the step as one region; ``fallback`` tells what is a model where it cannot run without data."""
        options = self.options

        def of_samples(samples: Any, size: int, rule: CutRule) -> Planned:
            found = first_regions(
                self.module,
                partial(StepCall.of_step, getattr(self.module, kind.value), samples),
                batch_size=size,
                batch_dim=options.batch_dim,
                device=self.device,
                fallback=fallback,
            )
            return plan_regions(self.module, found, rule=rule, device=self.device)

        return plan_of_microbatch(
            of_samples, batch, rule, options.num_microbatches, self.placement.num_ranks, options.batch_dim
        )

    def _rule(self, batch: Any) -> CutRule:
        options, placement = self.options, self.placement
        num_samples = count_samples(batch, options.num_microbatches, options.batch_dim).num_samples
        rule = CutRule(
            num_stages=placement.num_stages,
            balance="parameters" if options.balance == "auto" else options.balance,
            num_microbatches=options.num_microbatches or default_num_microbatches(num_samples, placement.num_ranks),
            split_points=tuple(options.split_points),
            stage_of=tuple(options.stage_of.items()),
            recompute=RecomputeRule.of(options.activation_checkpointing),
            load=self._load(num_samples, batch),
            must_fit=options.device_memory_gib is not None,
            tells_work=options.schedule.is_fitted and self.trainer.state.fn == TrainerFn.FITTING,
        )
        check_rule(rule, self.module)
        return rule

    def _load(self, num_samples: int, batch: Any) -> Load:
        options, num_ranks = self.options, self.placement.num_ranks
        count = options.num_microbatches or default_num_microbatches(num_samples, num_ranks)
        name = "gpipe" if options.schedule.name == "auto" else options.schedule.name
        size = first_microbatch(batch, options.num_microbatches, num_ranks, options.batch_dim)[1]
        return Load(
            schedule=options.schedule.table or on_stages(cast(SimulatedSchedule, name), self.placement.stages_per_rank),
            num_ranks=num_ranks,
            stages_per_rank=self.placement.stages_per_rank,
            num_microbatches=count,
            scale=plan_passes(num_samples, count)[0].size / size,
            memory_bytes=options.memory_of(self.memory_left, num_ranks),
            speeds=tuple(options.device_speeds),
            optimizer_bytes_per_byte=self.optimizer_bytes_per_byte,
        )

    def _plan_jointly(self, batch: Any, *, accepts_part: bool) -> PartitionPlan:
        """A plan for a step that every rank runs, with as many optimizers as it has."""
        with patched_attributes(*_optimizers_stood_in(self.module)):
            return plan_jointly(
                self.module,
                StepCall.of_step(self.module.training_step, batch),
                batch,
                num_stages=self.placement.num_stages,
                batch_dim=self.options.batch_dim,
                device=self.device,
                accepts_part=accepts_part,
            )


def check_compile(options: PlanOptions, plan: PartitionPlan, module: LightningModule) -> None:
    """Raises :class:`UnsupportedError` where ``compile=True`` would be forgotten, or cannot be."""
    if not options.compile:
        return
    reason = plan.joint_reason or must_run_jointly(module)
    if reason:
        raise UnsupportedError(
            "compile=True does not support steps that run on every rank.",
            observed=reason,
            expected="a step whose calls of the model form a single pipelined region",
            todo="Omit compile=True, and call compile() on the layers in the module's constructor.",
        )
    if options.schedule.name == "auto" and plan.chosen is not None and SCHEDULES[plan.chosen.schedule].splits:
        raise UnsupportedError(
            "The plan is for a schedule that splits backward passes, which compiled modules do not support.",
            observed=f"the plan's schedule {plan.chosen.schedule} and FxPipeStrategy(compile=True)",
            todo='Make the plan again with compile=True, set another schedule such as "1f1b", or omit compile.',
        )


def _not_made_yet(trainer: Trainer, module: LightningModule) -> list[tuple[Any, str, Any]]:
    """Returns patches that provide attributes which the module's or a callback's code assigns later."""
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    names = frozenset[str]().union(*(assigned_anywhere(type(owner)) for owner in (module, *callbacks)))
    known = {*dir(type(module)), *dict(module.named_children()), *dict(module.named_parameters(recurse=False))}
    missing = [name for name in names - known if vars(module).get(name) is None and not name.startswith("__")]
    return [(module, name, MadeUp()) for name in sorted(missing) if dict(module.named_buffers(recurse=False)).get(name) is None]


def _optimizers_stood_in(module: LightningModule) -> list[tuple[Any, str, Any]]:
    """Returns patches with which a step gets as many optimizers and schedulers as it will have."""
    try:
        with undo_after(module):
            counts = num_optimizers(module.configure_optimizers())
    except Exception:  # it may need what hooks make
        logger.debug("configure_optimizers failed in the trial before the run", exc_info=True)
        return []

    def stand_ins(count: int, kind: type[MadeUp]) -> Callable[..., Any]:
        return lambda *args, **kwargs: kind() if count == 1 else [kind() for _ in range(count)] or None

    kinds = {"optimizers": MadeUpOptimizer, "lr_schedulers": MadeUp}
    functions = {name: stand_ins(count, kind) for (name, kind), count in zip(kinds.items(), counts, strict=True)}
    return [patch for name, function in functions.items() for patch in own_replaced(module, function, name)]


def _not_tried(kind: StepKind, failure: Exception) -> UnsupportedError:
    if is_own_fault(failure):
        what = f"Internal error of lightning_fxpipe in the trial of the {kind.value} before the run."
        return UnsupportedError(what, **own_fault_words(failure))
    return UnsupportedError(
        f"The trial of the {kind.value} before the run failed, so it cannot be pipelined.",
        where=raising_source(failure),
        observed=error_words(failure),
        expected="a step that reaches its call of the model before hooks run and optimizers exist",
        todo="If the same error occurs on one device, fix that first. Otherwise create the attributes that the step reads in "
        "the constructor, setup or configure_model, or set FxPipeStrategy(plan=...) to a plan from "
        "lightning_fxpipe.make_plan.",
    )


def _shapes(module: LightningModule) -> dict[str, tuple[int, ...]]:
    return {fqn: tuple(parameter.shape) for fqn, parameter in module.named_parameters()}
