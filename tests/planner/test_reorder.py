"""Other orders of a graph's calls: the same results, and calls of the same parameters together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_fxpipe.planner.cost import build_chain
from lightning_fxpipe.planner.step_plan import make_plan
from lightning_fxpipe.tracing.recordable import RegionCall
from lightning_fxpipe.tracing.trace import trace_region
from tests.staging import assert_exact_at_every_cut

BATCH, WIDTH = 4, 6


class Twice(nn.Module):
    """The same layers on two inputs that do not depend on each other, then a head on both."""

    def __init__(self, *, dependent: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.dependent = dependent

    def forward(self, x: Tensor) -> Tensor:
        first = self.encoder(x)
        second = self.encoder(first if self.dependent else x.flip(0) + 1)
        return self.head(first * second)


def batch() -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))


def call_of(x: Tensor) -> RegionCall:
    return RegionCall(path="", args=(x,), kwargs={}, batch_size=len(x))


def test_calls_of_the_same_layers_come_together_and_no_stage_holds_a_copy() -> None:
    plan = make_plan(Twice(), batch(), num_stages=3)
    held = [fqn for stage in plan.stages for fqn in stage.fqns]
    assert len(held) == len(set(held)) == 10
    assert max(stage.num_parameters for stage in plan.stages) == 2 * (WIDTH * WIDTH + WIDTH)


def test_calls_that_depend_on_each_other_stay_in_their_order() -> None:
    model = Twice(dependent=True)
    traced = trace_region(model, call_of(batch()), opened=("encoder",))
    before = [node.name for node in traced.graph.nodes]
    build_chain(traced)
    assert [node.name for node in traced.graph.nodes] == before


def test_results_and_gradients_are_exact_wherever_the_cut_falls() -> None:
    assert_exact_at_every_cut(Twice())


class Overwrites(nn.Module):
    """A second call whose input is changed in place after the first has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 2
        first = self.other(torch.tanh(self.layer(h.clone())))
        h.add_(1)
        return first + self.layer(h)


def test_memory_changed_in_place_is_read_before_and_after_as_it_was() -> None:
    assert_exact_at_every_cut(Overwrites())
