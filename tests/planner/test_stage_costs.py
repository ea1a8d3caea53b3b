"""Seconds and bytes of stages by hand, and a chain that is cut by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.planner.cost import build_chain
from lightning_fxpipe.planner.fastest_cut import TimedChain
from lightning_fxpipe.planner.load import Load
from lightning_fxpipe.planner.measured_costs import UnitSeconds
from lightning_fxpipe.planner.stage_costs import stage_costs, stage_work, units_as_stages
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.simulation.costs import StageWork
from lightning_fxpipe.simulation.devices import DEVICES, Device, Operator
from lightning_fxpipe.simulation.orders import one_forward_one_backward
from tests.models import make_model, make_samples
from tests.traces import call_of, trace


def table(model: nn.Module, batch: Tensor, opened: Any = None) -> UnitCosts:
    return UnitCosts(chain=build_chain(trace(model, batch, opened=opened)), call=call_of(batch))


SLOW = Device(flops_per_second=100, bytes_per_second=10, operator_seconds=0.5)


def test_an_operator_takes_what_is_longest() -> None:
    assert SLOW.seconds([Operator(200, 1)]) == 2
    assert SLOW.seconds([Operator(1, 30)]) == 3
    assert SLOW.seconds([Operator(1, 1), Operator(200, 30)]) == 0.5 + 3


def test_two_layers_by_hand() -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 5, bias=False))
    costs = table(model, torch.randn(2, 3))
    device = Device(flops_per_second=1, bytes_per_second=float("inf"))
    first, last = stage_costs(costs, [0], device, Load(schedule="gpipe", num_ranks=2, optimizer_bytes_per_byte=3))
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
    costs = table(model, torch.randn(2, 3))
    first, _ = stage_costs(costs, [0], SLOW)
    assert (first.weight_backward_seconds, first.state_bytes) == (0, 16 * 4)


@pytest.mark.parametrize("name", DEVICES)
def test_a_model_is_cut_by_what_its_stages_take(name: str) -> None:
    torch.manual_seed(0)
    model, (inputs, _) = make_model("gpt"), make_samples("gpt", 4)
    costs = table(model, inputs, opened=())
    device, sites = DEVICES[name], costs.chain.sites[:-1]
    chain = TimedChain(
        units=units_as_stages(costs, costs.seconds_on(device)),
        cut_bytes=[None if site.obstacle else float(site.num_bytes) for site in sites],
        num_stages=3,
        make_table=lambda stages: one_forward_one_backward(len(stages), 8),
        link=device.link,
        memory_bytes=[device.memory_bytes] * 3,
        states=costs.states(),
    )
    found = chain.fastest()
    assert [*found.simulation.costs] == stage_costs(costs, found.cuts, device)


def test_what_stages_take_beside_each_other_by_hand() -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 5, bias=False), nn.Linear(5, 5, bias=False))
    costs = table(model, torch.randn(2, 3))
    # Flops, and bytes of what is read and written: samples, weights and results.
    layers = [2 * 2 * n * m + 4 * (2 * n + n * m + 2 * m) for n, m in ((3, 4), (4, 5), (5, 5))]
    mean = (2 * layers[0] + 3 * layers[1] + 3 * layers[2]) / 2
    first, last = stage_work(costs, [0])
    # The batch trains nothing, so the first layer has no gradients for it.
    assert first == StageWork(
        forward=round(layers[0] / mean, 4), input_backward=0.0, weight_backward=round(layers[0] / mean, 4), kept_bytes=0
    )
    both = round((layers[1] + layers[2]) / mean, 4)
    kept = 2 * 4 * 4 + 2 * 5 * 4
    assert last == StageWork(forward=both, input_backward=both, weight_backward=both, kept_bytes=kept)
    of_first, of_last = first.costs, last.costs
    assert (of_last.forward_seconds, of_last.activation_bytes, of_last.weight_bytes) == (both, kept, kept / 2)
    assert of_first.input_backward_seconds == 0


def test_a_clock_says_more_than_flops() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    costs = table(model, torch.randn(2, 3))
    seconds = [UnitSeconds(1.0, 0.0, 2.0), UnitSeconds(3.0, 4.0, 5.0), UnitSeconds(1.0, 1.0, 1.0)]
    first, last = stage_work(costs, [1], seconds=seconds)
    assert (first.forward, first.input_backward, first.weight_backward) == (0.4444, 0.4444, 0.7778)  # of 9 for each stage
    assert (last.forward, last.input_backward, last.weight_backward) == (0.1111, 0.1111, 0.1111)
    assert stage_work(costs, [1], seconds=[UnitSeconds(0, 0, 0)] * 3) == ()


def test_what_is_recomputed_is_computed_for_each_half_and_not_kept() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)) for _ in range(3)))
    costs = table(model, torch.randn(2, 3), opened=("0", "1", "2"))
    assert len(costs.chain.units) == 9
    seconds = [UnitSeconds(1.0, 1.0 if index else 0.0, 2.0) for index in range(9)]
    plain = stage_work(costs, [2, 5], seconds=seconds)
    again = stage_work(costs, [2, 5], seconds=seconds, recomputed=["1"])
    assert plain[1].kept_bytes > again[1].kept_bytes == 2 * 3 * 4  # what the block gets
    assert [again[stage].kept_bytes for stage in (0, 2)] == [plain[stage].kept_bytes for stage in (0, 2)]
    of_forward = again[1].forward
    assert again[1].input_backward == pytest.approx(2 * of_forward, abs=1e-3)
    assert again[1].weight_backward == pytest.approx(3 * of_forward, abs=1e-3)
    assert again[2].input_backward == pytest.approx(of_forward, abs=1e-3)
