"""From a plan to the cuts of any other graph of the same module.

The training graph decides the plan. Evaluation, another batch shape or a step that calls the model in another way have graphs
of their own; their cuts follow the plan: each unit goes to a stage that holds its parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from math import inf
from os.path import commonprefix

import torch
from torch import fx, nn

from lightning_fxpipe.errors import PartitionError
from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.cost import Chain, CutSite, Unit, build_chain, canonical_fqns
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.reorder import reorder
from lightning_fxpipe.reporting.messages import logger
from lightning_fxpipe.tracing.recordable import Recordable
from lightning_fxpipe.tracing.trace import TracedRegion, trace_region


def trace_for_plan(
    root: nn.Module,
    call: Recordable,
    plan: PartitionPlan,
    *,
    device: torch.device | None = None,
    earlier: TracedRegion | None = None,
) -> TracedRegion:
    """Records a call that the plan was not made from, with nodes inside each module that a cut has to fall into.

    Arguments and errors as ``trace_region`` of ``tracing.trace``.
    """
    return trace_region(root, call, opened={*plan.opened, *divided_modules(plan, root)}, device=device, earlier=earlier)


def divided_modules(plan: PartitionPlan, root: nn.Module) -> set[str]:
    """Paths of the modules that no stage holds all tensors of.

    The plan's own list has those inside the call that it was made from. Another call may contain that one, or begin elsewhere:
    whatever lies around the cuts then, a cut has to fall inside it.
    """
    names = canonical_fqns(root)
    stages = {fqn: set(_allowed_stages(plan, [fqn])) for fqn in set(names.values())}
    holders: dict[str, set[int]] = {}
    for name, fqn in names.items():
        parts = name.split(".")[:-1]
        for depth in range(len(parts) + 1):
            path = ".".join(parts[:depth])
            holders[path] = holders.get(path, stages[fqn]) & stages[fqn]
    return {path for path, common in holders.items() if not common}


def follow_plan_with_tail(plan: PartitionPlan, traced: TracedRegion, tail: Collection[fx.Node]) -> Assignment:
    """Cuts like :func:`follow_plan`, with one more stage after the last, on the same rank, that runs once for the batch.

    Args:
        plan, traced: Which stage holds what, and the graph.
        tail: The calls of the stage after the last, closed under what follows from them; there may be none.

    Raises:
        PartitionError: The tail needs what the last stage does not hold, or cannot run after all other calls.
    """
    _put_last(traced, tail)
    assignment = follow_plan(plan, traced, tail)
    chain = assignment.chain
    num_units = sum(unit.nodes[0] not in tail for unit in chain.units)
    for position, unit in enumerate(chain.units[num_units:], num_units):
        if plan.num_stages - 1 not in _allowed_stages(plan, unit.tensor_fqns):
            raise _unplaceable(plan, chain, position)
    if tail and (obstacle := chain.site(num_units - 1).obstacle):
        raise PartitionError("The results of the microbatches cannot be concatenated.", observed=obstacle)
    return dataclasses.replace(assignment, cuts=(*assignment.cuts, num_units - 1))


def _put_last(traced: TracedRegion, tail: Collection[fx.Node]) -> None:
    if not tail:
        return
    units = [unit.nodes for unit in build_chain(traced).units]
    reorder(traced.graph, units, lambda position, before: max(int(units[position][0] in tail), before))
    is_tail = [unit.nodes[0] in tail for unit in build_chain(traced, keep_order=True).units]
    if is_tail != sorted(is_tail):
        raise PartitionError(
            "The calls that need the whole batch cannot run after all other calls.",
            observed="other calls use memory that they change",
        )


def follow_plan(plan: PartitionPlan, traced: TracedRegion, tail: Collection[fx.Node] = ()) -> Assignment:
    """Cuts a graph so that every unit lies in a stage that holds its parameters, with the fewest bytes crossing.

    A dynamic programme over (unit, stage), stages never decreasing; a jump of k stages sends what crosses there k times.

    Args:
        plan, traced: Which stage holds what, and the graph.
        tail: Calls that come last, and belong to no stage.

    Raises:
        PartitionError: The graph uses the plan's stages in another order than the plan.
    """
    try:
        return _follow(plan, build_chain(traced, keep_order=bool(tail)), tail)
    except PartitionError:
        logger.debug("The stages do not fit the recorded order; trying other orders", exc_info=True)
        # What this graph would recompute, and the plan's did not, may follow from a buffer that too few stages hold.
        staged = {fqn for stage in plan.stages for fqn in stage.fqns}
        chain = build_chain(traced, kept_apart=staged, keep_order=bool(tail))
        try:
            return _follow(plan, chain, tail)
        except PartitionError:
            if not _put_in_order_of_stages(plan, chain, tail):
                raise
            return _follow(plan, build_chain(traced, kept_apart=staged, keep_order=True), tail)


def _put_in_order_of_stages(plan: PartitionPlan, chain: Chain, tail: Collection[fx.Node]) -> bool:
    """Puts the calls of a graph, where they do not depend on each other, in the order of the stages that they belong to."""

    def rank_of(position: int, before: int) -> int:
        if chain.units[position].nodes[0] in tail:
            return plan.num_stages
        allowed = [stage for stage in _allowed_stages(plan, chain.units[position].tensor_fqns) if stage >= before]
        return min(allowed, default=max(before, 0))

    return reorder(chain.traced.graph, [unit.nodes for unit in chain.units], rank_of)


def _follow(plan: PartitionPlan, chain: Chain, tail: Collection[fx.Node]) -> Assignment:
    num_stages = plan.num_stages
    _check_copies(plan, chain)
    units = [unit for unit in chain.units if unit.nodes[0] not in tail]
    # cost[s]: least bytes with the units so far placed and the last of them in stage s
    cost = [0.0] * num_stages
    came_from: list[list[int]] = []
    for position, unit in enumerate(units):
        site = chain.site(position - 1)
        following, origin = [inf] * num_stages, [-1] * num_stages
        for stage in _allowed_stages(plan, unit.tensor_fqns):
            for previous in range(stage, -1, -1):  # among equals the leftmost cut, as the solver chooses
                jump = cost[previous] + _price(site, stage - previous)
                if jump < following[stage]:
                    following[stage], origin[stage] = jump, previous
        if min(following) == inf:
            raise _unplaceable(plan, chain, position)
        cost = following
        came_from.append(origin)
    final = chain.site(len(units) - 1)
    totals = [cost[stage] + _price(final, num_stages - 1 - stage) for stage in range(num_stages)]
    stage = min(range(num_stages), key=totals.__getitem__)
    if totals[stage] == inf:
        raise _unplaceable(plan, chain, len(units) - 1)
    stages = []
    for origin in reversed(came_from):
        stages.append(stage)
        stage = origin[stage]
    stages.reverse()
    cuts = tuple(sum(of <= index for of in stages) - 1 for index in range(num_stages - 1))
    return Assignment(chain=chain, cuts=cuts)


def _check_copies(plan: PartitionPlan, chain: Chain) -> None:
    """Checks that one stage holds each changed tensor, and the last stage each tensor that is returned as it is."""
    several = [fqn for fqn in sorted(chain.changed_fqns) if len(plan.stages_of(fqn)) > 1]
    if several:
        raise PartitionError(
            "This call changes a tensor in place that the plan stores in several stages, so the copies would diverge.",
            observed=f"{several[0]} in stages {plan.stages_of(several[0])}",
            expected="one stage that holds it",
            todo="Make the plan from the training step: call fit before validate, or pass a plan from `make_plan` to the "
            "strategy.",
        )
    if plan.num_stages - 1 not in _allowed_stages(plan, chain.output_fqns):
        raise PartitionError(
            "This call returns parameters or buffers that the last stage does not hold.",
            observed=", ".join(sorted(chain.output_fqns)),
            expected="the same results as the training step's call",
            todo="Return a value computed from them, or call the model in this step as training does.",
        )


def _price(site: CutSite, num_cuts: int) -> float:
    """Bytes that so many cuts at one site make move."""
    return inf if num_cuts and site.obstacle else float(site.num_bytes * num_cuts)


def _allowed_stages(plan: PartitionPlan, fqns: Iterable[str]) -> list[int]:
    allowed = set(range(plan.num_stages))
    for fqn in fqns:
        holders = plan.stages_of(fqn)
        if holders:  # otherwise every rank keeps it
            allowed &= set(holders)
    return sorted(allowed)


def _unplaceable(plan: PartitionPlan, chain: Chain, position: int) -> PartitionError:
    unit = chain.units[position]
    call = unit.nodes[0]
    where = f"{unit.path or 'the module itself'}, {call.meta.get('source')}"
    needed = _describe_needs(plan, unit) or "a legal cut"
    if call.op != "call_module" or _allowed_stages(plan, unit.tensor_fqns):
        return PartitionError(
            "This call runs the model's modules in an order that the plan's stages cannot follow.",
            where=where,
            observed=f"it needs {needed}, after a later stage has run or at a place where the model cannot be cut",
            expected="stages used in increasing order, as in the training step",
            todo="Use fewer stages, or call the model in this step as training does.",
        )
    path = str(call.target)
    reason = chain.traced.kept_whole.get(path)
    return PartitionError(
        "This call cannot split a module that the plan divides among stages.",
        where=where,
        observed=f"{path or 'the module itself'} needs {needed}{f'; it cannot be split because: {reason}' if reason else ''}",
        expected="a module whose forward can be traced, or whose parameters are in one stage",
        todo="Call the model in this step as training does, or move the code that prevents the split into one of its "
        "submodules.",
    )


def _describe_needs(plan: PartitionPlan, unit: Unit) -> str:
    """The tensors that a unit uses, in a line: for each stage how many there are, what their names begin with, and some."""
    held: dict[tuple[int, ...], list[str]] = {}
    for fqn in sorted(unit.tensor_fqns):
        held.setdefault(plan.stages_of(fqn), []).append(fqn)
    return "; ".join(f"{_shorten(fqns)} ({_holders(stages)})" for stages, fqns in sorted(held.items()))


def _shorten(fqns: list[str], shown: int = 2) -> str:
    if len(fqns) <= shown:
        return ", ".join(fqns)
    prefix = commonprefix(fqns).rpartition(".")[0]
    return f"{len(fqns)} tensors{f' of {prefix}' if prefix else ''} such as {', '.join(fqns[:shown])}"


def _holders(stages: tuple[int, ...]) -> str:
    if not stages:
        return "every rank"
    return f"stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}"
