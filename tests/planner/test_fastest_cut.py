"""The fastest cut against brute force over all cuts, published partitions, and chains of modules under a load."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fxpipe.errors import PartitionError, ScheduleError
from lightning_fxpipe.planner import fastest_cut as module
from lightning_fxpipe.planner.cut_rule import CutRule
from lightning_fxpipe.planner.fastest_cut import MakeTable, TimedChain
from lightning_fxpipe.planner.load import Load
from lightning_fxpipe.planner.measured_costs import UnitSeconds
from lightning_fxpipe.planner.partition import Weights
from lightning_fxpipe.planner.pinned import pinned_firsts
from lightning_fxpipe.planner.step_plan import make_planned
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.simulation.actions import ActionTable
from lightning_fxpipe.simulation.costs import Link, Overhead, StageCosts
from lightning_fxpipe.simulation.orders import gpipe, hand_made_zero_bubble, one_forward_one_backward
from lightning_fxpipe.simulation.simulator import Simulation, run_table
from lightning_fxpipe.simulation.zero_bubble import zero_bubble

WIDTH = 8
NO_END = 2_000_000  # actions, which no search here simulates
ORDERS: tuple[Callable[[int, int], ActionTable], ...] = (gpipe, one_forward_one_backward, hand_made_zero_bubble)


def by_counts(order: Callable[[int, int], ActionTable], count: int) -> MakeTable:
    return lambda stages: order(len(stages), count)


def equal_parts(*forwards: float) -> list[StageCosts]:
    """Units whose backward takes twice as long as their forward."""
    return [StageCosts(forward_seconds=f, input_backward_seconds=f, weight_backward_seconds=f) for f in forwards]


def chain_of(units: list[StageCosts], num_stages: int, make_table: MakeTable, **more: Any) -> TimedChain:
    return TimedChain(
        **{"cut_bytes": [0.0] * (len(units) - 1), **more}, units=units, num_stages=num_stages, make_table=make_table
    )


def simulated(chain: TimedChain, cuts: tuple[int, ...]) -> Simulation:
    """A step with these cuts, from sums over each stage's units."""
    bounds = [0, *(cut + 1 for cut in cuts), len(chain.units)]
    stages = []
    for stage, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        units, speed = chain.units[start:end], chain.speeds[stage] if chain.speeds else 1.0
        states = sum(unit.state_bytes for unit in units)
        if chain.states is not None:
            users = [(weight, {*users} & {*range(start, end)}) for weight, users in chain.states.shared]
            states = sum(chain.states.own[start:end]) + sum(weight for weight, inside in users if inside)
        stages.append(
            StageCosts(
                forward_seconds=sum(unit.forward_seconds for unit in units) / speed,
                input_backward_seconds=sum(unit.input_backward_seconds for unit in units) / speed,
                weight_backward_seconds=sum(unit.weight_backward_seconds for unit in units) / speed,
                activation_bytes=sum(unit.activation_bytes for unit in units),
                weight_bytes=sum(unit.weight_bytes for unit in units),
                output_bytes=(chain.cut_bytes[cuts[stage]] or 0.0) if stage < len(cuts) else 0.0,
                state_bytes=states,
            )
        )
    return run_table(chain.make_table(stages), stages, link=chain.link, overhead=chain.overhead)


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
    chain = chain_of(equal_parts(*forwards), 4, by_counts(one_forward_one_backward, 8))
    found = chain.fastest(NO_END)
    for cuts in others:
        assert found.simulation.seconds <= simulated(chain, cuts).seconds


def test_the_lightest_heaviest_stage_is_not_the_fastest_cut() -> None:
    chain = chain_of(equal_parts(8, 11, 2, 1, 18, 5, 4, 11), 4, by_counts(one_forward_one_backward, 8))
    found = chain.fastest(NO_END)
    assert (found.cuts, found.simulation.seconds) == ((2, 4, 5), 573)
    assert simulated(chain, (0, 3, 4)).seconds == 600
    assert chain.balanced().cuts == (0, 2, 4)


