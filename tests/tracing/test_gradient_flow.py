"""Which tensors of a graph get gradients, compared with what autograd computes on real data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.tracing.gradient_flow import GradientSources, reached_by_gradients
from tests.traces import WIDTH, batch, trace


class Blocks(nn.Module):
    """Three linear blocks, whose results code combines."""

    def __init__(self, combine: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.combine = combine

    def forward(self, x: Tensor) -> Any:
        return self.combine(self.blocks, x)


def written(blocks: Any, x: Tensor) -> Any:
    both = torch.zeros(len(x), 2, WIDTH)
    both[:, 0] = blocks[0](x).detach()
    both[:, 1] = blocks[1](x)
    return blocks[2](both.sum(1))


def written_in_a_view(blocks: Any, x: Tensor) -> Any:
    both = torch.zeros(len(x), WIDTH)
    half = both[:, :3]
    half.add_(blocks[0](x)[:, 3:])
    return blocks[2](both) + blocks[1](x).detach()


def under_no_grad(blocks: Any, x: Tensor) -> Any:
    with torch.no_grad():
        h = blocks[0](x)
    return blocks[2](h + blocks[1](x))


def one_of_a_pair(blocks: Any, x: Tensor) -> Any:
    a, b = blocks[0](x).chunk(2, -1)
    return blocks[2](torch.cat([a.detach(), blocks[1](x)[:, 3:]], -1)) + b.detach().sum()


CODE: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "chain": (lambda blocks, x: blocks[2](blocks[1](blocks[0](x))), "yyy"),
    "detached": (lambda blocks, x: blocks[2](blocks[1](blocks[0](x).detach())), "nyy"),
    "straight through": (lambda blocks, x: blocks[2]((h := blocks[1](blocks[0](x))) + (h.round() - h).detach()), "yyy"),
    "times nothing": (lambda blocks, x: blocks[2](blocks[1](x)) + 0 * blocks[0](x), "yyy"),
    "argmax": (lambda blocks, x: blocks[2](blocks[1](x))[blocks[0](x).argmax(-1) % 2], "nyy"),
    "written": (written, "nyy"),
    "written in a view": (written_in_a_view, "yny"),
    "under no_grad": (under_no_grad, "nyy"),
    "one of a pair": (one_of_a_pair, "nyy"),
}


@pytest.mark.parametrize("name", CODE)
def test_the_blocks_that_get_a_gradient_are_those_of_autograd(name: str) -> None:
    combine, expected = CODE[name]
    model = Blocks(combine)
    traced = trace(model, batch(), opened=("blocks",))
    (result,) = traced.output_node.args[0]  # type: ignore[misc]
    sources = GradientSources([result])  # type: ignore[list-item]
    calls = {str(node.target): node for node in traced.graph.nodes if node.op == "call_module"}
    found = [result is (node := calls[f"blocks.{i}"]) or bool(sources.of(node, lambda user: True)) for i in range(3)]
    model(batch()).sum().backward()
    assert [linear.weight.grad is not None for linear in model.blocks] == found == [c == "y" for c in expected]  # type: ignore[union-attr]


def test_each_result_has_its_own_tensors_and_a_cut_counts_only_what_is_behind_it() -> None:
    traced = trace(Blocks(lambda blocks, x: ((h := blocks[0](x)) + 1, blocks[2](blocks[1](h)), x)), batch(), opened=("blocks",))
    nodes = {str(node.target): node for node in traced.graph.nodes if node.op == "call_module"}
    sources = GradientSources(traced.output_node.args[0])  # type: ignore[arg-type]
    first = nodes["blocks.0"]
    assert sources.of(first, lambda user: True) == {0, 1}
    assert sources.of(first, lambda user: user is nodes["blocks.1"]) == {1}
    assert sources.of(nodes["blocks.1"], lambda user: True) == {1}
    assert sources.of(nodes["blocks.2"], lambda user: False) == {1}  # it is that result


def test_a_tensor_gets_the_gradients_of_what_is_written_into_it() -> None:
    """When it was made, it required none."""
    traced = trace(Blocks(written), batch(), opened=("blocks",))
    (made,) = (node for node in traced.graph.nodes if node.target is torch.zeros)
    assert GradientSources(traced.output_node.args[0]).of(made, lambda user: True) == {0}  # type: ignore[arg-type]


def test_of_a_call_on_dummy_values_all_operands_are_taken_to_get_gradients() -> None:
    x, unused, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), nn.Parameter(torch.ones(2))
    made_up = torch.ones(2, requires_grad=True)
    assert reached_by_gradients([x * weight], [x, unused]) == [0]
    assert reached_by_gradients([x * made_up], [x, unused]) == [0, 1]
    assert reached_by_gradients([x.detach()], [x, unused]) == []


def test_a_view_of_a_parameter_made_under_no_grad_has_no_gradient() -> None:
    """It says that it requires one."""
    weight = nn.Parameter(torch.ones(2, 2))
    with torch.no_grad():
        view = weight.unsqueeze(0)
    assert reached_by_gradients([view], [weight]) == []
