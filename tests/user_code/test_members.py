"""What a module holds, listed once: every way in which a member can be exchanged makes the lists anew."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from lightning_fxpipe.user_code.members import Members


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.named = nn.ModuleDict({"a": nn.BatchNorm1d(2), "b": nn.Dropout()})
        self.sequence = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        self.scales = nn.ParameterList(torch.ones(2) for _ in range(2))
        self.tied = self.layers[0]
        self.register_buffer("mean", torch.zeros(2))
        self.nothing = None


def swap(layers: nn.ModuleList) -> None:
    layers[1], layers[2] = layers[2], layers[1]


def is_right(members: Members, root: nn.Module) -> bool:
    def same(one: Any, other: Any) -> bool:
        listed = dict(other)
        return list(one) == list(listed) and all(one[name] is listed[name] for name in one)

    return (
        same(members.modules, root.named_modules())
        and same(members.parameters, root.named_parameters())
        and same(members.buffers, root.named_buffers())
    )


EXCHANGES: dict[str, Callable[[Model], Any]] = {
    "a submodule set": lambda model: setattr(model, "head", nn.Linear(2, 2)),
    "a submodule in another's place": lambda model: setattr(model, "tied", nn.Linear(2, 2)),
    "a submodule deleted": lambda model: delattr(model, "sequence"),
    "a submodule made None": lambda model: setattr(model, "sequence", None),
    "None becomes a submodule": lambda model: setattr(model, "nothing", nn.Tanh()),
    "put into a list": lambda model: model.layers.insert(1, nn.Tanh()),
    "appended to a list": lambda model: model.layers.append(nn.Tanh()),
    "exchanged in a list": lambda model: model.layers.__setitem__(1, nn.Linear(2, 2)),
    "deleted from a list": lambda model: model.layers.__delitem__(1),
    "two of a list change places": lambda model: swap(model.layers),
    "taken out of a dict": lambda model: model.named.pop("a"),
    "a dict cleared": lambda model: model.named.clear(),
    "taken out of a sequence": lambda model: model.sequence.pop(1),
    "put into a sequence": lambda model: model.sequence.insert(0, nn.Tanh()),
    "a parameter set": lambda model: setattr(model.layers[1], "weight", nn.Parameter(torch.ones(2, 2))),
    "a parameter made None": lambda model: setattr(model.layers[1], "bias", None),
    "a parameter deleted": lambda model: delattr(model.layers[1], "bias"),
    "a parameter of a list": lambda model: model.scales.__setitem__(0, nn.Parameter(torch.ones(2))),
    "parametrized": lambda model: parametrizations.weight_norm(model.layers[1]),
    "a buffer set": lambda model: setattr(model, "mean", torch.ones(2)),
    "a buffer made None": lambda model: setattr(model.named["a"], "running_mean", None),
    "a buffer registered": lambda model: model.layers[2].register_buffer("new", torch.ones(1)),
    "buffers of another dtype": lambda model: model.half(),
    "loaded by assignment": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
}
# What leaves every member where it is.
CHANGES: dict[str, Callable[[Model], Any]] = {
    "other values": lambda model: [parameter.data.add_(1) for parameter in model.parameters()],
    "other memory": lambda model: setattr(model.layers[0].weight, "data", torch.ones(2, 2)),
    "another mode": lambda model: model.eval(),
    "frozen": lambda model: model.requires_grad_(False),
    "an attribute": lambda model: setattr(model, "count", 3),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_is_noticed(name: str) -> None:
    model = Model()
    members = Members(model)
    assert is_right(members, model)
    EXCHANGES[name](model)
    assert not is_right(members, model), "the test is one of an exchange"
    assert is_right(members.renewed(), model)


@pytest.mark.parametrize("name", CHANGES)
def test_the_lists_stay_the_same_objects_without_an_exchange(name: str) -> None:
    model = Model()
    members = Members(model)
    lists = members.modules, members.parameters, members.buffers
    CHANGES[name](model)
    members.renewed()
    assert all(one is other for one, other in zip(lists, (members.modules, members.parameters, members.buffers), strict=True))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(sorted({**EXCHANGES, **CHANGES})), max_size=6, unique=True))
def test_after_any_changes_the_lists_are_those_of_torch(names: list[str]) -> None:
    model = Model()
    members = Members(model)
    for name in names:
        with suppress(AttributeError, KeyError, IndexError, RuntimeError, TypeError, ValueError):  # what it changes is gone
            (EXCHANGES | CHANGES)[name](model)
        assert is_right(members.renewed(), model)


def test_flags_and_types_are_those_of_now() -> None:
    model = Model()
    members = Members(model)
    assert members.of_type((nn.Dropout,)) == {"named.b": model.named["b"]}
    before = members.flags()
    model.named["b"].eval()
    assert members.flags() != before
    model.named["b"].train()
    model.layers[1].bias.requires_grad_(False)
    assert members.flags() != before
    del model.named["b"]
    assert members.renewed().of_type((nn.Dropout,)) == {}


def test_placeholders_of_other_ranks_are_not_own_parameters() -> None:
    model = Model()
    model.layers[1] = nn.Linear(2, 2, device="meta")
    own = Members(model).own_parameters()
    assert len(own) == len(list(model.parameters())) - 2
    assert not any(parameter.is_meta for parameter in own)
