"""What units weigh, tensors that several of them use included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.planner.cost import Chain, canonical_fqns
from lightning_fxpipe.planner.cut_rule import CutRule
from lightning_fxpipe.planner.load import Load
from lightning_fxpipe.planner.partition import Weights
from lightning_fxpipe.planner.step_plan import make_planned
from lightning_fxpipe.planner.unit_costs import unit_costs
from lightning_fxpipe.planner.weighing import fitting_firsts, memory_weights, parameter_weights, state_weights

WIDTH = 4


class Tied(nn.Module):
    """An embedding that is the head as well, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.first, self.twice, self.frozen = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.twice(self.first(self.embed(x)).relu()).relu()
        return self.head(self.frozen(self.twice(h).relu()))


def chain_and_call(model: nn.Module, batch: Any) -> tuple[Chain, Any]:
    planned = make_planned(model, batch, rule=CutRule(num_stages=1))
    assert planned.assignment is not None
    return planned.assignment.chain, planned.region


@pytest.fixture(scope="module")
def tied() -> tuple[Chain, Any]:
    return chain_and_call(Tied(), torch.arange(8))


def held(chain: Chain, start: int, end: int, *, bytes_of_states: bool) -> int:
    """By the parameters that a stage of these units has, each once."""
    names, root = canonical_fqns(chain.traced.root), chain.traced.root
    parameters = dict(root.named_parameters())
    found = {names[fqn] for unit in chain.units[start:end] for fqn in unit.tensor_fqns} & parameters.keys()
    each = [parameters[fqn] for fqn in found]
    if bytes_of_states:
        return sum(4 * p.numel() * (4 if p.requires_grad else 1) for p in each)
    return sum(p.numel() for p in each)


def test_every_stretch_weighs_what_a_stage_of_it_would_hold(tied: tuple[Chain, Any]) -> None:
    chain, call = tied
    parameters, states = parameter_weights(chain, call), state_weights(chain, call)
    assert parameters.shared  # or nothing is shown
    for start in range(len(chain.units)):
        for end in range(start + 1, len(chain.units) + 1):
            assert parameters.of(start, end) == held(chain, start, end, bytes_of_states=False)
            assert states.of(start, end) == held(chain, start, end, bytes_of_states=True)
    assert parameters.total == sum(p.numel() for p in Tied().parameters())


def test_activations_are_those_of_the_microbatches_that_a_stage_keeps(tied: tuple[Chain, Any]) -> None:
    chain, call = tied
    states, costs = state_weights(chain, call), unit_costs(chain)
    of_stages = memory_weights(states, costs, (3, 1, 3), scale=2.0)
    assert of_stages[0] is of_stages[2]
    saved = [unit.saved_bytes for unit in costs]
    assert sum(saved)
    for weights, kept in zip(of_stages, (3, 1, 3), strict=True):
        assert weights.total == states.total + 2 * kept * sum(saved)


def test_buffers_for_what_is_sent_are_in_the_stage_that_sends_it(tied: tuple[Chain, Any]) -> None:
    chain, _ = tied
    count = len(chain.units)
    nothing = Weights((0,) * count)
    crossing = [site.num_bytes for site in chain.sites[:-1]]
    limit = 2 * max(crossing)
    load = Load(schedule="gpipe", num_ranks=2)
    fits = fitting_firsts(chain, [nothing, nothing], [limit, limit - 1], load)
    assert fits[0] == [0] * count
    too_many = [position + 1 if position < count - 1 and 2 * crossing[position] > limit - 1 else 0 for position in range(count)]
    assert fits[1] == too_many
    assert any(too_many)