def random_chain(numbers: random.Random) -> TimedChain:
    """With all that units, links, devices and constraints may be; few different numbers, so that ties are common."""
    count, num_stages = numbers.randint(2, 10), numbers.randint(1, 4)
    users = tuple(sorted(numbers.sample(range(count), 2)))
    states = Weights(tuple(numbers.choice([0, 3, 8]) for _ in range(count)), ((numbers.choice([1, 5]), users),))
    limit = numbers.choice([None, None, 40.0, 25.0])
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
    pinned = [(numbers.randrange(count), numbers.randrange(num_stages)) for _ in range(numbers.choice([0, 0, 1]))]
    return TimedChain(
        units=units,
        cut_bytes=[numbers.choice([None, 0.0, 1.0, 1.0, 4.0]) for _ in range(count - 1)],
        num_stages=num_stages,
        make_table=by_counts(numbers.choice(ORDERS), numbers.randint(1, 6)),
        link=Link(latency_seconds=numbers.choice([0, 0.5]), bytes_per_second=numbers.choice([float("inf"), 2.0])),
        overhead=Overhead(action_seconds=numbers.choice([0, 0.25]), step_seconds=numbers.choice([0, 1])),
        memory_bytes=None if limit is None else [limit] * num_stages,
        speeds=numbers.choice([(), tuple(numbers.choice([1.0, 0.5]) for _ in range(num_stages))]),
        firsts=pinned_firsts([dict(pinned).get(unit) for unit in range(count)], num_stages) if pinned else [],
        states=numbers.choice([None, states]),
    )


def by_brute_force(chain: TimedChain) -> float:
    legal = [position for position, num_bytes in enumerate(chain.cut_bytes) if num_bytes is not None]
    seconds = []
    for cuts in combinations(legal, chain.num_stages - 1):
        ends, begins = (*cuts, len(chain.units) - 1), (0, *(cut + 1 for cut in cuts))
        if any(firsts[end] > begin for firsts, begin, end in zip(chain.firsts, begins, ends, strict=False)):
            continue
        found = simulated(chain, cuts)
        if chain.memory_bytes is None or max(found.peak_bytes) <= chain.memory_bytes[0]:
            seconds.append(found.seconds)
    return min(seconds, default=float("inf"))


