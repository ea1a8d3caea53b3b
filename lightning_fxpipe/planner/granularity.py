"""How far a region is opened: as little as a good partition needs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from lightning_fxpipe.errors import PartitionError
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
    predicted = _predict(root, call, rule.num_stages) if rule.is_by_parameters else _Prediction()
    opened = {*rule.has_to_be_open(root), *predicted.opened}
    best, least = None, math.inf
    while True:
        costs = UnitCosts(chain=build_chain(trace(opened=opened, check=False)), call=call)
        if rule.split_points:
            return costs
        demands = rule.demands(costs)
        heaviest = _heaviest(demands)
        if best is not None and heaviest > least:
            return best  # with more open, no cut can fall where the best one did
        best, least = costs, heaviest
        if predicted.stage_weights and _runs_in_order(costs.chain) and _is_as_good(demands, predicted):
            return costs
        candidates = _worth_opening(demands, _openable(costs.chain, opened))
        if not candidates:
            return costs
        opened |= candidates


@dataclass(frozen=True)
class _Prediction:
    """The best partition as parameters tell without a trace, if modules run in the order in which they were registered.

    Another order only costs further traces: which modules cuts fall into is decided by these.

    Attributes:
        opened: Modules that cuts fall into.
        stage_weights: Numbers of parameters in the stages, the largest first: opening more gains nothing. Empty if unknown.
    """

    opened: frozenset[str] = frozenset()
    stage_weights: tuple[int, ...] = ()


def _predict(root: nn.Module, call: Recordable, num_stages: int) -> _Prediction:
    opened: set[str] = set()
    best = _Prediction()
    while True:
        units = [*_closed_below(root, call.opened_path or "", opened)]
        openable = {position: path for position, (path, module) in enumerate(units) if _has_children(module)}
        demands = Demands(_parameters_of([module for _, module in units]), [0] * (len(units) - 1), num_stages)
        weights = _stage_weights(demands)
        if weights and (not best.stage_weights or weights < best.stage_weights):
            cuts = cheapest_cuts(demands)
            stages = [(path, bisect_left(cuts, position)) for position, (path, _) in enumerate(units)]
            inside = {path: {stage for each, stage in stages if each.startswith(f"{path}.")} for path in opened}
            best = _Prediction(frozenset(path for path in opened if len(inside[path]) > 1), weights)
        candidates = _worth_opening(demands, openable)
        if not candidates:
            return best
        opened |= candidates


def _runs_in_order(chain: Chain) -> bool:
    """True if modules with parameters run in the order in which they were registered."""
    positions = {path: position for position, (path, _) in enumerate(chain.traced.root.named_modules())}
    calls = (unit.nodes[0] for unit in chain.units if unit.num_parameters and unit.nodes[0].op == "call_module")
    found = [positions[str(node.target)] for node in calls]
    return found == sorted(found)


def _is_as_good(demands: Demands, predicted: _Prediction) -> bool:
    weights = _stage_weights(demands)
    return weights is not None and weights <= predicted.stage_weights


def _stage_weights(demands: Demands) -> tuple[int, ...] | None:
    """Weights of the stages in the best partition, the heaviest first; None if there is none."""
    try:
        return tuple(sorted(demands.of_stages(cheapest_cuts(demands)), reverse=True))
    except (PartitionError, NothingFits):
        return None


def _closed_below(root: nn.Module, path: str, opened: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules inside one that stay whole, with their paths; parameters of opened ones count nowhere."""
    for name, module in root.get_submodule(path).named_children():
        inside = f"{path}.{name}" if path else name
        if inside in opened:
            yield from _closed_below(root, inside, opened)
        else:
            yield inside, module


def _parameters_of(modules: Sequence[nn.Module]) -> Weights:
    """Numbers of the modules' parameters."""
    users: dict[nn.Parameter, list[int]] = {}
    for position, module in enumerate(modules):
        for parameter in module.parameters():
            users.setdefault(parameter, []).append(position)
    return Weights.of_users(len(modules), ((parameter.numel(), positions) for parameter, positions in users.items()))


def _openable(chain: Chain, opened: Collection[str]) -> dict[int, str]:
    """Paths of the whole modules that can be opened, by position of their unit."""
    calls = ((position, unit.nodes[0]) for position, unit in enumerate(chain.units) if unit.nodes[0].op == "call_module")
    paths = ((position, str(node.target)) for position, node in calls)
    return {position: path for position, path in paths if _can_open(chain.traced, path, opened)}


def _worth_opening(demands: Demands, openable: Mapping[int, str]) -> set[str]:
    """Modules to open for a better partition.

    Args:
        demands: Demands on the stages.
        openable: Paths of the modules that can be opened, by position of their unit.
    """
    if demands.num_stages < 1:
        return set()  # the solver says what is wrong
    if len(demands.legal) < demands.num_stages - 1:
        return set(openable.values())
    ideal, heaviest = ideal_partition(demands, openable), _heaviest(demands)
    while heaviest <= GOOD_ENOUGH * ideal.bound:
        rest = demands.without_dominant(int(heaviest))  # such as a large embedding; are the others equal among themselves?
        if rest is None:
            return set()
        demands = rest
        ideal, heaviest = ideal_partition(demands, openable), _heaviest(demands)
    across = {path for position, path in openable.items() if position in ideal.cut_units}
    slack = (GOOD_ENOUGH - 1) * ideal.bound
    weights = demands.kinds[0]
    heavy = {path for position, path in openable.items() if weights.of_unit(position) > slack}
    return across or heavy or (set(openable.values()) if heaviest == math.inf else set())


def _heaviest(demands: Demands) -> float:
    """Weight of the heaviest stage in the best partition; infinite if there is none."""
    if not 0 <= demands.num_stages - 1 <= len(demands.legal):
        return math.inf
    try:
        return lightest_maximum(demands)
    except NothingFits:
        return math.inf


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
    return path not in opened and path not in traced.kept_whole and _has_children(traced.root.get_submodule(path))


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None
