"""The plan for a step: as one region where that can be, else jointly, each call of a module by itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lightning_fxpipe._compat.lightning import lightning_class
from lightning_fxpipe.errors import FxPipeError, PartitionError, TraceError, UnsupportedError
from lightning_fxpipe.microbatch.split import count_samples, first_microbatch, tensors_without_batch
from lightning_fxpipe.planner.cut_rule import BalanceName, CutRule
from lightning_fxpipe.planner.load import ADAM_BYTES_PER_BYTE, Load, memory_of_each
from lightning_fxpipe.planner.partition import Demands, lightest_maximum
from lightning_fxpipe.planner.pinned import pinned_modules
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.planning import Planned, plan_regions
from lightning_fxpipe.planner.recompute_rule import ActivationCheckpointing, RecomputeRule
from lightning_fxpipe.planner.split_points import check_split_points
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.planner.units import UnitNotRecorded, find_units, plan_units
from lightning_fxpipe.reporting.messages import logger
from lightning_fxpipe.reporting.table import human_count
from lightning_fxpipe.simulation.by_name import SimulatedSchedule, on_stages, schedule_named
from lightning_fxpipe.tracing.discovery import regions
from lightning_fxpipe.tracing.region import NoModelCall, StepCall
from lightning_fxpipe.user_code.step_code import registers_hooks

# So much more than its share a stage may hold before it is worth a slower step.
_MANY_COPIES = 1.3
_NO_STAGES: Mapping[str, int] = MappingProxyType({})


def make_plan(
    module: nn.Module,
    example_batch: object,
    *,
    num_stages: int | None = None,
    num_microbatches: int = 1,
    batch_dim: int = 0,
    balance: BalanceName = "parameters",
    split_points: Sequence[str] = (),
    stage_of: Mapping[str, int] = _NO_STAGES,
    activation_checkpointing: ActivationCheckpointing = False,
    schedule: SimulatedSchedule | str = "gpipe",
    num_devices: int | None = None,
    device_speeds: Sequence[float] = (),
    device_memory_gib: float | Sequence[float] = (),
) -> PartitionPlan:
    """Plans the stages of a module without training it and without a process group.

    Args:
        module: A ``LightningModule``, whose ``training_step`` is asked which calls to pipeline; or any ``nn.Module``, which is
            then called itself.
        example_batch: What ``training_step`` gets as ``batch``; for a plain module its argument, or a tuple or dict of its
            arguments.
        num_stages: Number of stages; not needed with split points.
        num_microbatches: The boundaries' shapes and bytes are those of the first of so many microbatches.
        batch_dim: Dimension of the batch's tensors that is the batch.
        balance: What is equal on all stages, as far as it can be: ``"parameters"``; ``"flops"``, forward and backward; or
            ``"memory"``: parameters, gradients, Adam's states, and the activations that a stage keeps at a time; or
            ``"seconds"`` on this device, forward and backward, for which layers are timed.
        split_points: Paths of the modules that the stages after the first begin with, instead of a balance.
        stage_of: Patterns of modules' paths, as ``model.embed*``, and the stage that each of them has to be in; -1 is the last
            one. What lies between them goes by the balance.
        activation_checkpointing: Modules whose activations are recomputed in the backward pass instead of being stored:
            ``True`` for all blocks, such as the layers of a transformer; module classes; or patterns of module paths, as
            ``"model.layers.*"``.
        schedule: Order of forward and backward passes, which decides how many microbatches' activations a stage keeps.
        num_devices: Devices that share the stages; by default each has one.
        device_speeds: Relative speed of each device, in the order of the ranks. Rank 0 holds the last stage. By default all are
            equal.
        device_memory_gib: Memory budget of each device in GiB for parameters, gradients, Adam's states and activations, in the
            order of the ranks, or one number for all. By default there is no limit.

    Returns:
        The plan; ``print(plan)`` shows it as a table, ``plan.save(path)`` keeps it for ``FxPipeStrategy(plan=path)``.

    Raises:
        TraceError: The call cannot be found or recorded.
        BatchError: The batch cannot be split into several microbatches.
        PartitionError: The graph has fewer legal cuts than ``num_stages`` needs, or none where one is wanted, or none with
            which the stages fit.
        ScheduleError: There is no such schedule.
        UnsupportedError: A step that every rank runs is to be cut by another rule than parameters.
    """
    rule = make_rule(
        num_stages=num_stages,
        balance=balance,
        num_microbatches=num_microbatches,
        split_points=split_points,
        stage_of=stage_of,
        activation_checkpointing=activation_checkpointing,
        schedule=schedule,
        num_devices=num_devices,
        device_speeds=device_speeds,
        device_memory_gib=device_memory_gib,
    )
    return make_planned(module, example_batch, rule=rule, num_microbatches=num_microbatches, batch_dim=batch_dim).plan


def make_rule(
    *,
    num_stages: int | None,
    balance: BalanceName,
    num_microbatches: int,
    split_points: Sequence[str] = (),
    stage_of: Mapping[str, int] = _NO_STAGES,
    activation_checkpointing: ActivationCheckpointing = False,
    schedule: SimulatedSchedule | str = "gpipe",
    num_devices: int | None = None,
    device_speeds: Sequence[float] = (),
    device_memory_gib: float | Sequence[float] = (),
    optimizer_bytes_per_byte: float = ADAM_BYTES_PER_BYTE,
) -> CutRule:
    """Makes the rule by which a graph is cut. Arguments as :func:`make_plan`, and the optimizer's bytes for each byte of a
    parameter.

    Raises:
        TypeError: Nothing says how many stages there are.
        ScheduleError: There is no such schedule.
        PartitionError: The devices do not have as many stages each, or cuts are wanted twice.
    """
    points = tuple(split_points)
    if num_stages is None and not points:
        raise TypeError("make_plan() needs num_stages or split_points")
    has_memory = isinstance(device_memory_gib, (int, float)) or len(device_memory_gib) > 0
    if points and (stage_of or device_speeds or has_memory):
        raise PartitionError(
            "split_points determines all cuts and cannot be combined with other placement options.",
            observed=f"{len(points)} split points and {'stage_of' if stage_of else 'device_speeds or device_memory_gib'}",
            todo="Omit either split_points or stage_of, device_speeds and device_memory_gib.",
        )
    num_stages = len(points) + 1 if num_stages is None else num_stages
    if num_devices is not None and (num_devices < 1 or num_stages % num_devices):
        raise PartitionError(
            "The stages cannot be distributed evenly over the devices.",
            observed=f"{num_stages} stages and {num_devices} devices",
            expected="the same number of stages on each device",
            todo="Change num_stages, or omit num_devices.",
        )
    num_ranks = num_devices or num_stages
    stages_per_rank = num_stages // num_ranks if num_ranks else 1
    load = Load(
        schedule=on_stages(schedule_named(schedule), stages_per_rank),
        num_ranks=num_ranks,
        stages_per_rank=stages_per_rank,
        num_microbatches=num_microbatches,
        memory_bytes=memory_of_each(device_memory_gib, num_ranks),
        speeds=tuple(device_speeds),
        optimizer_bytes_per_byte=optimizer_bytes_per_byte,
    )
    return CutRule(
        num_stages=num_stages,
        balance=balance,
        recompute=RecomputeRule.of(activation_checkpointing),
        num_microbatches=num_microbatches,
        split_points=points,
        stage_of=tuple(stage_of.items()),
        load=load,
        must_fit=has_memory,
    )


def make_planned(
    module: nn.Module, example_batch: object, *, rule: CutRule, num_microbatches: int = 1, batch_dim: int = 0
) -> Planned:
    """The plan, and what it was made of. Arguments and errors as :func:`make_plan`."""
    check_rule(rule, module)
    num_stages = rule.num_stages

    def of_samples(batch: Any, size: int, rule: CutRule) -> Planned:
        found = regions(module, StepCall.of_training(module, batch), batch_size=size, batch_dim=batch_dim)
        return plan_regions(module, found, rule=rule)

    def of_region() -> Planned:
        return plan_of_microbatch(of_samples, example_batch, rule, num_microbatches, num_stages, batch_dim)

    def jointly() -> PartitionPlan:
        step = StepCall.of_training(module, example_batch)
        return plan_jointly(module, step, example_batch, num_stages=num_stages, batch_dim=batch_dim)

    planned = region_or_joint_plan(module, of_region, jointly, rule) if hasattr(module, "training_step") else of_region()
    plan = dataclasses.replace(planned.plan, batch_dim=batch_dim, without_batch=tensors_without_batch(example_batch))
    return dataclasses.replace(planned, plan=plan)


def plan_of_microbatch(
    plan: Callable[[Any, int, CutRule], Planned],
    batch: Any,
    rule: CutRule,
    num_microbatches: int | None,
    num_ranks: int,
    batch_dim: int,
) -> Planned:
    """A plan for a step as one region, made with the first microbatch.

    Where the step cannot be traced with part of a batch, as with layers that have the size of the batch, it is made with all
    of it; batches are not split then.

    Args:
        plan: Makes the plan from samples, their number, and where the graph is to be cut.
        batch: The batch.
        rule: Where the graph is to be cut.
        num_microbatches: Of a batch; None for the default.
        num_ranks: In the pipeline.
        batch_dim: Dimension of the batch in its tensors.
    """
    part, size = first_microbatch(batch, num_microbatches, num_ranks, batch_dim)
    total = count_samples(batch, num_microbatches, batch_dim).num_samples
    try:
        return plan(part, size, rule)
    except Exception as error:  # of the user's code, too
        is_refused = isinstance(error, FxPipeError) and not isinstance(error, TraceError)
        if size == total or is_refused or isinstance(error, NoModelCall):
            raise
        logger.debug("The step cannot be traced with %d of %d samples", size, total, exc_info=True)
    load = None if rule.load is None else dataclasses.replace(rule.load, scale=rule.load.scale * size / total)
    return plan(batch, total, dataclasses.replace(rule, load=load))


def check_rule(rule: CutRule, module: nn.Module) -> None:
    """Raises :class:`PartitionError` where split points or pinned modules are none, there are more or fewer than the stages
    need, or devices that do not exist are described.
    """
    check_split_points(module, rule.split_points)
    pinned_modules(module, rule.stage_of, rule.num_stages)
    if rule.load is not None:
        rule.load.check()
    if rule.split_points and len(rule.split_points) + 1 != rule.num_stages:
        raise PartitionError(
            "The number of split points does not match the number of stages.",
            observed=f"{len(rule.split_points)} split points and {rule.num_stages} stages",
            expected=f"{rule.num_stages - 1} split points, one per stage after the first",
            todo="Omit num_stages, or change one of the two.",
        )


def region_or_joint_plan(
    module: nn.Module, of_region: Callable[[], Planned], jointly: Callable[[], PartitionPlan], rule: CutRule
) -> Planned:
    """A plan for a training step.

    Args:
        module: The LightningModule.
        of_region: Makes a plan for the step as one region.
        jointly: Makes one for a step that every rank runs.
        rule: Where the graph is to be cut.

    Raises:
        FxPipeError: Neither can be made.
    """
    reason = must_run_jointly(module)
    if not (rule.is_by_parameters and rule.recompute.is_plain):
        if reason:
            raise _only_by_parameters(reason)
        return of_region()
    if reason:
        return _joint(jointly(), reason)
    try:
        return _with_fewer_copies(of_region(), jointly)
    except NoModelCall:
        raise
    except (TraceError, PartitionError, UnsupportedError) as error:
        joint = _if_possible(jointly)
        if joint is None:
            raise error from None
        facts = "; ".join(text for text in (error.where, error.observed) if text)
        return _joint(joint, f"{error.what} ({facts})" if facts else error.what)


def _only_by_parameters(reason: str) -> UnsupportedError:
    return UnsupportedError(
        'Steps that run on every rank support only balance="parameters", without activation checkpointing.',
        observed=reason,
        expected="for these options, a step whose calls of the model form a single pipelined region",
        todo='Omit split_points and activation_checkpointing, and set balance="parameters". The model may call '
        "torch.utils.checkpoint itself.",
    )


def _if_possible(jointly: Callable[[], PartitionPlan]) -> PartitionPlan | None:
    try:
        return jointly()
    except Exception:
        logger.debug("The step cannot run on every rank", exc_info=True)
        return None


def _joint(plan: PartitionPlan, reason: str) -> Planned:
    return Planned(plan=dataclasses.replace(plan, joint_reason=reason))


def _with_fewer_copies(planned: Planned, jointly: Callable[[], PartitionPlan]) -> Planned:
    """The plan; or a joint one, where a stage would hold much that others hold as well, because a later call uses it again."""
    held = _most_held(planned.plan)
    if held <= _MANY_COPIES * _without_copies(planned):
        return planned
    joint = _if_possible(jointly)
    if joint is None or _MANY_COPIES * _most_held(joint) > held:
        return planned
    reason = (
        f"as one pipeline, a stage would hold {human_count(held)} parameters instead of {human_count(_most_held(joint))}, "
        "most of them copies of other stages' parameters, because the step calls modules again with the results of later "
        "modules"
    )
    return _joint(joint, reason)


def _without_copies(planned: Planned) -> int:
    """Parameters of the heaviest stage of the best cut, if nothing were there twice."""
    assert planned.assignment is not None
    assert planned.region is not None
    costs = UnitCosts(chain=planned.assignment.chain, call=planned.region)
    return lightest_maximum(Demands(costs.parameters.counted_once(), costs.cut_costs, planned.plan.num_stages))


def _most_held(plan: PartitionPlan) -> int:
    """Parameters of the stage that holds the most, copies and what the step uses besides included."""
    outside = sum(math.prod(plan.parameter_shapes.get(fqn, (0,))) for fqn in plan.outside_fqns)
    last = plan.num_stages - 1
    return max(plan.num_held(stage.index) + outside * (stage.index == last) for stage in plan.stages)


def must_run_jointly(module: nn.Module) -> str:
    """Why every rank has to run a module's training step; empty where it need not."""
    if not getattr(module, "automatic_optimization", True):
        return "manual optimization"
    own = lightning_class(module)
    if own is not None and getattr(type(module), "backward", None) is not own.backward:
        return "an overridden backward"
    step = getattr(module, "training_step", None)
    if step is not None and registers_hooks(module, step):
        return "hooks that the step registers on modules"
    return ""


def plan_jointly(
    module: nn.Module,
    step: StepCall,
    batch: Any,
    *,
    num_stages: int,
    batch_dim: int = 0,
    device: torch.device | None = None,
    accepts_part: bool = True,
) -> PartitionPlan:
    """A plan for a step that every rank runs. Arguments and errors as ``find_units`` of ``planner.units``."""
    num_samples = count_samples(batch, None, batch_dim).num_samples  # its calls are cut, not the batch
    first: FxPipeError | None = None
    opened: set[str] = set()
    while True:
        try:
            units = find_units(
                module,
                step,
                num_samples=num_samples,
                batch_dim=batch_dim,
                device=device,
                accepts_part=accepts_part,
                opened=opened,
            )
            return plan_units(module, units, num_stages=num_stages, device=device)
        except UnitNotRecorded as failure:
            first = first or failure.error
            opened.add(failure.path)  # what it calls may be recorded
            logger.debug(
                "%s is traced into, because it cannot be recorded as a whole", failure.path or "The module", exc_info=True
            )
        except PartitionError as error:
            first = first or error
            opened.update(unit.path for unit in units)  # more, and smaller, calls
        except Exception:  # also of user code, which may not run to its end without data once more of it is opened
            if first is None:
                raise
            raise first from None
