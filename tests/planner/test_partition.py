"""The exact solver against brute force over all cuts, a plain dynamic programme and an integer programme."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp

from lightning_fxpipe.errors import PartitionError
from lightning_fxpipe.planner.partition import Demands, NothingFits, Weights, cheapest_cuts, lightest_maximum

Numbers = list[int]
Costs = list[int | None]


def solve(weights: Sequence[int] | Weights, cut_costs: Sequence[int | None], num_stages: int) -> tuple[int, ...]:
    """The cuts if all stages are alike."""
    return cheapest_cuts(Demands(weights if isinstance(weights, Weights) else Weights(tuple(weights)), cut_costs, num_stages))


def stage_weights(weights: Numbers, cuts: tuple[int, ...]) -> list[int]:
    bounds = [0, *(cut + 1 for cut in cuts), len(weights)]
    return [sum(weights[start:end]) for start, end in zip(bounds, bounds[1:], strict=False)]


def score(weights: Numbers, costs: Costs, cuts: tuple[int, ...]) -> tuple[int, int]:
    """Heaviest stage, then bytes."""
    return max(stage_weights(weights, cuts)), sum(costs[cut] or 0 for cut in cuts)


def best_of(weights: Numbers, costs: Costs, partitions: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The best of some partitions: the heaviest stage is lightest; then without units that are as heavy by themselves; then
    the fewest bytes cross."""
    while True:
        heaviest = min(max(stage_weights(weights, cuts)) for cuts in partitions)
        partitions = [cuts for cuts in partitions if max(stage_weights(weights, cuts)) == heaviest]
        if not heaviest or heaviest not in weights:
            break
        weights = [weight if weight != heaviest else 0 for weight in weights]
    least = min(score(weights, costs, cuts)[1] for cuts in partitions)
    return [cuts for cuts in partitions if score(weights, costs, cuts)[1] == least]


def all_partitions(costs: Costs, num_stages: int) -> list[tuple[int, ...]]:
    legal = [position for position, cost in enumerate(costs) if cost is not None]
    return list(combinations(legal, num_stages - 1))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Numbers, Costs, int]:
    # Few different numbers, so that zeros and ties are common.
    numbers = st.sampled_from([0, 0, 1, 1, 2, 3, 5, 100])
    count = draw(st.integers(1, 9))
    weights = draw(st.lists(numbers, min_size=count, max_size=count))
    costs = draw(st.lists(st.none() | numbers, min_size=count - 1, max_size=count - 1))
    return weights, costs, draw(st.integers(1, 5))


@given(problems())
@settings(max_examples=400, deadline=None)
def test_solve_equals_brute_force(problem: tuple[Numbers, Costs, int]) -> None:
    weights, costs, num_stages = problem
    partitions = all_partitions(costs, num_stages)
    if not partitions:
        legal = sum(cost is not None for cost in costs)
        with pytest.raises(PartitionError) as caught:
            solve(weights, costs, num_stages)
        assert caught.value.what == f"Cannot form {num_stages} stages."
        assert caught.value.observed == f"{legal} place{'s'[: legal != 1]} for a cut, so at most {legal + 1} stage{'s'[:legal]}"
        return
    cuts = solve(weights, costs, num_stages)
    assert len(cuts) == num_stages - 1
    assert list(cuts) == sorted(set(cuts))
    assert all(costs[cut] is not None for cut in cuts)
    best = min(score(weights, costs, partition) for partition in partitions)
    assert lightest_maximum(Demands(Weights(tuple(weights)), costs, num_stages)) == best[0]
    equally_good = best_of(weights, costs, partitions)
    assert cuts in equally_good
    # Ties go to the leftmost cuts: no other best choice has every cut as far left or further.
    assert not [p for p in equally_good if p != cuts and all(a <= b for a, b in zip(p, cuts, strict=True))]


