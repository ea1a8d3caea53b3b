"""How far a region is opened: as little as a good partition needs. What its units weigh, and what each cut costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import accumulate

from torch import nn

from lightning_fxpipe.planner.cost import Chain, build_chain, canonical_fqns
from lightning_fxpipe.planner.partition import lightest_maximum
from lightning_fxpipe.tracing.recordable import Recordable, RegionCall
from lightning_fxpipe.tracing.trace import TracedRegion

# A plan is good enough when its heaviest stage is within this factor of what no partition can beat.
GOOD_ENOUGH = 1.05


def open_until_balanced(
    trace: Callable[..., TracedRegion],
    root: nn.Module,
    call: Recordable,
    num_stages: int,
    weigh: Callable[[Chain, Recordable], list[int]] | None = None,
) -> Chain:
    """Traces at the coarsest granularity whose best partition is good enough.

    Everything that stays a whole module keeps its hooks, its Python and its own control flow, so modules are opened only
    where a cut may have to fall inside: first those that lie across an ideal cut, then all that are heavy, until the heaviest
    stage is within :data:`GOOD_ENOUGH` of the lower bound or nothing heavy is left to open.

    Args:
        trace: Traces the call; its further arguments are those of ``trace_region`` of ``tracing.trace``.
        root: The module that paths are relative to.
        call, num_stages: The call, and how many stages it gets.
        weigh: Gives the weights of a chain's units; None: their parameters.
    """
    opened = set[str]() if weigh else _too_heavy(root, num_stages)
    weigh = weigh or stage_weights
    while True:
        chain = build_chain(trace(opened=opened, check=False))
        candidates = _worth_opening(chain, weigh(chain, call), num_stages, opened)
        if not candidates:
            return chain
        opened |= candidates


def _too_heavy(root: nn.Module, num_stages: int) -> set[str]:
    """Modules that no partition could leave whole, as their parameters tell without a trace: each is by itself heavier than a
    stage may be."""
    if num_stages < 2:
        return set()
    sizes = {id(parameter): parameter.numel() for parameter in root.parameters()}
    holders = Counter(id(parameter) for module in root.modules() for parameter in module.parameters(recurse=False))
    closed = max((_weight(m, sizes) for m in root.modules() if next(m.children(), None) is None), default=0)
    bound = max(-(-sum(sizes.values()) // num_stages), closed)
    own = {key: size for key, size in sizes.items() if holders[key] == 1}  # what others hold, too, may count elsewhere
    parents = ((path, module) for path, module in root.named_modules() if path and next(module.children(), None) is not None)
    return {path for path, module in parents if _weight(module, own) > GOOD_ENOUGH * bound}


def _weight(module: nn.Module, sizes: Mapping[int, int]) -> int:
    return sum(sizes.get(id(parameter), 0) for parameter in module.parameters())


def _worth_opening(chain: Chain, weights: list[int], num_stages: int, opened: set[str]) -> set[str]:
    costs = cut_costs(chain)
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
    ends = [*accumulate(weights)]
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
        weights[-1] += sum(parameter.numel() for parameter in parameters_after(chain, call))
    return weights


def parameters_after(chain: Chain, call: Recordable) -> list[nn.Parameter]:
    """The parameters that the step uses after the region, or nowhere; the last stage holds them."""
    if isinstance(call, RegionCall) and call.is_one_of_many:
        return []
    root = chain.traced.root
    outside = set(unused_fqns(chain)) - set(prelude_fqns(root, call))
    return [parameter for fqn, parameter in root.named_parameters() if fqn in outside]


def unused_fqns(chain: Chain) -> tuple[str, ...]:
    """The parameters that no unit uses."""
    used = {fqn for unit in chain.units for fqn in unit.tensor_fqns}
    return tuple(fqn for fqn, _ in chain.traced.root.named_parameters() if fqn not in used)


def prelude_fqns(root: nn.Module, call: Recordable) -> tuple[str, ...]:
    """The parameters of the modules that the step calls before the region."""
    names = canonical_fqns(root)
    prefixes = tuple(f"{path}." if path else "" for path in call.prelude_paths)
    return tuple(fqn for fqn, _ in root.named_parameters() if names[fqn].startswith(prefixes)) if prefixes else ()


def cut_costs(chain: Chain) -> list[int | None]:
    """Bytes that a cut makes move: the tensors that cross it, and the gradients of parameters that both sides use."""
    sizes = {fqn: p.numel() * p.dtype.itemsize for fqn, p in chain.traced.root.named_parameters()}
    first_use: dict[str, int] = {}
    last_use: dict[str, int] = {}
    for position, unit in enumerate(chain.units):
        for fqn in unit.tensor_fqns & sizes.keys():
            first_use.setdefault(fqn, position)
            last_use[fqn] = position
    changes = [0] * len(chain.units)  # of the bytes that both sides of a cut use, from one place to the next
    for fqn, first in first_use.items():
        changes[first] += sizes[fqn]
        changes[last_use[fqn]] -= sizes[fqn]
    costs: list[int | None] = []
    for unit, site, shared in zip(chain.units[:-1], chain.sites[:-1], [*accumulate(changes)][:-1], strict=True):
        # A cut after a recomputed unit is the cut before it.
        costs.append(None if site.obstacle or unit.is_recomputed else site.num_bytes + shared)
    return costs
