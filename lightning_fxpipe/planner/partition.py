"""The solver: where to cut a chain so that the heaviest stage is as light as possible, then as few bytes as possible cross.

Pure numbers, so that it can be checked against brute force. Unlike the greedy or approximate balancers of other pipeline
packages (torchgpipe's ``blockpartition``, fairscale's ``auto_shard``) it is exact, and it returns exactly the number of
stages asked for.

A stage never gets lighter by one more unit. So all that a limit says of a stage that ends with some unit is with which unit it
may begin at the earliest. The solver needs to know nothing else of weights; and what else is asked of stages (that they fit
into a memory, that modules are where the user wants them) is said in the same way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from lightning_fxpipe.errors import PartitionError

# How often weights are taken away: few units are heavier than a stage of others.
_MAX_ROUNDS = 8

# For each last unit of a stage the first one that it may begin with; the one after the last where it may not end there.
Firsts = Sequence[int]


@dataclass(frozen=True)
class Weights:
    """Weights of the units of a chain, not negative.

    Attributes:
        own: Of each unit, what it shares with no other.
        shared: What several units have in common, such as a parameter that is used twice: its weight, and the positions of
            these units, increasing. A stage has it once, however many of them it has; each stage that has one of them has it.
    """

    own: tuple[int, ...]
    shared: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @classmethod
    def of_users(cls, num_units: int, users: Iterable[tuple[int, Sequence[int]]]) -> Weights:
        """Returns the weights of units, from each tensor's weight and the positions of its users, increasing."""
        own, shared = [0] * num_units, []
        for weight, positions in users:
            if len(positions) == 1:
                own[positions[0]] += weight
            else:
                shared.append((weight, tuple(positions)))
        return cls(tuple(own), tuple(shared))

    @property
    def total(self) -> int:
        """Weight of a stage of all units."""
        return self.of(0, len(self.own))

    def of(self, start: int, end: int) -> int:
        """Returns the weight of a stage of the units from ``start`` on and before ``end``."""
        shared = (weight for weight, users in self.shared if bisect_left(users, start) < bisect_left(users, end))
        return self._ends[end] - self._ends[start] + sum(shared)

    def of_unit(self, unit: int) -> int:
        """Returns the weight of a stage of one unit, regardless of the tensors that it shares with others."""
        return self.own[unit] + sum(self.shared[index][0] for index in self._shared_by_unit[unit])

    def of_stages(self, cuts: Sequence[int]) -> list[int]:
        """Returns the weight of each stage between cuts."""
        bounds = [0, *(cut + 1 for cut in cuts), len(self.own)]
        return [self.of(start, end) for start, end in zip(bounds, bounds[1:], strict=False)]

    def firsts(self, limit: int) -> list[int]:
        """With which unit a stage may begin that is within a limit, by its last one."""
        found = []
        num_users = [0] * len(self.shared)  # in the stage
        first = weight = 0
        for last in range(len(self.own)):
            weight += self.own[last]
            for index in self._shared_by_unit[last]:
                weight += 0 if num_users[index] else self.shared[index][0]
                num_users[index] += 1
            while weight > limit and first <= last:
                weight -= self.own[first]
                for index in self._shared_by_unit[first]:
                    num_users[index] -= 1
                    weight -= 0 if num_users[index] else self.shared[index][0]
                first += 1
            found.append(first)
        return found

    def firsts_within(self, limits: Sequence[int]) -> list[int]:
        """Finds the first units for a limit that depends on the last unit."""

        def first_within(last: int, limit: int) -> int:
            return bisect_left(range(last + 1), True, key=lambda first: self.of(first, last + 1) <= limit)

        return [first_within(last, limit) for last, limit in enumerate(limits)]

    def counted_once(self) -> Weights:
        """Returns weights in which only the first of several units counts their common part."""
        own = [*self.own]
        for weight, users in self.shared:
            own[users[0]] += weight
        return Weights(tuple(own))

    def without_units_of(self, weight: int) -> Weights | None:
        """Returns weights in which units of this weight, and their common parts, weigh nothing; None if there are no such
        units.
        """
        found = {unit for unit in range(len(self.own)) if self.of_unit(unit) == weight}
        if not found or not weight:
            return None
        own = tuple(0 if unit in found else own for unit, own in enumerate(self.own))
        return Weights(own, tuple(each for each in self.shared if found.isdisjoint(each[1])))

    @cached_property
    def _ends(self) -> list[int]:
        return [0, *accumulate(self.own)]

    @cached_property
    def _shared_by_unit(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.own]
        for index, (_, users) in enumerate(self.shared):
            for unit in users:
                found[unit].append(index)
        return found


