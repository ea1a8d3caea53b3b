"""The cut of a timed chain: equal seconds, or the fastest simulated step, in proportion to devices and within their memory."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fxpipe import PartitionError
from lightning_fxpipe.planner.cost import Chain
from lightning_fxpipe.planner.cut_rule import CutRule
from lightning_fxpipe.planner.fastest_cut import costs_of_stages
from lightning_fxpipe.planner.load import Load
from lightning_fxpipe.planner.measured_costs import UnitSeconds
from lightning_fxpipe.planner.partition import Weights
from lightning_fxpipe.planner.pinned import pinned_firsts
from lightning_fxpipe.planner.step_plan import make_planned
from lightning_fxpipe.planner.timed_cut import TimedChain
from lightning_fxpipe.planner.unit_costs import unit_costs
from lightning_fxpipe.simulation.simulator import run_table

WIDTH = 8


@pytest.fixture(scope="module")
def chain() -> Chain:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    planned = make_planned(layers, torch.randn(8, WIDTH), rule=CutRule(num_stages=4))
    assert planned.assignment is not None
    return planned.assignment.chain


def timed(chain: Chain, forwards: list[float], load: Load, states: Weights | None = None, **more: Any) -> TimedChain:
    """With units whose two backward parts take as long as the forward."""
    seconds = tuple(UnitSeconds(each, each, each) for each in forwards)
    return TimedChain(
        chain=chain,
        costs=unit_costs(chain),
        seconds=seconds,
        states=states or Weights((0,) * len(seconds)),
        load=load,
        **more,
    )


FORWARDS = [8.0, 11, 2, 1, 18, 5, 4, 11]


def test_the_fastest_is_the_fastest_of_all(chain: Chain) -> None:
    """The example of pytorch PR 179212: the lightest heaviest stage is not the fastest cut."""
    found = timed(chain, FORWARDS, Load(schedule="1f1b", num_ranks=4, num_microbatches=8))
    everything = []
    for cuts in combinations(range(7), 3):
        stages = costs_of_stages(found._units, found._cut_bytes, cuts)
        everything.append(run_table(found._table(stages), stages, link=found._link).seconds)
    fastest, balanced = found.fastest(), found.balanced()
    assert fastest.is_exact
    assert fastest.simulation.pipeline_seconds == pytest.approx(min(everything), rel=2e-3)  # which have no overhead
    assert balanced.cuts == (0, 2, 4)
    assert fastest.simulation.seconds < balanced.simulation.seconds


def test_a_slow_device_gets_less(chain: Chain) -> None:
    slow_first = Load(schedule="gpipe", num_ranks=2, num_microbatches=4, speeds=(3.0, 1.0))
    assert timed(chain, [1.0] * 8, slow_first).balanced().cuts == (1,)
    assert timed(chain, [1.0] * 8, slow_first).fastest().cuts == (1,)
    slow_last = Load(schedule="gpipe", num_ranks=2, num_microbatches=4, speeds=(1.0, 3.0))
    found = timed(chain, [1.0] * 8, slow_last).balanced()
    assert found.cuts == (5,)
    # Seconds are those of rank 0, which has the last stage: the first device needs a third of them.
    assert found.simulation.costs[0].forward_seconds == pytest.approx(6 / 3)
    assert found.simulation.costs[1].forward_seconds == pytest.approx(2)


def test_what_does_not_fit_is_cut_elsewhere_or_refused(chain: Chain) -> None:
    states = Weights((100, 0, 0, 0, 0, 0, 0, 0), ((50, (1, 7)),))
    forwards = [1.0, 1, 1, 1, 1, 1, 1, 1]
    load = Load(schedule="1f1b", num_ranks=2, num_microbatches=4)
    activations = sum(unit.saved_bytes for unit in unit_costs(chain)) * 2
    free = timed(chain, forwards, load, states)
    assert free.fastest().cuts == (3,)
    assert [stage.state_bytes for stage in free.fastest().simulation.costs] == [150, 50]
    tight = Load(schedule="1f1b", num_ranks=2, num_microbatches=4, memory_bytes=(50 + activations, 149))
    assert timed(chain, forwards, tight, states).fastest().cuts == (0,)
    none = Load(schedule="1f1b", num_ranks=2, num_microbatches=4, memory_bytes=(50 + activations, 99))
    with pytest.raises(PartitionError, match="fits in memory"):
        timed(chain, forwards, none, states).fastest()


def test_pinned_modules_stay_where_they_are(chain: Chain) -> None:
    load = Load(schedule="1f1b", num_ranks=2, num_microbatches=4)
    firsts = pinned_firsts([None, None, None, None, None, 0, 1, None], 2)
    assert timed(chain, [1.0] * 8, load, firsts=firsts).balanced().cuts == (5,)
    assert timed(chain, [1.0] * 8, load, firsts=firsts).fastest().cuts == (5,)
    with pytest.raises(PartitionError, match="stages assigned by stage_of are impossible"):
        timed(chain, [1.0] * 8, load, firsts=[[1] * 8, [0] * 8]).fastest()


def test_several_stages_on_a_rank_are_searched_but_not_all(chain: Chain) -> None:
    load = Load(schedule="zbv_zero_bubble", num_ranks=2, stages_per_rank=2, num_microbatches=4)
    found = timed(chain, FORWARDS, load)
    assert not found.fastest().is_exact
    assert found.fastest().simulation.seconds <= found.balanced().simulation.seconds
