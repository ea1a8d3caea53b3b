"""The graph of a microbatch in a stage gives a gradient for every input that trains: the stage before waits for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.schedules.stage_graph import StageGraph, StageGraphs
from lightning_fxpipe.simulation.actions import Action
from tests.schedules.test_split_backward import Doubled


def leaves(*values: float) -> list[Tensor]:
    return [torch.tensor([value], requires_grad=True) for value in values]


def test_an_input_without_a_part_in_the_outputs_gets_zeros() -> None:
    used, unused = leaves(2.0, 3.0)
    graph = StageGraph.of([used, unused], [used.exp(), torch.ones(1)])
    assert [gradient.tolist() for gradient in graph.backward([torch.zeros(1), torch.ones(1)])] == [[0.0], [0.0]]
    assert used.grad is None


def test_a_loss_that_does_not_count_leaves_weights_without_gradients() -> None:
    """Of a microbatch without tokens, whose loss is nan: a gradient of nan times zero would be nan."""
    (x,), weight = leaves(2.0), nn.Parameter(torch.ones(1))
    loss = (x * weight).sum() / 0
    assert not loss.isfinite()
    (gradient,) = StageGraph.of([x], [torch.zeros(())]).backward([torch.ones(())])
    assert gradient.tolist() == [0.0]
    assert weight.grad is None


def test_a_graph_can_be_kept_for_one_more_backward_pass_and_for_some_tensors() -> None:
    (x,), weight, other = leaves(2.0), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    graph = StageGraph.of([x], [x * weight * other])
    assert graph.backward([torch.ones(1)], only=[weight], retains=True)[0].tolist() == [1.0]
    assert (weight.grad, other.grad) == (torch.tensor([2.0]), None)
    graph.backward([torch.ones(1)])
    assert (weight.grad, other.grad) == (torch.tensor([4.0]), torch.tensor([2.0]))


def test_the_values_of_outputs_are_not_kept_but_what_led_to_them_is() -> None:
    """An operation written in Python does not own what is behind it."""
    x, weight = torch.ones(1, 2, requires_grad=True), nn.Parameter(torch.ones(2, 2))
    output = Doubled.apply(x.exp(), weight)  # type: ignore[no-untyped-call]
    graph = StageGraph.of([x], [output])
    del output
    (gradient,) = graph.backward([torch.ones(1, 2)])
    assert torch.equal(gradient, 4 * torch.ones(1, 2).exp())


def test_the_second_half_of_a_backward_pass_gives_the_weights_their_gradients() -> None:
    (x,), weight, graphs = leaves(2.0), nn.Parameter(torch.ones(1)), StageGraphs()
    graphs.put(Action.parse("1F0"), StageGraph.of([x], [x * weight]), splits=True)
    assert [gradient.tolist() for gradient in graphs.backward(Action.parse("1I0"), (torch.ones(1),))] == [[1.0]]
    assert weight.grad is None
    assert graphs.backward(Action.parse("1W0"), ()) == ()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0]


def test_a_gradient_that_nothing_waits_for_is_an_error() -> None:
    """The stage before has been told that none comes: what made the tensor would miss it."""
    used, unused = leaves(2.0, 3.0)
    expected = [True, False]
    assert StageGraph.of([used, unused], [used.exp()]).backward([torch.zeros(1)], returned=expected) == (torch.zeros(1),)
    graph = StageGraph.of([used, unused], [used * unused])
    with pytest.raises(UnsupportedError, match="A tensor between two stages has a gradient in this batch, unlike when"):
        graph.backward([torch.ones(1)], returned=expected)