@dataclass(frozen=True)
class Demands:
    """Demands on the stages of a chain.

    Attributes:
        weights: Of the chain's units; or for each stage, where a unit weighs more in some of them than in others.
        cut_costs: Cost of the cut after each unit but the last; None where no cut is allowed.
        num_stages: Number of stages.
        shares: For each stage how much it may hold, in proportion to the others; empty where all may hold as much.
        firsts: For each stage with which units it may begin, whatever it weighs; empty where with any.
    """

    weights: Weights | Sequence[Weights]
    cut_costs: Sequence[int | None]
    num_stages: int
    shares: Sequence[float] = ()
    firsts: Sequence[Firsts] = ()

    @cached_property
    def num_units(self) -> int:
        """Units of the chain."""
        return len((self.weights if isinstance(self.weights, Weights) else self.weights[0]).own)

    @cached_property
    def legal(self) -> list[int]:
        """Positions of the units after which a cut may fall."""
        return [position for position, cost in enumerate(self.cut_costs) if cost is not None]

    @property
    def are_equal(self) -> bool:
        """True if the same is asked of all stages."""
        return isinstance(self.weights, Weights) and not self.shares and not self.firsts

    @property
    def kinds(self) -> Sequence[Weights]:
        """The weights, as a list."""
        return [self.weights] if isinstance(self.weights, Weights) else self.weights

    @property
    def most(self) -> int:
        """A limit that no stage exceeds."""
        return max((int(each.total / min(self.shares, default=1.0)) + 1 for each in self.kinds), default=0)

    def of_stages(self, cuts: Sequence[int]) -> list[int]:
        """Returns the weight of each stage between cuts."""
        if isinstance(self.weights, Weights):
            return self.weights.of_stages(cuts)
        return [weights.of_stages(cuts)[stage] for stage, weights in enumerate(self.weights)]

    def heaviest(self, cuts: Sequence[int]) -> float:
        """Weight of the heaviest stage between cuts, in proportion to what each may hold."""
        shares = self.shares or (1.0,) * self.num_stages
        return max(weight / share for weight, share in zip(self.of_stages(cuts), shares, strict=True))

    def rest(self, limit: int) -> Demands | None:
        """With what is left of the weights when no stage is heavier than a limit, see :func:`cheapest_cuts`; None: all."""
        lighter = self.without_dominant(limit)
        if lighter is not None:
            return lighter
        if any(each.shared for each in self.kinds):
            known = {id(each): each.counted_once() for each in self.kinds}
            if isinstance(self.weights, Weights):
                return replace(self, weights=known[id(self.weights)])
            return replace(self, weights=[known[id(each)] for each in self.weights])
        return None

    def without_dominant(self, limit: int) -> Demands | None:
        """Without the units that are as heavy as a limit by themselves; None where there are none, or stages differ."""
        if not isinstance(self.weights, Weights) or self.shares:
            return None
        lighter = self.weights.without_units_of(limit)
        return None if lighter is None else replace(self, weights=lighter)

    def firsts_of(self, limit: int) -> list[Firsts]:
        """With which units each stage may begin, where no stage holds more than its share of a limit."""
        known: dict[tuple[int, int], Firsts] = {}
        found: list[Firsts] = []
        for stage in range(self.num_stages):
            weights = self.weights if isinstance(self.weights, Weights) else self.weights[stage]
            within = int(limit * self.shares[stage]) if self.shares else limit
            if (id(weights), within) not in known:
                known[id(weights), within] = weights.firsts(within)
            firsts = known[id(weights), within]
            found.append([*map(max, firsts, self.firsts[stage])] if self.firsts else firsts)
        return found


