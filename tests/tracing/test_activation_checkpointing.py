"""What the model runs under ``torch.utils.checkpoint`` is recomputed in a stage too, and gives the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.cost import build_chain
from lightning_fxpipe.stages.build import build_stage
from lightning_fxpipe.tracing.trace import trace_region
from tests.stages.test_build import assert_stages_equal_whole, call_of

WIDTH = 4


class Counting(nn.Module):
    """Counts how often its forward really runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        runs.append(1)
        return torch.tanh(self.linear(x))


runs: list[int] = []


class Net(nn.Module):
    """Three blocks, the middle one under a checkpoint."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = Counting(), Counting(), Counting()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return self.c(checkpoint(self.b, self.a(x), **self.options))


class OwnCall(Counting):
    """Checkpoints in its ``__call__``, as the layers of transformers do."""

    def __call__(self, *args: Any) -> Any:
        return checkpoint(super().__call__, *args, use_reentrant=False)


def selective() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.tanh.default])


def runs_of(model: nn.Module) -> int:
    """Forwards of counting modules in one forward and backward of the model as a single stage."""
    x = torch.randn(3, WIDTH, requires_grad=True)
    stage = build_stage(Assignment(chain=build_chain(trace_region(model, call_of(x))), cuts=()), 0)
    runs.clear()
    stage.module(x)[0].sum().backward()
    return len(runs)


OPTIONS = {
    "non_reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {"use_reentrant": False, "context_fn": selective},
    "without_rng": {"use_reentrant": False, "preserve_rng_state": False},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_block_is_recomputed(name: str) -> None:
    assert runs_of(Net(**OPTIONS[name])) == 4


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("cut", [0, 1])
def test_stages_equal_the_whole(name: str, cut: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, WIDTH)
    chain = build_chain(trace_region(Net(**OPTIONS[name]), call_of(x)))
    assert_stages_equal_whole(Assignment(chain=chain, cuts=(cut,)), x)


def test_module_that_checkpoints_in_its_call_is_recomputed_once() -> None:
    assert runs_of(nn.Sequential(Counting(), OwnCall())) == 3


def test_reentrant_checkpoint_without_an_input_that_needs_a_gradient_trains_nothing() -> None:
    class Inputs(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(checkpoint(self.b, x, use_reentrant=True))

    x = torch.randn(3, WIDTH)
    model = Inputs()
    chain = build_chain(trace_region(model, call_of(x)))
    assert_stages_equal_whole(Assignment(chain=chain, cuts=(0,)), x)


def test_checkpoint_cut_in_two_is_recomputed_on_both_sides() -> None:
    class Wide(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: self.c(self.b(self.a(x)) * 2), x, use_reentrant=False)

    x = torch.randn(3, WIDTH)
    chain = build_chain(trace_region(Wide(), call_of(x)))
    for cut in range(len(chain.units) - 1):
        assert_stages_equal_whole(Assignment(chain=chain, cuts=(cut,)), x)
    assert runs_of(Wide()) == 6


def test_checkpoint_in_a_checkpoint() -> None:
    class Nested(Net):
        def forward(self, x: Tensor) -> Tensor:
            inner = partial(checkpoint, self.b, use_reentrant=False)
            return checkpoint(lambda x: self.c(inner(self.a(x))), x, use_reentrant=False)

    x = torch.randn(3, WIDTH)
    chain = build_chain(trace_region(Nested(), call_of(x)))
    assert_stages_equal_whole(Assignment(chain=chain, cuts=(1,)), x)
