"""From a module and an example batch to a plan. The training graph decides it; how other graphs of the same module are cut
follows from it (``planner.follow_plan``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import fx, nn

from lightning_fxpipe._compat.torch import size_hint
from lightning_fxpipe.errors import FxPipeError, PartitionError, TraceError
from lightning_fxpipe.planner.assignment import Assignment, used_nodes
from lightning_fxpipe.planner.choice import Choice
from lightning_fxpipe.planner.cost import build_chain, canonical_fqns, prelude_fqns
from lightning_fxpipe.planner.cut_rule import CutRule
from lightning_fxpipe.planner.granularity import open_until_balanced
from lightning_fxpipe.planner.plan import BoundaryTensor, PartitionPlan, RecomputedTensor, StageSpec
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.pytree.sizes import tensor_bytes
from lightning_fxpipe.reporting.messages import telling
from lightning_fxpipe.tracing.recordable import Recordable
from lightning_fxpipe.tracing.signals import CannotCut
from lightning_fxpipe.tracing.trace import TracedRegion, trace_region


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """A plan, and the graph that it was made of, so that it need not be recorded once more.

    Attributes:
        plan: The plan.
        region: What was recorded; None where the plan is not that of one region.
        traced: Its graph.
        assignment: How its chain is cut; None where the plan is not that of one region, or comes from elsewhere.
    """

    plan: PartitionPlan
    region: Recordable | None = None
    traced: TracedRegion | None = None
    assignment: Assignment | None = None


def plan_regions(root: nn.Module, calls: Iterable[Recordable], *, rule: CutRule, device: torch.device | None = None) -> Planned:
    """Plans the first of several regions that can be recorded and cut. Arguments and errors as :func:`plan_region`."""
    first: FxPipeError | None = None
    for call in calls:
        try:
            return _plan_region(root, call, rule, device)
        except CannotCut as signal:
            raise first or signal.reason from None
        except (TraceError, PartitionError) as error:
            first = first or error
    assert first is not None
    raise first


def plan_region(root: nn.Module, call: Recordable, *, num_stages: int, device: torch.device | None = None) -> PartitionPlan:
    """Plans the stages of a call that was found in a step, by parameters. Arguments as :func:`trace_region`, errors as
    ``make_plan``.
    """
    return plan_regions(root, [call], rule=CutRule(num_stages=num_stages), device=device).plan


def _plan_region(root: nn.Module, call: Recordable, rule: CutRule, device: torch.device | None) -> Planned:
    trace = partial(trace_region, root, call, device=device)
    try:
        return _plan_traced(partial(trace, answers_looks=False), root, call, rule)
    except PartitionError:  # modules that look at values stayed whole, and may not have to
        return _plan_traced(partial(trace, answers_looks=True), root, call, rule)


def _plan_traced(trace: Callable[..., TracedRegion], root: nn.Module, call: Recordable, rule: CutRule) -> Planned:
    costs = open_until_balanced(trace, root, call, rule)
    traced = costs.chain.traced
    choice = _choose(costs, rule)
    assignment = Assignment(chain=costs.chain, cuts=choice.cuts)
    # Measured seconds hold for the units that were timed, so all that is open stays so.
    needed = traced.opened if rule.needs_clock else {*opened_by_a_cut(assignment), *rule.has_to_be_open(root)}
    # Once more, now compared with another recording; what could not be opened is asked for again, so that the plan says why.
    unable = traced.kept_whole if set(needed) == set(traced.opened) else ()
    wanted = {*needed, *unable}
    is_same = wanted == {*traced.opened, *traced.kept_whole}
    again = UnitCosts(chain=build_chain(trace(opened=wanted, earlier=traced if is_same else None)), call=call)
    if not rule.needs_clock or len(again.chain.units) != len(costs.chain.units):
        choice = _choose(again, rule)
    assignment = Assignment(chain=again.chain, cuts=choice.cuts)
    recomputed = rule.recomputed(again, choice.cuts, choice.alternatives[0] if choice.alternatives else None)
    plan = replace(
        describe_plan(assignment, call),
        alternatives=choice.alternatives,
        checkpointed_modules=recomputed,
        stage_work=rule.work(again, choice, recomputed),
    )
    return Planned(plan=plan, region=call, traced=again.chain.traced, assignment=assignment)


def open_regions(root: nn.Module, calls: Iterable[Recordable], *, rule: CutRule) -> UnitCosts:
    """Records the first of several regions that can be recorded, open as far as a rule needs, without cutting it.

    Arguments and errors as :func:`plan_regions`.
    """
    first: FxPipeError | None = None
    for call in calls:
        trace = partial(trace_region, root, call)
        try:
            costs = open_until_balanced(partial(trace, answers_looks=False), root, call, rule)
            if costs.chain.traced.kept_whole and not _can_cut(costs, rule):
                with suppress(TraceError):
                    costs = open_until_balanced(partial(trace, answers_looks=True), root, call, rule)
            return costs
        except TraceError as error:
            first = first or error
    assert first is not None
    raise first


def _can_cut(costs: UnitCosts, rule: CutRule) -> bool:
    try:
        rule.cuts(costs)
    except PartitionError:
        return False
    return True


def _choose(costs: UnitCosts, rule: CutRule) -> Choice:
    chain = costs.chain
    try:
        with telling("Timing the model's layers") if rule.needs_clock else nullcontext():
            return rule.choose(costs)
    except PartitionError as error:
        if rule.split_points:
            raise
        if chain.traced.refusal is not None:
            raise chain.traced.refusal from error
        if one_layer := _one_layer(chain.traced.root, rule.num_stages):
            raise CannotCut(one_layer) from None
        obstacles = [site.obstacle for site in chain.sites[:-1] if site.obstacle]
        whole = [f"{path} ({reason})" for path, reason in chain.traced.kept_whole.items()]
        more = [f"{len(obstacles)} more where a cut is impossible, for example: {obstacles[0]}"] if obstacles else []
        observed = "; ".join([str(error.observed), *more, *([f"not split: {', '.join(whole)}"] if whole else [])])
        todo = error.todo
        if whole:
            todo = f"{todo} Or let modules be split: move code that reads tensor values into separate submodules."
        more_exactly = PartitionError(error.what, observed=observed, expected=error.expected, todo=todo)
        raise (more_exactly if whole else CannotCut(more_exactly)) from None


def _one_layer(root: nn.Module, num_stages: int) -> PartitionError | None:
    """The error for a model of one layer, which no other code of the user's would change."""
    modules = [(path, next(module.parameters(recurse=False), None)) for path, module in root.named_modules()]
    layers = [path or "the module itself" for path, parameter in modules if parameter is not None]
    if len(layers) != 1 or num_stages < 2:
        return None
    return PartitionError(
        f"The model has one layer with parameters (`{layers[0]}`), so it cannot be split into {num_stages} stages.",
        todo="Use devices=1, or FxPipeStrategy(num_stages=1) for data parallelism.",
    )


