"""Values of any type come apart into tensors and structure, and together again."""

from __future__ import annotations

import threading
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from lightning_fxpipe.pytree.structure import NotFillable, Template, describe, graft, map_tensors

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    name: str


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Plain:
    def __init__(self, x: Tensor) -> None:
        self.inner = {"x": [x]}
        self.lock = threading.Lock()


def tensor_in(value: Any) -> Tensor:
    (tensor,) = Template.of(value).tensors
    return tensor


X = torch.arange(3.0)


@pytest.mark.parametrize(
    "value",
    [
        X,
        [1, (X, None)],
        {"a": X, 3: "b"},
        OrderedDict(a=X),
        UserDict(a=X),
        Pair(1, X),
        Frozen(X, "n"),
        Slotted(X),
        Plain(X),
        {"a": nn.Parameter(X), "b": slice(1, 2)},
    ],
    ids=lambda value: type(value).__name__,
)
def test_filled_value_has_the_type_and_the_new_tensors(value: Any) -> None:
    filled = map_tensors(lambda tensor: tensor + 1, value)
    assert type(filled) is type(value) or isinstance(value, Tensor)
    assert torch.equal(tensor_in(filled), X + 1)
    assert torch.equal(tensor_in(value), X)  # the old one is as it was
    assert Template.of(filled).structure == Template.of(value).structure


def test_packed_sequence_stays_one() -> None:
    packed = pack_padded_sequence(torch.ones(2, 3, 4), torch.tensor([3, 1]), batch_first=True)
    filled = map_tensors(torch.clone, packed)
    assert isinstance(filled, PackedSequence)
    assert torch.equal(filled.batch_sizes, packed.batch_sizes)


def test_tensor_that_occurs_twice_is_one() -> None:
    template = Template.of((X, {"again": X}))
    assert len(template.tensors) == 1
    one, other = template.fill([X + 1])
    assert one is other["again"]


def test_structures_differ_where_anything_but_a_tensor_does() -> None:
    structure = Template.of(({"a": X}, 1)).structure
    assert structure == Template.of(({"a": X * 2}, 1)).structure
    for other in (({"a": X}, 2), ({"b": X}, 1), ([X], 1), ({"a": X}, True)):
        assert structure != Template.of(other).structure


def test_equal_strings_are_equal_whether_or_not_they_are_one_object() -> None:
    name = "".join(["a", "b"])
    assert Template.of(["ab", "ab", X]).structure == Template.of(["ab", name, X]).structure


def test_modules_and_functions_are_shared_not_copied() -> None:
    module = nn.Linear(2, 2)
    filled = map_tensors(torch.clone, {"module": module, "function": torch.relu, "x": X})
    assert filled["module"] is module
    assert filled["function"] is torch.relu


def test_function_that_holds_a_tensor_cannot_be_filled() -> None:
    held = X * 2
    with pytest.raises(NotFillable, match="captures a tensor"):
        Template.of({"function": lambda x: x + held})


def test_objects_told_to_be_shared_are_not_looked_into() -> None:
    shared = Slotted(X)
    template = Template.of([shared], shared={id(shared)})
    assert template.tensors == ()
    assert template.fill([])[0] is shared


def test_graft_changes_objects_in_place() -> None:
    target, source = Plain(X), Plain(X + 1)
    source.inner["more"] = [X]
    inner, items = target.inner, target.inner["x"]
    graft(target, source)
    assert target.inner is inner
    assert inner["x"] is items
    assert torch.equal(items[0], X + 1)
    assert inner["more"] == [X]


def test_description_shows_shapes() -> None:
    assert describe({"a": X, "b": 2}) == "{'a': tensor(3,), 'b': 2}"
