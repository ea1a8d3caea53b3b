"""The exact solver against brute force over all cuts, a plain dynamic programme and an integer programme."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp

from lightning_fxpipe.errors import PartitionError
from lightning_fxpipe.planner.partition import Demands, Weights, lightest_maximum, solve

Numbers = list[int]
Costs = list[int | None]


def stage_weights(weights: Numbers, cuts: tuple[int, ...]) -> list[int]:
    bounds = [0, *(cut + 1 for cut in cuts), len(weights)]
    return [sum(weights[start:end]) for start, end in zip(bounds, bounds[1:], strict=False)]


def score(weights: Numbers, costs: Costs, cuts: tuple[int, ...]) -> tuple[int, int]:
    """Heaviest stage, then bytes: what is minimised, in this order."""
    return max(stage_weights(weights, cuts)), sum(costs[cut] or 0 for cut in cuts)


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
    assert score(weights, costs, cuts) == best
    assert lightest_maximum(Demands(Weights(tuple(weights)), costs, num_stages)) == best[0]
    # Ties go to the leftmost cuts: no other best choice has every cut as far left or further.
    equally_good = [partition for partition in partitions if score(weights, costs, partition) == best]
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
    """Quadratic, and for the least bytes a second run under the heaviest stage's limit: too plain to be wrong."""
    count = len(weights)
    prefix = [0]
    for weight in weights:
        prefix.append(prefix[-1] + weight)
    ends = [i + 1 for i, cost in enumerate(costs) if cost is not None]
    heaviest: dict[int, float] = {end: prefix[end] for end in (*ends, count)}
    for _ in range(num_stages - 1):
        heaviest = {
            end: min(
                (max(heaviest[start], prefix[end] - prefix[start]) for start in ends if start < end and start in heaviest),
                default=float("inf"),
            )
            for end in (*ends, count)
        }
    limit = heaviest[count]
    cheapest: dict[int, float] = {end: 0 if prefix[end] <= limit else float("inf") for end in (*ends, count)}
    for _ in range(num_stages - 1):
        cheapest = {
            end: min(
                (cheapest[s] + (costs[s - 1] or 0) for s in ends if s < end and prefix[end] - prefix[s] <= limit),
                default=float("inf"),
            )
            for end in (*ends, count)
        }
    return int(limit), int(cheapest[count])


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
    load = np.einsum("usv,u->sv", is_in, weights)

    def programme(objective: np.ndarray, limit: float, limit_factor: float) -> int:
        """Least value; the last variable is the heaviest stage's weight where ``limit_factor`` is 1."""

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
                among(load, -np.inf, limit, limit_factor),
            ],
        )
        assert found.success, found.message
        return round(found.fun)

    heaviest = programme(np.append(np.zeros(count * num_stages), 1), 0, 1)
    paid = np.array([cost or 0 for cost in costs]) @ crossed
    return heaviest, programme(np.append(paid, 0), heaviest, 0)


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
