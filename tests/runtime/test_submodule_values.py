"""Which attributes of submodules are compared, and what differs in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_fxpipe.runtime.submodule_values import SubmoduleValues
from lightning_fxpipe.user_code.members import Members


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.settings, self.items = nn.Linear(2, 2), 1.0, {"shift": 0.0, "by": [1]}, [1]
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        return self.layer(x) * self.scale

    def rescale(self, scale: float) -> None:
        self.scale = scale


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.metric = Block(), MeanMetric()

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.block(batch).sum()
        self.metric.update(loss)
        self.set(self.block, float(loss))
        return loss

    def set(self, block: Any, value: float) -> None:
        block.rescale(value)
        block.settings["shift"] = value
        block.items.append(value)


def differences(module: Module, change: Any) -> dict[str, Any]:
    values = SubmoduleValues.of_step(module, Members(module), module.training_step)
    change()
    return {
        ".".join(str(key) for _, key in each.path[2:]) + (f"[{each.start}:]" if each.start else ""): each.value
        for each in values.differences()
    }


def test_what_methods_that_the_step_names_set_and_what_is_in_containers() -> None:
    module = Module()
    found = differences(module, lambda: module.set(module.block, 2.0))
    assert found == {"scale": 2.0, "settings.shift": 2.0, "items[1:]": [2.0]}


def test_a_new_container_is_one_difference_and_the_same_number_none() -> None:
    module = Module()
    new = {"shift": 3.0}

    def change() -> None:
        module.block.settings = new
        module.block.scale = float("1.0")

    assert differences(module, change) == {"settings": new}


def test_what_a_forward_keeps_and_metrics_count_is_no_affair_of_the_step() -> None:
    module = Module()

    def change() -> None:
        module.block(torch.ones(1, 2))
        module.metric.update(1.0)

    assert differences(module, change) == {}


def test_what_a_forward_that_is_step_code_sets_after_the_region_and_nothing_else_of_it() -> None:
    module = Module()
    values = SubmoduleValues.of_step(module, Members(module), module.training_step)
    values.take(("", "block"))
    module.block.rescale(4.0)
    module.block.hidden = [torch.ones(2, device="meta")]  # of another stage
    module.block.items.append(5.0)
    found = {each.path[1:]: (each.start, each.value) for each in values.differences()}
    inside = ("attribute", ("_modules", "block"))
    assert found == {
        (inside, ("attribute", "scale")): (None, 4.0),
        (inside, ("attribute", "items")): (1, [5.0]),
    }
    values.take()
    assert not [*values.differences()]