@given(
    st.lists(st.integers(0, 10**12), min_size=30, max_size=120),
    st.integers(2, 12),
    st.data(),
)
@settings(max_examples=40, deadline=None)
def test_heaviest_stage_of_long_chains_equals_a_plain_dynamic_programme(
    weights: Numbers, num_stages: int, data: st.DataObject
) -> None:
    costs: Costs = data.draw(
        st.lists(st.none() | st.integers(0, 10**12), min_size=len(weights) - 1, max_size=len(weights) - 1).filter(
            lambda costs: sum(cost is not None for cost in costs) >= num_stages - 1
        )
    )
    cuts = solve(weights, costs, num_stages)
    assert score(weights, costs, cuts) == dynamic_programme(weights, costs, num_stages)


def dynamic_programme(weights: Numbers, costs: Costs, num_stages: int) -> tuple[int, int]:
    """Quadratic, a run for each limit, and for the least bytes one more: too plain to be wrong."""
    count = len(weights)
    ends = [i + 1 for i, cost in enumerate(costs) if cost is not None]
    limits: list[tuple[list[int], int]] = []  # sums from the first unit on, and what a stage may have of them

    def fits(start: int, end: int) -> bool:
        return all(sums[end] - sums[start] <= limit for sums, limit in limits)

    while not limits or 0 < limits[-1][1] in weights:
        weights = [weight if not limits or weight < limits[-1][1] else 0 for weight in weights]
        prefix = [0, *accumulate(weights)]
        heaviest: dict[int, float] = {end: prefix[end] if fits(0, end) else float("inf") for end in (*ends, count)}
        for _ in range(num_stages - 1):
            heaviest = {
                end: min(
                    (max(heaviest[s], prefix[end] - prefix[s]) for s in ends if s < end and s in heaviest and fits(s, end)),
                    default=float("inf"),
                )
                for end in (*ends, count)
            }
        limits.append((prefix, int(heaviest[count])))
    cheapest: dict[int, float] = {end: 0 if fits(0, end) else float("inf") for end in (*ends, count)}
    for _ in range(num_stages - 1):
        cheapest = {
            end: min(
                (cheapest[s] + (costs[s - 1] or 0) for s in ends if s < end and fits(s, end)),
                default=float("inf"),
            )
            for end in (*ends, count)
        }
    return limits[0][1], int(cheapest[count])


def random_problem(numbers: random.Random) -> tuple[Numbers, Costs, int]:
    """With enough legal cuts, and numbers so small that many choices are equally balanced."""
    count = numbers.randint(5, 12)
    weights = [numbers.choice([0, 1, 1, 2, 3, 7]) for _ in range(count)]
    costs = [numbers.choice([None, None, 0, 1, 2, 5, 9]) for _ in range(count - 1)]
    legal = sum(cost is not None for cost in costs)
    return weights, costs, numbers.randint(1, min(5, legal + 1))


@pytest.mark.parametrize("first_seed", range(0, 200, 20))
def test_solve_equals_an_integer_programme(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 20):
        weights, costs, num_stages = random_problem(random.Random(seed))
        cuts = solve(weights, costs, num_stages)
        assert score(weights, costs, cuts) == integer_programme(weights, costs, num_stages), f"seed {seed}"


def integer_programme(weights: Numbers, costs: Costs, num_stages: int) -> tuple[int, int]:
    """The heaviest stage, then under that limit the cuts' costs, by a solver of another kind.

    A variable of 0 or 1 says whether a unit is in a stage; from one unit to the next the stage's number grows by 1 where a cut
    is, and by nothing where none may be.
    """
    count = len(weights)
    is_in = np.eye(count * num_stages).reshape(count, num_stages, -1)  # picks the variable of a unit and a stage
    number_of = np.einsum("usv,s->uv", is_in, np.arange(num_stages))
    crossed = number_of[1:] - number_of[:-1]

    limits: list[tuple[np.ndarray, int]] = []  # what stages hold, and what they may

    def programme(objective: np.ndarray, load: np.ndarray) -> int:
        """Least value; the last variable is at least as heavy as each stage by ``load``."""

        def among(rows: np.ndarray, low: object, high: object, factor: float = 0.0) -> LinearConstraint:
            return LinearConstraint(np.hstack([rows, np.full((len(rows), 1), -factor)]), low, high)

        found = milp(
            objective,
            integrality=np.append(np.ones(count * num_stages), 0),
            bounds=(0, np.append(np.ones(count * num_stages), sum(weights))),
            constraints=[
                among(is_in.sum(axis=1), 1, 1),
                among(number_of[[0, -1]], [0, num_stages - 1], [0, num_stages - 1]),
                among(crossed, 0, [0 if cost is None else 1 for cost in costs]),
                among(load, -np.inf, 0, 1),
                *(among(rows, -np.inf, limit) for rows, limit in limits),
            ],
        )
        assert found.success, found.message
        return round(found.fun)

    left = [*weights]
    while not limits or 0 < limits[-1][1] in left:
        left = [weight if not limits or weight < limits[-1][1] else 0 for weight in left]
        load = np.einsum("usv,u->sv", is_in, left)
        limits.append((load, programme(np.append(np.zeros(count * num_stages), 1), load)))
    paid = np.array([cost or 0 for cost in costs]) @ crossed
    return limits[0][1], programme(np.append(paid, 0), load)


