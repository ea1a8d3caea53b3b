"""Tensors that a graph has from elsewhere than its inputs and the parameters are those of today."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.planner.follow_plan import follow_plan
from lightning_fxpipe.planner.planning import plan_region
from lightning_fxpipe.stages.build import build_stages
from lightning_fxpipe.tracing.recordable import RegionCall
from lightning_fxpipe.tracing.trace import TracedRegion, trace_region
from tests.traces import covers

TABLE: dict[str, Any] = {}
FACTOR = 1.0


class Setting:
    factor = 1.0


class Model(nn.Module):
    kind_factor = 1.0

    def __init__(self, *, looks: bool = False) -> None:
        super().__init__()
        global FACTOR
        FACTOR, Setting.factor, type(self).kind_factor = 1.0, 1.0, 1.0
        TABLE["shift"] = torch.zeros(3)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = torch.ones(3)
        self.register_buffer("mean", torch.zeros(3))
        self.bank = [torch.zeros(3), torch.zeros(3)]
        self.looks = looks

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * self.scale + TABLE["shift"] + self.bank[1]
        h = h * FACTOR * Setting.factor * self.factor()
        if self.looks:
            h = h * (1 + (x.abs() * self.bank[0]).sum().item())
        return self.second(h - self.mean)

    def factor(self) -> float:
        return type(self).kind_factor


def set_factor(model: Model) -> None:
    global FACTOR
    FACTOR = 2.0


REPLACED: dict[str, Callable[[Model], Any]] = {
    "attribute": lambda m: setattr(m, "scale", torch.full((3,), 2.0)),
    "attribute in place": lambda m: m.scale.mul_(3),
    "buffer": lambda m: setattr(m, "mean", torch.ones(3)),
    "global": lambda m: TABLE.update(shift=torch.ones(3)),
    "list": lambda m: m.bank.__setitem__(1, torch.ones(3)),
}
READ: dict[str, Callable[[Model], Any]] = {
    "global number": set_factor,
    "class of settings": lambda m: setattr(Setting, "factor", 2.0),
    "own class": lambda m: setattr(Model, "kind_factor", 2.0),
    "look in place": lambda m: m.bank[0].add_(1.0),
    "look": lambda m: m.bank.__setitem__(0, torch.ones(3)),
    "other shape": lambda m: setattr(m, "scale", torch.ones(1)),
    "gone": lambda m: m.bank.pop(),
}


def call_of(x: Tensor) -> RegionCall:
    return RegionCall(path="", args=(x,), kwargs={}, batch_size=len(x))


def staged(model: Model, x: Tensor) -> tuple[TracedRegion, Callable[[Tensor], Tensor]]:
    plan = plan_region(model, call_of(x), num_stages=2)
    traced = trace_region(model, call_of(x), opened=plan.opened)
    stages = build_stages(follow_plan(plan, traced))

    def run(x: Tensor) -> Tensor:
        received: tuple[Tensor, ...] = ()
        for stage in stages:
            received = stage.module(*received, *([x] if stage.region_inputs else []))
        return received[0]

    return traced, run


@pytest.mark.parametrize("name", REPLACED)
def test_stages_have_the_tensors_of_today(name: str) -> None:
    model, x = Model(), torch.randn(2, 3)
    traced, run = staged(model, x)
    torch.testing.assert_close(run(x), model(x))
    assert not traced.held.have_changed()
    REPLACED[name](model)
    assert traced.held.have_changed() is ("place" not in name)
    assert covers(traced, call_of(x))
    torch.testing.assert_close(run(x), model(x))
    assert not traced.held.have_changed()


@pytest.mark.parametrize("name", READ)
def test_a_graph_that_does_not_fit_any_more_is_not_used(name: str) -> None:
    model, x = Model(looks=True), torch.randn(2, 3)
    traced = trace_region(model, call_of(x))
    assert covers(traced, call_of(x))
    READ[name](model)
    assert not covers(traced, call_of(x))


def test_a_placeholder_is_no_reason_to_record_anew() -> None:
    """What another rank's stage holds is on the meta device here: no rank records by itself for that."""
    model = Model()
    call = RegionCall(path="", args=(torch.ones(2, 3),), kwargs={}, batch_size=2)
    traced = trace_region(model, call)
    model.mean = torch.zeros(3, device="meta")
    assert traced.held.refresh()


def test_a_buffer_of_another_dtype_does_not_fit() -> None:
    model = Model()
    traced = trace_region(model, RegionCall(path="", args=(torch.ones(2, 3),), kwargs={}, batch_size=2))
    model.mean = torch.zeros(3, dtype=torch.float64)
    assert not traced.held.refresh()
