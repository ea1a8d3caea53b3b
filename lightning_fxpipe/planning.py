"""From a module and an example batch to a plan. The training graph decides it; how other graphs of the same module are cut
follows from it (:mod:`lightning_fxpipe.following`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import fx, nn

from lightning_fxpipe._compat import size_hint
from lightning_fxpipe.cost import Chain, Unit, build_chain, canonical_fqns
from lightning_fxpipe.errors import PartitionError
from lightning_fxpipe.microbatch import first_microbatch, tensors_without_batch
from lightning_fxpipe.partition import lightest_maximum, solve
from lightning_fxpipe.plan import BoundaryTensor, PartitionPlan, RecomputedTensor, StageSpec
from lightning_fxpipe.recordable import Recordable
from lightning_fxpipe.region import StepCall
from lightning_fxpipe.sizes import tensor_bytes
from lightning_fxpipe.survey import locate_region
from lightning_fxpipe.trace import TracedRegion, trace_region

# A plan is good enough when its heaviest stage is within this factor of what no partition can beat.
GOOD_ENOUGH = 1.05


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A chain cut into stages.

    Attributes:
        chain: The chain.
        cuts: Position of the last unit of each stage but the last; equal neighbours mean a stage that computes nothing.
    """

    chain: Chain
    cuts: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.cuts) + 1

    def stage_of(self, position: int) -> int:
        """Stage of the unit at ``position``."""
        return sum(cut < position for cut in self.cuts)

    def units(self, stage: int) -> list[Unit]:
        """The units that run in this stage alone."""
        return [
            unit
            for position, unit in enumerate(self.chain.units)
            if self.stage_of(position) == stage and not unit.is_recomputed
        ]

    def nodes(self, stage: int) -> list[fx.Node]:
        """The stage's calls in graph order, those of the recomputed values that it needs included."""
        own = {node for unit in self.units(stage) for node in unit.nodes}
        received = self.boundary(stage - 1) if stage else ()
        again = self.chain.recomputation.calls_for(self.uses(stage), own.union(received))
        return [node for node in self.chain.traced.graph.nodes if node in own or node in again]

    def uses(self, stage: int) -> set[fx.Node]:
        """Operands of the stage's own units; in the last stage the region's results, too."""
        operands = {operand for unit in self.units(stage) for node in unit.nodes for operand in node.all_input_nodes}
        return operands.union(self.chain.traced.output_node.all_input_nodes if stage == self.num_stages - 1 else ())

    def fqns(self, stage: int) -> frozenset[str]:
        """Canonical FQNs of the parameters and buffers that the stage must have."""
        used = frozenset(fqn for unit in self.units(stage) for fqn in unit.tensor_fqns)
        return used | self.chain.output_fqns if stage == self.num_stages - 1 else used

    def boundary(self, stage: int) -> tuple[fx.Node, ...]:
        """What ``stage`` sends to the next one."""
        return self.chain.site(self.cuts[stage]).crossing


def make_plan(
    module: nn.Module,
    example_batch: object,
    *,
    num_stages: int,
    num_microbatches: int = 1,
    batch_dim: int = 0,
) -> PartitionPlan:
    """Plans the stages of a module without training it and without a process group.

    Args:
        module: A ``LightningModule``, whose ``training_step`` is asked which call to pipeline; or any ``nn.Module``, which is
            then called itself.
        example_batch: What ``training_step`` gets as ``batch``; for a plain module its argument, or a tuple or dict of its
            arguments.
        num_stages: Number of stages.
        num_microbatches: The boundaries' shapes and bytes are those of the first of so many microbatches.
        batch_dim: Dimension of the batch's tensors that is the batch.

    Returns:
        The plan; ``print(plan)`` shows it as a table, ``plan.save(path)`` keeps it for ``FxPipeStrategy(plan=path)``.

    Raises:
        TraceError: The call cannot be found or recorded.
        BatchError: The batch cannot be split into several microbatches.
        PartitionError: The graph has fewer legal cuts than ``num_stages`` needs.
    """
    batch, size = first_microbatch(example_batch, num_microbatches, num_stages, batch_dim)
    call = locate_region(module, StepCall.of_training(module, batch), batch_size=size, batch_dim=batch_dim)
    plan = plan_region(module, call, num_stages=num_stages)
    return dataclasses.replace(plan, batch_dim=batch_dim, without_batch=tensors_without_batch(example_batch))