def test_balances_before_it_saves_bytes() -> None:
    # A free cut after unit 0 would make a stage of 3; the dear one in the middle makes two of 2.
    assert solve([1, 1, 1, 1], [0, 1000, 0], 2) == (1,)


def test_saves_bytes_among_equally_balanced_cuts() -> None:
    assert solve([4, 0, 0, 4], [9, 2, 5], 2) == (1,)


def test_ties_go_to_the_left() -> None:
    assert solve([0, 0, 0, 0, 0], [0, 0, 0, 0], 3) == (0, 1)


def test_forms_empty_looking_stages_rather_than_fewer() -> None:
    # All weight lies in one unit, still exactly the number of stages asked for comes out.
    assert len(solve([0, 7, 0, 0], [1, 1, 1], 4)) == 3


def test_one_stage_needs_no_cut() -> None:
    assert solve([3, 4], [None], 1) == ()
    assert solve([], [], 1) == ()


def test_error_names_counts_and_the_way_out() -> None:
    with pytest.raises(PartitionError) as caught:
        solve([1, 1, 1, 1], [5, None, 5], 4)
    message = str(caught.value)
    assert "Cannot form 4 stages." in message
    assert "2 places for a cut, so at most 3 stages" in message
    assert "at least 3 places for a cut" in message
    assert "at most 3 devices" in message


@pytest.mark.parametrize("num_stages", [0, -1])
def test_refuses_fewer_than_one_stage(num_stages: int) -> None:
    with pytest.raises(PartitionError, match=f"Cannot form {num_stages} stages"):
        solve([1, 2, 3], [1, 1], num_stages)


def test_ties_of_inner_cuts_go_to_the_left() -> None:
    assert solve([0, 0, 1, 1], [1, 1, 1], 3) == (0, 2)


def test_an_embedding_that_is_heavier_than_any_stage_leaves_the_others_equal() -> None:
    """GPT-2 in eight stages: by the heaviest stage alone, five blocks in each of two stages were as good as two in six."""
    weights = Weights((0, *[2] * 12, 1, 0), ((12, (0, 13)),))
    cuts = cheapest_cuts(Demands(weights, [1] * 14, 8))
    assert weights.of_stages(cuts) == [12, 4, 4, 4, 4, 4, 4, 13]


# ---------------------------------------------------------------------- more than equal stages


@st.composite
def richer_problems(draw: st.DrawFn) -> Demands:
    """Units that have weights in common, stages that may hold more than others, and limits where stages may begin."""
    numbers = st.sampled_from([0, 1, 1, 2, 3, 5, 20])
    count = draw(st.integers(1, 8))
    num_stages = draw(st.integers(1, 4))

    def weights() -> Weights:
        users = st.sets(st.integers(0, count - 1), min_size=2, max_size=3).map(lambda users: tuple(sorted(users)))
        shared = draw(st.lists(st.tuples(numbers, users), max_size=2)) if count > 1 else []
        return Weights(tuple(draw(st.lists(numbers, min_size=count, max_size=count))), tuple(shared))

    shares = draw(st.just(()) | st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=num_stages, max_size=num_stages))
    firsts = []
    if draw(st.booleans()):
        firsts = [weights().firsts(draw(st.integers(1, 20))) for _ in range(num_stages)]
    each = [weights() for _ in range(num_stages)] if draw(st.booleans()) else weights()
    costs = draw(st.lists(st.none() | numbers, min_size=count - 1, max_size=count - 1))
    return Demands(each, costs, num_stages, shares, firsts)


