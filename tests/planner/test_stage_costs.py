"""Seconds and bytes of stages by hand, and a chain that is cut by them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_fxpipe.planner.cost import build_chain
from lightning_fxpipe.planner.fastest_cut import fastest_cut
from lightning_fxpipe.planner.stage_costs import DEVICES, Device, stage_costs, units_as_stages
from lightning_fxpipe.planner.unit_costs import Operator, unit_costs
from lightning_fxpipe.simulation.orders import one_forward_one_backward
from tests.models import make_model, make_samples
from tests.traces import trace

SLOW = Device(flops_per_second=100, bytes_per_second=10, operator_seconds=0.5)


def test_an_operator_takes_what_is_longest() -> None:
    assert SLOW.seconds([Operator(200, 1)]) == 2
    assert SLOW.seconds([Operator(1, 30)]) == 3
    assert SLOW.seconds([Operator(1, 1), Operator(200, 30)]) == 0.5 + 3


def test_two_layers_by_hand() -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 5, bias=False))
    chain = build_chain(trace(model, torch.randn(2, 3)))
    device = Device(flops_per_second=1, bytes_per_second=float("inf"))
    first, last = stage_costs(chain, unit_costs(chain), [0], device, optimizer_bytes_per_byte=3)
    assert (first.forward_seconds, last.forward_seconds) == (2 * 2 * 3 * 4, 2 * 2 * 4 * 5)
    # The batch trains nothing, so the first layer has no gradients for it.
    assert (first.input_backward_seconds, first.weight_backward_seconds) == (0, first.forward_seconds)
    assert (last.input_backward_seconds, last.weight_backward_seconds) == (last.forward_seconds, last.forward_seconds)
    assert (first.output_bytes, last.output_bytes) == (2 * 4 * 4, 0)
    assert (first.activation_bytes, last.activation_bytes) == (0, 2 * 4 * 4)
    assert (first.state_bytes, last.state_bytes) == (12 * 4 * 5, 20 * 4 * 5)


def test_what_does_not_train_has_neither_gradients_nor_states() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    model[0].requires_grad_(False)
    chain = build_chain(trace(model, torch.randn(2, 3)))
    first, _ = stage_costs(chain, unit_costs(chain), [0], SLOW)
    assert (first.weight_backward_seconds, first.state_bytes) == (0, 16 * 4)


@pytest.mark.parametrize("name", DEVICES)
def test_a_model_is_cut_by_what_its_stages_take(name: str) -> None:
    torch.manual_seed(0)
    model, (inputs, _) = make_model("gpt"), make_samples("gpt", 4)
    chain = build_chain(trace(model, inputs, opened=()))
    costs, device = unit_costs(chain), DEVICES[name]
    cut_bytes = [None if site.obstacle else float(site.num_bytes) for site in chain.sites[:-1]]
    found = fastest_cut(
        units_as_stages(chain, costs, device),
        cut_bytes,
        3,
        lambda stages: one_forward_one_backward(len(stages), 8),
        link=device.link,
        memory_bytes=[device.memory_bytes] * 3,
    )
    assert found.is_exact
    assert [*found.simulation.costs] == stage_costs(chain, costs, found.cuts, device)