def plan_region(root: nn.Module, call: Recordable, *, num_stages: int, device: torch.device | None = None) -> PartitionPlan:
    """Plans the stages of a call that was found in a step. Arguments as :func:`trace_region`, errors as :func:`make_plan`."""
    chain = open_until_balanced(root, call, num_stages=num_stages, device=device)
    assignment = _best_assignment(chain, call, num_stages)
    needed = _opened_by_a_cut(assignment)
    # Once more, now compared with a second recording; what could not be opened is asked for again, so that the plan says why.
    unable = chain.traced.kept_whole if set(needed) == set(chain.traced.opened) else ()
    chain = build_chain(trace_region(root, call, opened={*needed, *unable}, device=device))
    assignment = _best_assignment(chain, call, num_stages)
    return describe_plan(assignment, call)


def _best_assignment(chain: Chain, call: Recordable, num_stages: int) -> Assignment:
    try:
        return Assignment(chain=chain, cuts=solve(stage_weights(chain, call), _cut_costs(chain), num_stages))
    except PartitionError as error:
        obstacles = [site.obstacle for site in chain.sites[:-1] if site.obstacle]
        whole = [f"{path} ({reason})" for path, reason in chain.traced.kept_whole.items()][:4]
        more = [f"{len(obstacles)} more where none may fall, such as: {obstacles[0]}"] if obstacles else []
        observed = "; ".join([str(error.observed), *more, *([f"kept whole: {', '.join(whole)}"] if whole else [])])
        raise PartitionError(error.what, observed=observed, expected=error.expected, todo=error.todo) from None


def open_until_balanced(root: nn.Module, call: Recordable, *, num_stages: int, device: torch.device | None = None) -> Chain:
    """Traces at the coarsest granularity whose best partition is good enough.

    Everything that stays a whole module keeps its hooks, its Python and its own control flow, so modules are opened only
    where a cut may have to fall inside: first those that lie across an ideal cut, then all that are heavy, until the heaviest
    stage is within :data:`GOOD_ENOUGH` of the lower bound or nothing heavy is left to open.
    """
    opened: set[str] = set()
    while True:
        traced = trace_region(root, call, opened=opened, device=device, check=False)
        chain = build_chain(traced)
        candidates = _worth_opening(chain, stage_weights(chain, call), num_stages, opened)
        if not candidates:
            return chain
        opened |= candidates


def _opened_by_a_cut(assignment: Assignment) -> tuple[str, ...]:
    """The opened modules that a cut really falls into; the others may as well stay whole."""

    # A value that several stages recompute could no longer be if the module that makes it were whole again.
    paths = [{str(node.meta["module_path"]) for node in assignment.nodes(stage)} for stage in range(assignment.num_stages)]

    def stages_inside(path: str) -> int:
        return sum(any(inside == path or inside.startswith(f"{path}.") for inside in of_stage) for of_stage in paths)

    return tuple(path for path in assignment.chain.traced.opened if stages_inside(path) > 1)


