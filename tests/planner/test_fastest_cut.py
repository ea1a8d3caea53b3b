"""The fastest cut against brute force over all cuts, and published partitions."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import combinations

import pytest

from lightning_fxpipe.errors import PartitionError, ScheduleError
from lightning_fxpipe.planner import fastest_cut as module
from lightning_fxpipe.planner.fastest_cut import FastestCut, MakeTable, fastest_cut, merged
from lightning_fxpipe.simulation.actions import ActionTable
from lightning_fxpipe.simulation.costs import Link, Overhead, StageCosts
from lightning_fxpipe.simulation.orders import gpipe, hand_made_zero_bubble, one_forward_one_backward
from lightning_fxpipe.simulation.simulator import Simulation, run_table
from lightning_fxpipe.simulation.zero_bubble import zero_bubble

ORDERS: tuple[Callable[[int, int], ActionTable], ...] = (gpipe, one_forward_one_backward, hand_made_zero_bubble)


def by_counts(order: Callable[[int, int], ActionTable], count: int) -> MakeTable:
    return lambda stages: order(len(stages), count)


def equal_parts(*forwards: float) -> list[StageCosts]:
    """Units whose backward takes twice as long as their forward."""
    return [StageCosts(forward_seconds=f, input_backward_seconds=f, weight_backward_seconds=f) for f in forwards]


def simulated(
    units: list[StageCosts], cut_bytes: list[float | None], cuts: tuple[int, ...], make: MakeTable, **options: object
) -> Simulation:
    bounds = [0, *(cut + 1 for cut in cuts), len(units)]
    outputs = [*(cut_bytes[cut] or 0.0 for cut in cuts), 0.0]
    stages = [merged(units[a:b], output) for a, b, output in zip(bounds, bounds[1:], outputs, strict=False)]
    return run_table(make(stages), stages, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("forwards", "others"),
    [
        ((8, 11, 2, 1, 18, 5, 4, 11), [(0, 3, 4), (2, 4, 5)]),
        ((1170, 2846, 1146, 4254, 2199, 1289, 6888, 2312), [(2, 5, 6), (3, 5, 6)]),
        ((1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000), [(3, 5, 6)]),
    ],
)
def test_it_is_never_slower_than_published_partitions(forwards: tuple[int, ...], others: list[tuple[int, ...]]) -> None:
    """Of pytorch's PR 179212, eight layers on four ranks."""
    units, cut_bytes, make = equal_parts(*forwards), [0.0] * 7, by_counts(one_forward_one_backward, 8)
    found = fastest_cut(units, cut_bytes, 4, make)
    assert found.is_exact
    for cuts in others:
        assert found.simulation.seconds <= simulated(units, [*cut_bytes], cuts, make).seconds


def test_the_lightest_heaviest_stage_is_not_the_fastest_cut() -> None:
    units, make = equal_parts(8, 11, 2, 1, 18, 5, 4, 11), by_counts(one_forward_one_backward, 8)
    found = fastest_cut(units, [0.0] * 7, 4, make)
    assert (found.cuts, found.simulation.seconds) == ((2, 4, 5), 573)
    assert simulated(units, [0.0] * 7, (0, 3, 4), make).seconds == 600


def by_brute_force(
    units: list[StageCosts], cut_bytes: list[float | None], num_stages: int, make: MakeTable, limit: float, **options: object
) -> float:
    legal = [position for position, num_bytes in enumerate(cut_bytes) if num_bytes is not None]
    seconds = []
    for cuts in combinations(legal, num_stages - 1):
        found = simulated(units, cut_bytes, cuts, make, **options)
        if max(found.peak_bytes) <= limit:
            seconds.append(found.seconds)
    return min(seconds, default=float("inf"))


@pytest.mark.parametrize("descends", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_random_chains_are_cut_as_by_brute_force(seed: int, descends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not descends:  # which finds nearly all of them by itself
        monkeypatch.setattr(module._Search, "descend", module._Search.seconds)
    numbers = random.Random(seed)
    for _ in range(100):
        count, num_stages = numbers.randint(2, 7), numbers.randint(1, 4)
        units = [
            StageCosts(
                forward_seconds=numbers.choice([0, 1, 1, 2, 5]),
                input_backward_seconds=numbers.choice([0, 1, 2, 3, 7]),
                weight_backward_seconds=numbers.choice([0, 1, 2]),
                activation_bytes=numbers.choice([1, 2, 5]),
                weight_bytes=1,
                state_bytes=numbers.choice([0, 3, 8]),
            )
            for _ in range(count)
        ]
        cut_bytes = [numbers.choice([None, 0.0, 1.0, 1.0, 4.0]) for _ in range(count - 1)]
        make = by_counts(numbers.choice(ORDERS), numbers.randint(1, 6))
        link = Link(latency_seconds=numbers.choice([0, 0.5]), bytes_per_second=numbers.choice([float("inf"), 2.0]))
        overhead = Overhead(action_seconds=numbers.choice([0, 0.25]), step_seconds=numbers.choice([0, 1]))
        limit = numbers.choice([float("inf"), 40.0, 25.0])
        cut = partial(fastest_cut, units, cut_bytes, num_stages, make, link=link, overhead=overhead)
        expected = float("inf")
        if sum(num_bytes is not None for num_bytes in cut_bytes) >= num_stages - 1:
            expected = by_brute_force(units, cut_bytes, num_stages, make, limit, link=link, overhead=overhead)
        if expected == float("inf"):
            with pytest.raises(PartitionError):
                cut(memory_bytes=[limit] * num_stages)
            continue
        found: FastestCut = cut(memory_bytes=[limit] * num_stages)
        assert found.is_exact
        assert found.simulation.seconds == pytest.approx(expected)
        assert max(found.simulation.peak_bytes) <= limit


def test_a_schedule_that_is_made_for_the_stages_is_made_for_each_cut() -> None:
    units = equal_parts(4, 1, 1, 1, 1, 4)
    found = fastest_cut(units, [0.0] * 5, 3, lambda stages: zero_bubble(stages, 6))
    assert found.cuts == (0, 4)
    assert found.is_exact


def test_a_search_that_is_broken_off_says_so() -> None:
    table = by_counts(one_forward_one_backward, 8)
    found = fastest_cut(equal_parts(8, 11, 2, 1, 18, 5, 4, 11), [0.0] * 7, 4, table, max_actions=1)
    assert (found.cuts, found.is_exact) == ((0, 2, 4), False)


def test_memory_that_no_cut_fits_into_is_refused() -> None:
    unit = StageCosts(forward_seconds=1, input_backward_seconds=1, activation_bytes=2, state_bytes=10)
    with pytest.raises(PartitionError, match="No partition into 2 stages fits in memory") as refused:
        fastest_cut([unit] * 4, [0.0] * 3, 2, by_counts(one_forward_one_backward, 4), memory_bytes=[20, 30])
    assert refused.value.observed == "14 B, 36 B with the closest partition"
    assert refused.value.expected == "at most 20 B, 30 B"


def test_a_schedule_that_fits_no_cut_is_refused() -> None:
    unit = StageCosts(forward_seconds=1, input_backward_seconds=1, activation_bytes=2)
    with pytest.raises(ScheduleError, match="not have enough memory for one microbatch"):
        fastest_cut([unit] * 4, [0.0] * 3, 2, lambda stages: zero_bubble(stages, 4, memory_bytes=[1, 1]))
