"""Modules that stay whole and keep something from one of their calls for the next one, in stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.cost import Chain
from tests.staging import WIDTH, assert_stages_equal_whole, batch, chain_of

Does = Callable[["Kept", Tensor], Tensor]


class Inner(nn.Module):
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.scale = x.std(1, keepdim=True)
        return x / self.scale


class Kept(nn.Module):
    """Does something else at its first and at its second call."""

    def __init__(self, first: Does, second: Does) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.std: Tensor = torch.ones(1, 1)
        self.none: Tensor | None = None
        self.number, self.flag, self.count = 1.0, False, 0
        self.entries: dict[str, Any] = {}
        self.values: list[Any] = []
        self.inner = Inner()
        self.register_buffer("assigned", torch.ones(1, 1))
        self.register_buffer("filled", torch.ones(1, WIDTH))
        self.first, self.second = first, second

    def forward(self, x: Tensor, back: bool) -> Tensor:
        return (self.second if back else self.first)(self, x)


class Model(nn.Module):
    goes_back = True

    def __init__(self, first: Does, second: Does) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.kept = Kept(first, second)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.kept(x, False)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.kept(x, self.goes_back)


def keeps(name: str, value: Callable[[Kept, Tensor], Any]) -> Does:
    def first(kept: Kept, x: Tensor) -> Tensor:
        setattr(kept, name, value(kept, x))
        return x / 2 * kept.gain

    return first


def std(kept: Kept, x: Tensor) -> Tensor:
    return x.std(1, keepdim=True)


def puts(kept: Kept, x: Tensor) -> Tensor:
    kept.entries["std"] = std(kept, x)
    return x * kept.gain


def appends(kept: Kept, x: Tensor) -> Tensor:
    kept.values.append(std(kept, x))
    return x * kept.gain


def counts(kept: Kept, x: Tensor) -> Tensor:
    kept.count += 1
    return x * kept.gain * kept.count


def fills(kept: Kept, x: Tensor) -> Tensor:
    kept.filled.copy_(x.detach().mean(0, keepdim=True))
    return x * kept.gain


def embeds(kept: Kept, x: Tensor) -> Tensor:
    if kept.none is None:
        kept.none = torch.tanh(x * kept.gain)
    return kept.none + x


def looks(kept: Kept, x: Tensor) -> Tensor:
    kept.std = x.std(1, keepdim=True)
    return x * kept.gain if x.sum() > 100 else x / kept.std * kept.gain


TRAVELS: dict[str, tuple[Does, Does]] = {
    "a tensor": (keeps("std", std), lambda kept, x: x * kept.std),
    "a detached one": (keeps("std", lambda kept, x: std(kept, x).detach()), lambda kept, x: x * kept.std),
    "its input": (keeps("std", lambda kept, x: x), lambda kept, x: x * kept.std),
    "of weights": (keeps("std", lambda kept, x: kept.gain.exp()), lambda kept, x: x * kept.std),
    "an embedding": (embeds, embeds),
    "in a submodule": (lambda kept, x: kept.inner(x) * kept.gain, lambda kept, x: x * kept.inner.scale),
    "returned": (keeps("std", std), lambda kept, x: kept.std + 0 * x),
    "two": (
        lambda kept, x: keeps("none", lambda kept, x: x.mean(1, keepdim=True))(kept, x) + keeps("std", std)(kept, x),
        lambda kept, x: x * kept.std + (0 if kept.none is None else kept.none),
    ),
    "of a module that looks at values": (looks, lambda kept, x: x * kept.std if x.sum() > 100 else x / kept.std),
}
SHARES: dict[str, tuple[Does, Does, str]] = {
    "a number": (keeps("number", lambda kept, x: 3.0), lambda kept, x: x * kept.number, "kept.number"),
    "a size": (keeps("number", lambda kept, x: x.shape[0]), lambda kept, x: x * kept.number, "kept.number"),
    "the same again": (keeps("number", lambda kept, x: 1.0), lambda kept, x: x * kept.number, "kept.number"),
    "a flag": (keeps("flag", lambda kept, x: True), lambda kept, x: x * 2 if kept.flag else x, "kept.flag"),
    "a count": (counts, counts, "kept.count"),
    "an entry": (puts, lambda kept, x: x * kept.entries["std"], "kept.entries"),
    "a list": (appends, lambda kept, x: x * kept.values.pop(), "kept.values"),
    "an assigned buffer": (
        keeps("assigned", lambda kept, x: std(kept, x).detach()),
        lambda kept, x: x * kept.assigned,
        "kept.assigned",
    ),
    "a filled buffer": (fills, lambda kept, x: x * kept.filled, "kept.filled"),
    "for the next step": (
        lambda kept, x: x * kept.std * kept.gain,
        keeps("std", lambda kept, x: std(kept, x).detach()),
        "kept.std",
    ),
}


def chain(first: Does, second: Does) -> Chain:
    return chain_of(Model(first, second), batch(), opened=())


@pytest.mark.parametrize("name", TRAVELS)
def test_a_tensor_goes_to_the_stage_of_the_next_call(name: str) -> None:
    """It is one more operand of the call that reads it: another stage's module has what the constructor left there."""
    made = chain(*TRAVELS[name])
    assert not [site.obstacle for site in made.sites[:-1] if site.obstacle]
    last = len(made.sites) - 1
    assert_stages_equal_whole(Assignment(chain=made, cuts=(0, last - 1)), batch())
    assert_stages_equal_whole(Assignment(chain=made, cuts=(2,)), batch())


@pytest.mark.parametrize("name", SHARES)
def test_whatever_else_is_kept_holds_the_calls_in_one_stage(name: str) -> None:
    *does, why = SHARES[name]
    made = chain(*does)
    assert all(site.obstacle is not None and why in site.obstacle for site in made.sites[:-1]), made.sites


def test_the_reason_names_the_line() -> None:
    made = chain(*SHARES["a flag"][:2])
    assert "test_kept_state.py:" in str(made.sites[0].obstacle)


class Table(Kept):
    """Makes a table at its first call, which others use."""

    length = 0

    def forward(self, x: Tensor, back: bool) -> Tensor:
        if self.length < x.shape[1]:
            self.length = x.shape[1]
            self.std = torch.arange(x.shape[1], dtype=x.dtype).cos()
        return x * self.std * self.gain


def test_a_cache_that_each_stage_fills_by_itself_forbids_no_cut_and_is_not_sent() -> None:
    model = Model(fills, fills)
    model.kept, model.goes_back = Table(fills, fills), False
    made = chain_of(model, batch(), opened=())
    assert not [site.obstacle for site in made.sites[:-1] if site.obstacle]
    assert all(len(site.crossing) == 1 for site in made.sites)
    assert_stages_equal_whole(Assignment(chain=made, cuts=(0, 4)), batch())


@pytest.mark.parametrize("does", [lambda kept, x: setattr(kept, "number", x.shape[1]) or x * kept.number * kept.gain])
def test_what_a_call_sets_before_it_reads_it_is_its_own(does: Does) -> None:
    made = chain(does, does)
    assert not [site.obstacle for site in made.sites[:-1] if site.obstacle]
