"""Calls of every kind across cuts, under modes of their own, with results of any structure: stages equal the whole module."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.stages.build import build_stages
from lightning_fxpipe.tracing.graph_writer import CONSTANT_PREFIX
from tests.staging import (
    WIDTH,
    Double,
    Layers,
    assert_exact_at_every_cut,
    assert_stages_equal_whole,
    batch,
    chain_of,
    legal_after,
    run_staged,
)


def test_no_grad_and_detached_values_cross_without_gradient() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        h = m.a(x)
        with torch.no_grad():
            weight = torch.sigmoid(m.b(h))
        return m.c(h * weight) + m.d(h.detach()).detach()

    chain = assert_exact_at_every_cut(Layers(run))
    assert legal_after(chain, "sigmoid")


def test_grad_enabled_inside_a_call_without_gradients() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        with torch.enable_grad():
            h = m.a(x)
        return m.b(h).detach() + h

    model = Layers(run)
    with torch.no_grad():
        chain = chain_of(model, batch())
        for position in range(len(chain.units) - 1):
            staged = run_staged(Assignment(chain=chain, cuts=(position,)), [batch(7)])
            assert torch.equal(staged.result, model(batch(7)))


def test_parameters_of_a_module_under_a_context_are_listed_under_their_names() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = m.b(m.a(x))
        return m.c(h.float())

    chain = assert_exact_at_every_cut(Layers(run))
    first, second = build_stages(Assignment(chain=chain, cuts=(0,)))
    assert {name for name, _ in first.module.named_parameters()} == {"a.weight", "a.bias"}
    assert {name for name, _ in second.module.named_parameters()} == {"b.weight", "b.bias", "c.weight", "c.bias"}


def test_autocast_around_the_whole_call() -> None:
    model = Layers(lambda m, x: m.c(torch.softmax(m.b(m.a(x)), -1)).sum(-1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chain = chain_of(model, batch())
        assert chain.sites[0].crossing[0].meta["val"].dtype == torch.bfloat16
        for position in range(len(chain.units) - 1):
            assert_stages_equal_whole(Assignment(chain=chain, cuts=(position,)), batch(7))


def test_custom_autograd_function_with_two_results() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        h, total = Double.apply(m.a(x), 2.0)
        return m.b(h) + total.detach()

    assert_exact_at_every_cut(Layers(run))


class Recurrent(nn.Module):
    """Results in nested tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.rnn(x[:, None].expand(-1, 3, -1))


@pytest.mark.parametrize("opened", [(), None], ids=["whole", "opened"])
def test_module_with_nested_results(opened: Any) -> None:
    def run(m: Layers, x: Tensor) -> Any:
        output, (hidden, cell) = m.rnn(m.a(x))
        return {"h": m.b(output.sum(1)) + hidden[0], "cell": (m.c(cell[0]), None)}

    assert_exact_at_every_cut(Layers(run, rnn=Recurrent()), opened=opened)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class TakePair(nn.Module):
    def forward(self, pair: Pair) -> Tensor:
        return pair.left * pair.right


def test_named_tuple_as_an_argument_of_a_whole_module() -> None:
    assert_exact_at_every_cut(Layers(lambda m, x: m.c(m.take(Pair(m.a(x), m.b(x)))), take=TakePair()), opened=())


def test_tensor_attribute_that_is_no_buffer() -> None:
    model = Layers(lambda m, x: m.b(m.a(x) * m.table) * m.table, table=torch.arange(float(WIDTH)))
    chain = assert_exact_at_every_cut(model)
    stages = build_stages(Assignment(chain=chain, cuts=(0,)))
    names = [name for stage in stages for name, _ in stage.module.named_buffers()]
    assert all(name == "table" or name.startswith(CONSTANT_PREFIX) for name in names)


class Scaled(nn.Module):
    """Has a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def test_buffer_that_is_not_saved_is_not_saved_after_stages_were_built() -> None:
    model = Layers(lambda m, x: m.b(m.scaled(m.a(x)) * m.scaled.scale), scaled=Scaled())
    saved = list(model.state_dict())
    chain = chain_of(model, batch(), opened=())
    build_stages(Assignment(chain=chain, cuts=(0,)))
    assert list(model.state_dict()) == saved


@pytest.mark.parametrize("name", ["graph", "_graph", "code", "meta", "class", "lambda", "0", "a-b", "boundary_0", "size"])
def test_any_name_of_a_submodule_will_do(name: str) -> None:
    model = Layers(lambda m, x: m.b(m.get_submodule(name)(m.a(x))))
    model.add_module(name, nn.Linear(WIDTH, WIDTH))
    assert_exact_at_every_cut(model)


def test_random_numbers_are_drawn_in_the_order_of_the_whole_module() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        h = F.dropout(m.a(x), 0.5, m.training)
        torch.rand(3)  # unused, but moves the generator on
        return m.c(F.dropout(m.b(h), 0.3) + torch.randn(x.shape[0], 1))

    assert_exact_at_every_cut(Layers(run))


def test_checkpointed_block() -> None:
    def run(m: Layers, x: Tensor) -> Tensor:
        return m.c(torch.utils.checkpoint.checkpoint(m.b, torch.relu(m.a(x)), use_reentrant=False))

    assert_exact_at_every_cut(Layers(run))
