"""The table of costs: its columns against sums over the model's tensors, shared ones included."""

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
from lightning_fxpipe.planner.unit_costs import UnitCosts
from tests.models import make_model, make_samples

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


def costs_of(model: nn.Module, batch: Any) -> UnitCosts:
    planned = make_planned(model, batch, rule=CutRule(num_stages=1))
    assert planned.assignment is not None
    assert planned.region is not None
    return UnitCosts(chain=planned.assignment.chain, call=planned.region)


@pytest.fixture(scope="module")
def tied() -> UnitCosts:
    return costs_of(Tied(), torch.arange(8))


def held(chain: Chain, start: int, end: int, *, bytes_of_states: bool) -> int:
    """By the parameters that a stage of these units has, each once."""
    names, root = canonical_fqns(chain.traced.root), chain.traced.root
    parameters = dict(root.named_parameters())
    found = {names[fqn] for unit in chain.units[start:end] for fqn in unit.tensor_fqns} & parameters.keys()
    each = [parameters[fqn] for fqn in found]
    if bytes_of_states:
        return sum(4 * p.numel() * (4 if p.requires_grad else 1) for p in each)
    return sum(p.numel() for p in each)


def test_every_stretch_weighs_what_a_stage_of_it_would_hold(tied: UnitCosts) -> None:
    chain, parameters, states = tied.chain, tied.parameters, tied.states()
    assert parameters.shared  # or nothing is shown
    for start in range(len(chain.units)):
        for end in range(start + 1, len(chain.units) + 1):
            assert parameters.of(start, end) == held(chain, start, end, bytes_of_states=False)
            assert states.of(start, end) == held(chain, start, end, bytes_of_states=True)
    assert parameters.total == sum(p.numel() for p in Tied().parameters())


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet", "unet"])
def test_gradients_are_those_of_parameters_that_train_each_once(name: str) -> None:
    model = make_model(name)
    next(iter(model.parameters())).requires_grad_(False)
    costs = costs_of(model, make_samples(name, 4)[0])
    assert sum(costs.gradient_bytes) == sum(p.nbytes for p in model.parameters() if p.requires_grad)


def test_activations_are_those_of_the_microbatches_that_a_stage_keeps(tied: UnitCosts) -> None:
    states = tied.states()
    of_stages = tied.memory(states, (3, 1, 3), scale=2.0)
    assert of_stages[0] is of_stages[2]
    assert sum(tied.kept_bytes)
    for weights, kept in zip(of_stages, (3, 1, 3), strict=True):
        assert weights.total == states.total + 2 * kept * sum(tied.kept_bytes)


def test_buffers_for_what_is_sent_are_in_the_stage_that_sends_it(tied: UnitCosts) -> None:
    count = len(tied.chain.units)
    nothing = Weights((0,) * count)
    crossing = [site.num_bytes for site in tied.chain.sites[:-1]]
    limit = 2 * max(crossing)
    load = Load(schedule="gpipe", num_ranks=2)
    fits = tied.fitting_firsts([nothing, nothing], [limit, limit - 1], load)
    assert fits[0] == [0] * count
    too_many = [position + 1 if position < count - 1 and 2 * crossing[position] > limit - 1 else 0 for position in range(count)]
    assert fits[1] == too_many
    assert any(too_many)


def test_a_cut_costs_what_crosses_it_and_the_gradients_of_what_both_sides_hold(tied: UnitCosts) -> None:
    chain, parameters = tied.chain, dict(tied.chain.traced.root.named_parameters())
    for position, cost in enumerate(tied.cut_costs):
        before, after = (
            {fqn for unit in units for fqn in unit.tensor_fqns}
            for units in (chain.units[: position + 1], chain.units[position + 1 :])
        )
        shared = sum(parameters[fqn].nbytes for fqn in before & after & parameters.keys())
        assert cost == (chain.sites[position].num_bytes + shared if chain.allows_cut(position) else None)


def test_columns_of_another_size_are_those_of_a_trace_of_that_size() -> None:
    small, large = (costs_of(make_model("mlp"), make_samples("mlp", size)[0]) for size in (4, 8))
    resized = small.of_samples(8)
    assert resized is not None
    assert (resized.flops, resized.kept_bytes, resized.cut_costs) == (large.flops, large.kept_bytes, large.cut_costs)
    assert resized.parameters == small.parameters