def _worth_opening(chain: Chain, weights: list[int], num_stages: int, opened: set[str]) -> set[str]:
    costs = _cut_costs(chain)
    if num_stages < 1:
        return set()  # the solver says what is wrong
    total = sum(weights)
    openable = {
        position: str(unit.nodes[0].target)
        for position, unit in enumerate(chain.units)
        if unit.nodes[0].op == "call_module" and _can_open(chain.traced, str(unit.nodes[0].target), opened)
    }
    num_legal = sum(cost is not None for cost in costs)
    if num_legal < num_stages - 1:
        return set(openable.values())
    heaviest = lightest_maximum(weights, costs, num_stages)
    closed = max((weight for position, weight in enumerate(weights) if position not in openable), default=0)
    bound = max(-(-total // num_stages), closed)
    if heaviest <= GOOD_ENOUGH * bound:
        return set()
    ends = []
    reached = 0
    for weight in weights:
        reached += weight
        ends.append(reached)
    quantiles = [total * k / num_stages for k in range(1, num_stages)]
    across = {
        path
        for position, path in openable.items()
        if any(ends[position] - weights[position] < quantile < ends[position] for quantile in quantiles)
    }
    slack = (GOOD_ENOUGH - 1) * bound
    return across or {path for position, path in openable.items() if weights[position] > slack}


def _can_open(traced: TracedRegion, path: str, opened: set[str]) -> bool:
    module = traced.root.get_submodule(path)
    return path not in opened and path not in traced.kept_whole and next(module.children(), None) is not None


def stage_weights(chain: Chain, call: Recordable) -> list[int]:
    """Parameters of each unit; those used after the region weigh on the last unit, because the last stage holds them."""
    weights = [unit.num_parameters for unit in chain.units]
    if weights:
        root = chain.traced.root
        outside = set(_outside(chain)) - set(_prelude_fqns(root, call))
        weights[-1] += sum(parameter.numel() for fqn, parameter in root.named_parameters() if fqn in outside)
    return weights


def _outside(chain: Chain) -> tuple[str, ...]:
    used = {fqn for unit in chain.units for fqn in unit.tensor_fqns}
    return tuple(fqn for fqn, _ in chain.traced.root.named_parameters() if fqn not in used)


def _prelude_fqns(root: nn.Module, call: Recordable) -> tuple[str, ...]:
    names = canonical_fqns(root)
    prefixes = tuple(f"{path}." if path else "" for path in call.prelude_paths)
    return tuple(fqn for fqn, _ in root.named_parameters() if names[fqn].startswith(prefixes)) if prefixes else ()


def _cut_costs(chain: Chain) -> list[int | None]:
    """Bytes that a cut makes move: the tensors that cross it, and the gradients of parameters that both sides use."""
    sizes = {fqn: p.numel() * p.dtype.itemsize for fqn, p in chain.traced.root.named_parameters()}
    first_use: dict[str, int] = {}
    last_use: dict[str, int] = {}
    for position, unit in enumerate(chain.units):
        for fqn in unit.tensor_fqns & sizes.keys():
            first_use.setdefault(fqn, position)
            last_use[fqn] = position
    costs: list[int | None] = []
    for position, (unit, site) in enumerate(zip(chain.units[:-1], chain.sites[:-1], strict=True)):
        shared = sum(sizes[fqn] for fqn, first in first_use.items() if first <= position < last_use[fqn])
        # A cut after a recomputed unit is the cut before it.
        costs.append(None if site.obstacle or unit.is_recomputed else site.num_bytes + shared)
    return costs


def describe_plan(assignment: Assignment, call: Recordable) -> PartitionPlan:
    """The plan of an assignment, in module paths and FQNs."""
    chain = assignment.chain
    root = chain.traced.root
    order = {fqn: index for index, fqn in enumerate(canonical_fqns(root))}
    stages = []
    for stage in range(assignment.num_stages):
        units = assignment.units(stage)
        stages.append(
            StageSpec(
                index=stage,
                first_module=units[0].path if units else "",
                last_module=units[-1].path if units else "",
                fqns=tuple(sorted(assignment.fqns(stage), key=order.__getitem__)),
                num_parameters=sum(unit.num_parameters for unit in units),
                outputs=() if stage == assignment.num_stages - 1 else _boundary_tensors(assignment, stage),
            )
        )
    prelude = _prelude_fqns(root, call)
    outside = tuple(fqn for fqn in _outside(chain) if fqn not in prelude)
    return PartitionPlan(
        region=chain.traced.signature.label,
        stages=tuple(stages),
        microbatch_size=chain.traced.batch_size,
        parameter_shapes={fqn: tuple(parameter.shape) for fqn, parameter in root.named_parameters()},
        outside_fqns=outside,
        outside_reason=call.ends_because if outside else "",
        prelude_fqns=tuple(fqn for fqn in prelude if fqn in _outside(chain)),
        opened=chain.traced.opened,
        kept_whole=chain.traced.kept_whole,
        recomputed=_recomputed_tensors(assignment),
    )


def _boundary_tensors(assignment: Assignment, stage: int) -> tuple[BoundaryTensor, ...]:
    stage_of = _stages_of_nodes(assignment)
    used = _used_nodes(assignment)
    tensors = []
    for node in assignment.boundary(stage):
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
                num_bytes=tensor_bytes(value),
            )
        )
    return tuple(tensors)


def _recomputed_tensors(assignment: Assignment) -> tuple[RecomputedTensor, ...]:
    """Those of the recomputed values that would cross a cut if they were not."""
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


def _used_nodes(assignment: Assignment) -> list[set[fx.Node]]:
    """What each stage takes operands and results from, for recomputed values too."""
    unread = assignment.chain.recomputation.unread
    return [
        assignment.uses(stage).union(*({*node.all_input_nodes} - unread.get(node, set()) for node in assignment.nodes(stage)))
        for stage in range(assignment.num_stages)
    ]