def opened_by_a_cut(assignment: Assignment) -> tuple[str, ...]:
    """The opened modules that a cut really falls into; the others may as well stay whole."""
    # A value that several stages recompute could no longer be if the module that makes it were whole again.
    paths = [{str(node.meta["module_path"]) for node in assignment.nodes(stage)} for stage in range(assignment.num_stages)]

    def stages_inside(path: str) -> int:
        return sum(any(inside == path or inside.startswith(f"{path}.") for inside in of_stage) for of_stage in paths)

    return tuple(path for path in assignment.chain.traced.opened if stages_inside(path) > 1)


def describe_plan(assignment: Assignment, call: Recordable) -> PartitionPlan:
    """The plan of an assignment, in module paths and FQNs."""
    assignment = assignment.with_skips()
    chain = assignment.chain
    root = chain.traced.root
    order = {fqn: index for index, fqn in enumerate(canonical_fqns(root))}
    stage_of, used = _stages_of_nodes(assignment), used_nodes(assignment)
    last = assignment.num_stages - 1
    stages = []
    for stage in range(assignment.num_stages):
        units = assignment.units(stage)
        named = [unit.path for unit in units if unit.nodes[0].op == "call_module"] or [unit.path for unit in units] or [""]
        stages.append(
            StageSpec(
                index=stage,
                first_module=named[0],
                last_module=named[-1],
                fqns=tuple(sorted(assignment.fqns(stage), key=order.__getitem__)),
                num_parameters=sum(unit.num_parameters for unit in units),
                outputs=() if stage == last else _boundary_tensors(assignment, stage, stage_of, used),
            )
        )
    prelude = prelude_fqns(root, call)
    outside = tuple(fqn for fqn in chain.unused_fqns if fqn not in prelude)
    return PartitionPlan(
        region=chain.traced.signature.label,
        stages=tuple(stages),
        microbatch_size=chain.traced.batch_size,
        parameter_shapes={fqn: tuple(parameter.shape) for fqn, parameter in root.named_parameters()},
        outside_fqns=outside,
        outside_reason=call.ends_because if outside else "",
        prelude_fqns=tuple(fqn for fqn in prelude if fqn in chain.unused_fqns),
        opened=chain.traced.opened,
        kept_whole=chain.traced.kept_whole,
        recomputed=_recomputed_tensors(assignment),
    )


def _boundary_tensors(
    assignment: Assignment, stage: int, stage_of: Mapping[fx.Node, int], used: Sequence[set[fx.Node]]
) -> tuple[BoundaryTensor, ...]:
    tensors = []
    past = {skip.node: skip.destination for skip in assignment.skips if skip.source == stage}
    for node in assignment.sent(stage):
        value = node.meta["val"]
        consumers = [of for of, nodes in enumerate(used) if node in nodes and of > stage_of[node]]
        tensors.append(
            BoundaryTensor(
                name=node.name,
                module=str(node.meta["module_path"]),
                shape=tuple(size_hint(size) for size in value.shape),
                dtype=str(value.dtype).removeprefix("torch."),
                requires_grad=value.requires_grad,
                producer_stage=stage_of[node],
                consumer_stages=tuple(consumers),
                receiver_stage=past.get(node, stage + 1),
                num_bytes=tensor_bytes(value),
            )
        )
    return tuple(tensors)


def _recomputed_tensors(assignment: Assignment) -> tuple[RecomputedTensor, ...]:
    """Selects the recomputed values that would cross a cut if they were not recomputed."""
    used = [assignment.uses(stage) for stage in range(assignment.num_stages)]
    tensors = []
    for node, made_in in _stages_of_nodes(assignment).items():
        stages = tuple(stage for stage, nodes in enumerate(used) if node in nodes)
        if node in assignment.chain.recomputation.nodes and stages and stages[-1] > made_in:
            tensors.append(
                RecomputedTensor(
                    name=node.name,
                    module=str(node.meta["module_path"]),
                    stages=stages,
                    num_bytes=tensor_bytes(node.meta["val"]),
                )
            )
    return tuple(tensors)


def _stages_of_nodes(assignment: Assignment) -> dict[fx.Node, int]:
    units = enumerate(assignment.chain.units)
    return {node: assignment.stage_of(position) for position, unit in units for node in unit.nodes}
