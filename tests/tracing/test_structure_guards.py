"""A graph is not used once the modules that it was recorded from are others, have hooks, or another forward."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.tracing.recordable import RegionCall
from lightning_fxpipe.tracing.structure_guards import StructureKey
from lightning_fxpipe.tracing.trace import TracedRegion, trace_region
from tests.traces import covers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"act": nn.ReLU(), "unused": nn.ReLU()})
        self.layer = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner["act"](self.layer(x))


def call() -> RegionCall:
    return RegionCall(path="", args=(torch.ones(2, 3),), kwargs={}, batch_size=2)


def model_and_trace() -> tuple[nn.Sequential, TracedRegion]:
    model = nn.Sequential(Block(), Block())
    traced = trace_region(model, call(), opened=["0"])
    assert covers(traced, call())
    return model, traced


def key_of(traced: TracedRegion) -> StructureKey:
    return next(key for key in traced.guards if isinstance(key, StructureKey))


class Slotted:
    """A callable that cannot be referred to weakly."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        return x


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another module in the graph": lambda m: m[0].inner.update({"act": nn.Tanh()}),
    "an equal one": lambda m: m[0].inner.update({"act": nn.ReLU()}),
    "another whole module": lambda m: setattr(m, "1", Block()),
    "another opened module": lambda m: setattr(m, "0", Block()),
    "none": lambda m: delattr(m, "1"),
    "none in place of one": lambda m: m[0].inner.update({"act": None}),
    "no opened module": lambda m: delattr(m, "0"),
    "a hook": lambda m: m[0].register_forward_hook(lambda *args: None),
    "a forward": lambda m: setattr(m[0], "forward", torch.relu),
    "an odd forward": lambda m: setattr(m[0], "forward", Slotted()),
    "another class": lambda m: setattr(m[0], "__class__", type("Other", (Block,), {"forward": lambda self, x: x})),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_trace_is_not_used_once_its_modules_change(name: str) -> None:
    model, traced = model_and_trace()
    key = key_of(traced)
    before = key.value(model)
    CHANGES[name](model)
    assert key.value(model) != before
    assert not covers(traced, call())


UNSEEN: dict[str, Callable[[Any], Any]] = {
    "a module that is not called": lambda m: m[0].inner.update({"unused": nn.Tanh()}),
    "a new one": lambda m: setattr(m[0], "more", nn.Tanh()),
    "inside a whole module": lambda m: m[1].inner.update({"act": nn.Tanh()}),
    "a hook on a whole module": lambda m: m[1].register_forward_hook(lambda *args: None),
    "a hook on a called module": lambda m: m[0].layer.register_forward_hook(lambda *args: None),
    "its own method as its forward": lambda m: setattr(m[0], "forward", m[0].forward),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_runs_as_it_is_then_makes_no_new_trace(name: str) -> None:
    model, traced = model_and_trace()
    key = key_of(traced)
    before = key.value(model)
    UNSEEN[name](model)
    assert key.value(model) == before


def test_a_module_in_the_memory_of_another_is_not_taken_for_it() -> None:
    """An ``id`` is that of the next object once its own is gone."""
    model, traced = model_and_trace()
    key = key_of(traced)
    seen = {key.value(model)}
    for _ in range(50):
        model[0].inner["act"] = nn.Tanh()
        gc.collect(0)
        assert key.value(model) not in seen
        seen.add(key.value(model))


class Made(nn.Linear):
    """Its class makes a forward for each look."""

    forward = partialmethod(nn.Linear.forward)  # type: ignore[assignment]


def test_a_forward_that_is_made_for_each_look_is_the_same_one() -> None:
    model = nn.Sequential(Made(3, 3))
    key = StructureKey(opened=("0",), called=())
    assert key.value(model) == key.value(model)