@pytest.mark.parametrize("descends", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_random_chains_are_cut_as_by_brute_force(seed: int, descends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not descends:  # which finds nearly all of them by itself
        monkeypatch.setattr(module._Search, "descend", module._Search.seconds)
    numbers = random.Random(seed)
    for _ in range(60):
        chain = random_chain(numbers)
        expected = by_brute_force(chain)
        if expected == float("inf"):
            with pytest.raises(PartitionError):
                chain.fastest(NO_END)
            continue
        found = chain.fastest(NO_END)
        assert found.simulation.seconds == pytest.approx(expected)
        assert chain.memory_bytes is None or max(found.simulation.peak_bytes) <= chain.memory_bytes[0]


def test_a_schedule_that_is_made_for_the_stages_is_made_for_each_cut() -> None:
    chain = chain_of(equal_parts(4, 1, 1, 1, 1, 4), 3, lambda stages: zero_bubble(stages, 6))
    assert chain.fastest(NO_END).cuts == (0, 4)


def test_a_search_that_ends_returns_the_best_so_far() -> None:
    chain = chain_of(equal_parts(8, 11, 2, 1, 18, 5, 4, 11), 4, by_counts(one_forward_one_backward, 8))
    assert chain.fastest(max_actions=1).cuts == (0, 2, 4)


def test_memory_that_no_cut_fits_into_is_refused() -> None:
    unit = StageCosts(forward_seconds=1, input_backward_seconds=1, activation_bytes=2, state_bytes=10)
    chain = chain_of([unit] * 4, 2, by_counts(one_forward_one_backward, 4), memory_bytes=[20, 30])
    with pytest.raises(PartitionError, match="No partition into 2 stages fits in memory") as refused:
        chain.fastest()
    assert refused.value.observed == "14 B, 36 B with the closest partition"
    assert refused.value.expected == "at most 20 B, 30 B"


def test_a_schedule_that_fits_no_cut_is_refused() -> None:
    unit = StageCosts(forward_seconds=1, input_backward_seconds=1, activation_bytes=2)
    chain = chain_of([unit] * 4, 2, lambda stages: zero_bubble(stages, 4, memory_bytes=[1, 1]))
    with pytest.raises(ScheduleError, match="not have enough memory for one microbatch"):
        chain.fastest()


# ------------------------------------------------------------------ of a table, under a load


@pytest.fixture(scope="module")
def costs() -> UnitCosts:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    planned = make_planned(layers, torch.randn(8, WIDTH), rule=CutRule(num_stages=4))
    assert planned.assignment is not None
    assert planned.region is not None
    return UnitCosts(chain=planned.assignment.chain, call=planned.region)


def timed(costs: UnitCosts, load: Load, forwards: Sequence[float] = (1.0,) * 8, **more: Any) -> TimedChain:
    """With units whose two backward parts take as long as the forward."""
    return TimedChain.of(costs, [UnitSeconds(each, each, each) for each in forwards], load, **more)


def test_a_slow_device_gets_less(costs: UnitCosts) -> None:
    slow_first = Load(schedule="gpipe", num_ranks=2, num_microbatches=4, speeds=(3.0, 1.0))
    assert timed(costs, slow_first).balanced().cuts == timed(costs, slow_first).fastest().cuts == (1,)
    slow_last = Load(schedule="gpipe", num_ranks=2, num_microbatches=4, speeds=(1.0, 3.0))
    found = timed(costs, slow_last).balanced()
    assert found.cuts == (5,)
    # Seconds are those of rank 0, which has the last stage: the first device needs a third of them.
    assert found.simulation.costs[0].forward_seconds == pytest.approx(6 / 3)
    assert found.simulation.costs[1].forward_seconds == pytest.approx(2)


def test_what_does_not_fit_is_cut_elsewhere_or_refused(costs: UnitCosts) -> None:
    layer = 4 * 4 * (WIDTH * WIDTH + WIDTH)  # bytes of its parameters, gradients and Adam's states
    activations = sum(costs.kept_bytes) * 2
    free = timed(costs, Load(schedule="1f1b", num_ranks=2, num_microbatches=4)).fastest()
    assert free.cuts == (3,)
    assert [stage.state_bytes for stage in free.simulation.costs] == [4 * layer] * 2
    tight = Load(schedule="1f1b", num_ranks=2, num_microbatches=4, memory_bytes=(7 * layer + activations, 2 * layer - 1))
    assert timed(costs, tight).fastest().cuts == (0,)
    none = Load(schedule="1f1b", num_ranks=2, num_microbatches=4, memory_bytes=(7 * layer + activations, layer - 1))
    with pytest.raises(PartitionError, match="fits in memory"):
        timed(costs, none).fastest()


def test_pinned_modules_stay_where_they_are(costs: UnitCosts) -> None:
    load = Load(schedule="1f1b", num_ranks=2, num_microbatches=4)
    firsts = pinned_firsts([None, None, None, None, None, 0, 1, None], 2)
    assert timed(costs, load, firsts=firsts).balanced().cuts == (5,)
    assert timed(costs, load, firsts=firsts).fastest().cuts == (5,)
    with pytest.raises(PartitionError, match="stages assigned by stage_of are impossible"):
        timed(costs, load, firsts=[[1] * 8, [0] * 8]).fastest()


def test_several_stages_on_a_rank_are_searched(costs: UnitCosts) -> None:
    load = Load(schedule="zbv_zero_bubble", num_ranks=2, stages_per_rank=2, num_microbatches=4)
    found = timed(costs, load, (8, 11, 2, 1, 18, 5, 4, 11))
    assert found.fastest().simulation.seconds <= found.balanced().simulation.seconds
