"""How far a region is opened: as little as a good partition needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from lightning_fxpipe.planner.cost import Chain, build_chain
from lightning_fxpipe.planner.cut_rule import CutRule
from lightning_fxpipe.planner.partition import Demands, NothingFits, Weights, cheapest_cuts, lightest_maximum
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.tracing.recordable import Recordable
from lightning_fxpipe.tracing.trace import TracedRegion

# A plan is good enough if its heaviest stage is within this factor of the lower bound.
GOOD_ENOUGH = 1.05
# Number of parts for each stage into which modules that can be opened are cut, to find where cuts would fall.
_PARTS_PER_STAGE = 40


def open_until_balanced(trace: Callable[..., TracedRegion], root: nn.Module, call: Recordable, rule: CutRule) -> UnitCosts:
    """Traces at the coarsest granularity whose best partition is good enough.

    Everything that stays a whole module keeps its hooks, its Python and its own control flow, so modules are opened only
    where a cut may have to fall inside: first those that lie across an ideal cut, then all that are heavy, until the heaviest
    stage is within :data:`GOOD_ENOUGH` of the lower bound or nothing heavy is left to open. With split points nothing else is
    opened.

    Args:
        trace: Traces the call; its further arguments are those of ``trace_region`` of ``tracing.trace``.
        root: The module that paths are relative to.
        call: The call.
        rule: The rule by which it is cut.
    """
    opened = {*rule.has_to_be_open(root)} | (_too_heavy(root, rule.num_stages) if rule.is_by_parameters else set())
    while True:
        costs = UnitCosts(chain=build_chain(trace(opened=opened, check=False)), call=call)
        candidates = set() if rule.split_points else _worth_opening(costs.chain, rule.demands(costs), opened)
        if not candidates:
            return costs
        opened |= candidates


def _too_heavy(root: nn.Module, num_stages: int) -> set[str]:
    """Modules that no partition could leave whole, as their parameters tell without a trace: each is by itself heavier than a
    stage may be.
    """
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


def _worth_opening(chain: Chain, demands: Demands, opened: Collection[str]) -> set[str]:
    if demands.num_stages < 1:
        return set()  # the solver says what is wrong
    openable = {
        position: str(unit.nodes[0].target)
        for position, unit in enumerate(chain.units)
        if unit.nodes[0].op == "call_module" and _can_open(chain.traced, str(unit.nodes[0].target), opened)
    }
    if len(demands.legal) < demands.num_stages - 1:
        return set(openable.values())
    ideal, heaviest = ideal_partition(demands, openable), _heaviest(demands)
    while heaviest is not None and heaviest <= GOOD_ENOUGH * ideal.bound:
        rest = demands.without_dominant(heaviest)  # such as a large embedding; are the others equal among themselves?
        if rest is None:
            return set()
        demands = rest
        ideal, heaviest = ideal_partition(demands, openable), _heaviest(demands)
    across = {path for position, path in openable.items() if position in ideal.cut_units}
    slack = (GOOD_ENOUGH - 1) * ideal.bound
    weights = demands.kinds[0]
    heavy = {path for position, path in openable.items() if weights.of_unit(position) > slack}
    return across or heavy or (set(openable.values()) if heaviest is None else set())


def _heaviest(demands: Demands) -> int | None:
    """Weight of the heaviest stage in the best partition; None where there is none, as nothing fits."""
    try:
        return lightest_maximum(demands)
    except NothingFits:
        return None


@dataclass(frozen=True)
class Ideal:
    """The best partition if a cut could fall anywhere inside of what can be opened.

    Attributes:
        bound: No partition has a heaviest stage that is lighter.
        cut_units: Units that it has cuts inside of.
    """

    bound: int
    cut_units: frozenset[int]


def ideal_partition(demands: Demands, openable: Collection[int]) -> Ideal:
    """The bound and the ideal cuts, where units at the positions ``openable`` could be cut into parts of any weight."""
    if demands.are_equal and not demands.kinds[0].shared:
        own = demands.kinds[0].own
        total, ends = sum(own), [*accumulate(own)]
        closed = max((weight for position, weight in enumerate(own) if position not in openable), default=0)
        quantiles = [total * k / demands.num_stages for k in range(1, demands.num_stages)]
        # Where the stages would have to be equally heavy, whatever of them cannot be.
        inside = (p for p in openable if any(ends[p] - own[p] < quantile < ends[p] for quantile in quantiles))
        return Ideal(max(-(-total // demands.num_stages), closed), frozenset(inside))
    return _of_parts(demands, openable)


def _of_parts(demands: Demands, openable: Collection[int]) -> Ideal:
    """Finds the ideal cuts by the solver, for rules that have no formula: modules that can be opened are cut into parts."""
    most = max((weights.total for weights in demands.kinds), default=0)
    part = max(1, most // (_PARTS_PER_STAGE * demands.num_stages))
    heaviest = [max(weights.own[p] for weights in demands.kinds) for p in range(demands.num_units)]
    counts = [-(-heaviest[p] // part) if p in openable else 1 for p in range(demands.num_units)]
    counts = [max(1, count) for count in counts]
    unit_of = [position for position, count in enumerate(counts) for _ in range(count)]
    first_part = [0, *accumulate(counts)]
    known = {
        id(weights): Weights(
            tuple(weights.own[position] // counts[position] for position in unit_of),
            # Its place in a unit is unknown: at its beginning is as good as anywhere.
            tuple((weight, tuple(first_part[user] for user in users)) for weight, users in weights.shared),
        )
        for weights in demands.kinds
    }
    parts = Demands(
        [known[id(weights)] for weights in demands.weights]
        if not isinstance(demands.weights, Weights)
        else known[id(demands.weights)],
        [0] * (len(unit_of) - 1),
        demands.num_stages,
        demands.shares,
    )
    if len(unit_of) < demands.num_stages:
        return Ideal(max(heaviest, default=0), frozenset(openable))
    bound = lightest_maximum(parts)
    inside = {unit_of[cut] for cut in cheapest_cuts(parts) if cut + 1 < len(unit_of) and unit_of[cut] == unit_of[cut + 1]}
    return Ideal(bound, frozenset(inside))


def _can_open(traced: TracedRegion, path: str, opened: Collection[str]) -> bool:
    module = traced.root.get_submodule(path)
    return path not in opened and path not in traced.kept_whole and next(module.children(), None) is not None