def cheapest_cuts(demands: Demands) -> tuple[int, ...]:
    """Cuts a chain into contiguous, non-empty stages.

    Among all choices of ``num_stages - 1`` legal cuts, first the weight of the heaviest stage is minimised, in proportion to
    what each may hold. Then, within that limit, the same for what is left of weights:

    - where one unit alone is as heavy as the heaviest stage, such as a large embedding, it decides nothing about the others: it
      counts as nothing, and they are made equal among themselves;
    - what several stages have counts in the first of them only, which stands for what is computed.

    Then the sum of the cuts' costs is minimised. Ties go to the leftmost cuts.

    Returns:
        Position of each cut, increasing: a cut at ``i`` lies after unit ``i``.

    Raises:
        PartitionError: There are fewer legal cuts than needed.
        NothingFits: There are enough, but none with which each stage begins where it may.
    """
    num_stages, num_legal = demands.num_stages, len(demands.legal)
    if num_stages < 1 or num_stages - 1 > num_legal:
        raise PartitionError(
            f"Cannot form {num_stages} stages.",
            observed=f"{_places(num_legal)}, so at most {num_legal + 1} stage{'s' if num_legal else ''}",
            expected=f"at least {_places(max(num_stages - 1, 0))}",
            todo=f"Use at most {num_legal + 1} devices, one per stage."
            if num_legal
            else "Train on one device, or move the model's layers into modules whose code does not read tensor values.",
        )
    if num_stages == 1:
        lightest_maximum(demands)  # or nothing fits
        return ()
    limit = lightest_maximum(demands)
    firsts = demands.firsts_of(limit)
    for _ in range(_MAX_ROUNDS):
        rest = demands.rest(limit)
        if rest is None:
            break
        demands = replace(rest, firsts=firsts)
        limit = lightest_maximum(demands)
        firsts = demands.firsts_of(limit)
    return _cheapest_cuts(demands, firsts)


class NothingFits(Exception):
    """No cuts are within the demands; who has made these knows what to say."""


def lightest_maximum(demands: Demands) -> int:
    """Weight of the heaviest stage in the best partition; there must be enough legal cuts. With shares it is the least limit
    of which no stage holds more than its share.

    Raises:
        NothingFits: Whatever the stages weigh, they cannot begin where they may.
    """
    most = demands.most
    found = bisect_left(range(most), True, key=lambda limit: _can_end(demands, demands.firsts_of(limit)))
    if found == most and not _can_end(demands, demands.firsts_of(most)):
        raise NothingFits
    return found


def _can_end(demands: Demands, firsts: Sequence[Firsts]) -> bool:
    """Returns True if there are cuts so that each stage begins where it may."""
    ends = [*demands.legal, demands.num_units - 1]
    # Whether the stages up to one can end at each place; before the first stage they end before the first unit.
    can_end = [firsts[0][end] == 0 for end in ends] if demands.num_units else [True]
    for stage in range(1, demands.num_stages):
        latest, following = -1, []  # the latest place before this one where the stage before can end
        for place, end in enumerate(ends):
            following.append(latest >= 0 and ends[latest] + 1 >= firsts[stage][end])
            latest = place if can_end[place] else latest
        can_end = following
    return can_end[-1]


def _cheapest_cuts(demands: Demands, firsts: Sequence[Firsts]) -> tuple[int, ...]:
    """Dynamic programme over (number of cuts, last cut).

    ``best[i]`` is the least total cost of k cuts of which the last is ``legal[i]``, where all k stages begin where they may.
    """
    infinity = float("inf")
    legal, costs = demands.legal, demands.cut_costs
    best = [float(costs[p] or 0) if firsts[0][p] == 0 else infinity for p in legal]
    parents: list[list[int]] = []
    for stage in range(1, demands.num_stages - 1):
        following = [infinity] * len(legal)
        parent = [-1] * len(legal)
        for i, position in enumerate(legal):
            start = bisect_left(legal, firsts[stage][position] - 1)  # the first earlier cut within reach
            if start < i:
                least = min(best[start:i])
                if least < infinity:
                    parent[i] = best.index(least, start, i)
                    following[i] = least + (costs[position] or 0)
        parents.append(parent)
        best = following
    begins = firsts[-1][demands.num_units - 1]
    reachable: Iterable[int] = (i for i, p in enumerate(legal) if best[i] < infinity and p + 1 >= begins)
    last = min(reachable, key=lambda i: best[i])
    cuts = [last]
    for parent in reversed(parents):
        cuts.append(parent[cuts[-1]])
    return tuple(legal[i] for i in reversed(cuts))


def _places(count: int) -> str:
    return f"{count} place{'' if count == 1 else 's'} for a cut"