def allowed(demands: Demands) -> list[tuple[int, ...]]:
    found = []
    for cuts in all_partitions([*demands.cut_costs], demands.num_stages):
        begins, ends = (0, *(cut + 1 for cut in cuts)), (*cuts, demands.num_units - 1)
        if all(firsts[end] <= begin for firsts, begin, end in zip(demands.firsts, begins, ends, strict=False)):
            found.append(cuts)
    return found


def held(demands: Demands, cuts: tuple[int, ...]) -> list[int]:
    """What each stage holds, by sets."""
    begins, ends = (0, *(cut + 1 for cut in cuts)), (*cuts, demands.num_units - 1)
    found = []
    for stage, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        weights = demands.weights if isinstance(demands.weights, Weights) else demands.weights[stage]
        own = sum(weights.own[begin : end + 1])
        found.append(own + sum(weight for weight, users in weights.shared if {*users} & {*range(begin, end + 1)}))
    return found


@given(richer_problems())
@settings(max_examples=600, deadline=None)
def test_what_stages_hold_in_common_and_may_hold_equals_brute_force(demands: Demands) -> None:
    partitions = allowed(demands)
    if not partitions:
        with pytest.raises((PartitionError, NothingFits)):
            cheapest_cuts(demands)
        return
    shares = demands.shares or [1.0] * demands.num_stages

    def least_limit(cuts: tuple[int, ...]) -> int:
        """The least number of which no stage holds more than its share."""
        return next(
            limit
            for limit in range(10**4)
            if all(weight <= int(limit * share) for weight, share in zip(held(demands, cuts), shares, strict=True))
        )

    best = min(map(least_limit, partitions))
    assert lightest_maximum(demands) == best
    cuts = cheapest_cuts(demands)
    assert cuts in partitions
    assert least_limit(cuts) == best
    assert demands.of_stages(cuts) == held(demands, cuts)
    for weights in demands.kinds:
        assert [*map(weights.of_unit, range(demands.num_units))] == [weights.of(u, u + 1) for u in range(demands.num_units)]


def test_among_equally_heavy_stages_what_is_used_again_counts_where_it_is_first() -> None:
    """Two passes through the same layers: wherever the cut falls, one stage holds all. It computes half then."""
    weights = Weights((0,) * 8, tuple((1, (layer, layer + 4)) for layer in range(4)))
    assert cheapest_cuts(Demands(weights, [1] * 7, 2)) == (1,)


def test_a_stage_that_may_hold_half_gets_half() -> None:
    assert cheapest_cuts(Demands(Weights((1,) * 9), [0] * 8, 2, (1.0, 0.5))) == (5,)
    assert cheapest_cuts(Demands(Weights((1,) * 9), [0] * 8, 2, (0.5, 1.0))) == (2,)


def test_a_limit_that_depends_on_the_last_unit() -> None:
    weights = Weights((3, 1, 2, 2), ((4, (0, 3)),))
    assert weights.firsts_within([7, 7, 7, 7]) == weights.firsts(7) == [0, 1, 1, 3]
    assert weights.firsts_within([6, 8, 3, 20]) == [1, 0, 1, 0]


def test_where_nothing_fits_it_is_told_apart_from_too_few_cuts() -> None:
    with pytest.raises(NothingFits):
        cheapest_cuts(Demands(Weights((1, 1)), [0], 2, (), [[0, 0], [2, 2]]))
    with pytest.raises(NothingFits):
        cheapest_cuts(Demands(Weights((1, 1)), [0], 1, (), [[1, 2]]))
    with pytest.raises(PartitionError, match="Cannot form 3 stages"):
        cheapest_cuts(Demands(Weights((1, 1)), [0], 3, (), [[0, 0]] * 3))
