"""Values that recorded code has read are compared, whatever their kind."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_fxpipe.tracing.comparable import Unplain, comparable

MANY = 5000
LAYER, TENSOR = nn.Linear(2, 2), torch.ones(2)


class Mode(Enum):
    ON = 1
    OFF = 2


@dataclass(slots=True)
class Slotted:
    scale: float = 1.0


class Doubles:
    def __call__(self, x: float) -> float:
        return 2 * x

    def method(self, x: float) -> float:
        return x


class Triples(Doubles):
    def __call__(self, x: float) -> float:
        return 3 * x

    def other(self, x: float) -> float:
        return 3 * x


def holding(value: float) -> Callable[[], float]:
    return lambda: value


def with_default(value: float) -> Callable[[], float]:
    def get(number: float = value) -> float:
        return number

    return get


OTHERS: dict[str, Callable[[float], Any]] = {
    "float": float,
    "not a number": lambda v: [float("nan"), v],
    "list": lambda v: [1, {"a": v}],
    "deque": lambda v: deque([1.0, v], maxlen=3),
    "set": lambda v: {1.0, (v, 3)},
    "frozen set": lambda v: frozenset({v}),
    "another order": lambda v: OrderedDict(a=1, b=2) if v == 1 else OrderedDict(b=2, a=1),
    "a length": lambda v: [torch.ones(2)] * int(v),
    "None or a tensor": lambda v: [None if v == 1 else torch.ones(2)],
    "dict by module": lambda v: {LAYER: v, TENSOR: 1.0, (1, 2): 3},
    "read-only mapping": lambda v: MappingProxyType({"a": v}),
    "large list": lambda v: [*range(MANY), v],
    "large tuple": lambda v: (*range(MANY), v),
    "large set": lambda v: {*range(MANY), v - 0.5},
    "large frozen set": lambda v: frozenset({*range(MANY), v - 0.5}),
    "large deque": lambda v: deque([*range(MANY), v]),
    "large list in an object": lambda v: SimpleNamespace(table=[*range(MANY), v]),
    "large dict": lambda v: {**dict.fromkeys(range(MANY), 0.0), -1: v},
    "many lists": lambda v: {"scale": v, "data": [[index] * 3 for index in range(500)]},
    "array of numpy": lambda v: np.array([1, v]),
    "scalar of numpy": np.float64,
    "array": lambda v: array("d", [v]),
    "bytes that change": lambda v: bytearray([int(v)]),
    "object": lambda v: SimpleNamespace(a=v, inside=SimpleNamespace(b=1)),
    "object inside": lambda v: SimpleNamespace(a=1, inside=SimpleNamespace(b=v)),
    "object with slots": Slotted,
    "closure": holding,
    "default value": with_default,
    "function": lambda v: [lambda x: x + 1] if v == 1 else [lambda x: x + 2],
    "function of torch": lambda v: SimpleNamespace(act=torch.tanh if v == 1 else torch.relu),
    "partial": lambda v: partial(round, ndigits=int(v)),
    "partial of torch": lambda v: partial(torch.mul, other=v),
    "bound method": lambda v: Triples().method if v == 1 else Triples().other,
    "callable object": lambda v: Doubles() if v == 1 else Triples(),
    "function of an operator": lambda v: itemgetter(int(v)),
    "class": lambda v: Doubles if v == 1 else Triples,
    "class of torch": lambda v: nn.ReLU if v == 1 else nn.Tanh,
    "enum": lambda v: Mode.ON if v == 1 else Mode.OFF,
    "dtype": lambda v: torch.float32 if v == 1 else torch.bfloat16,
    "decimal": lambda v: Decimal(v),
    "fraction": lambda v: Fraction(int(v)),
    "path": lambda v: Path(str(v)),
    "duration": lambda v: timedelta(seconds=v),
    "range": lambda v: range(int(v)),
    "slice": lambda v: slice(0, v),
}
# Two of them, made of the same number, are two values: nothing tells that they do the same.
_MADE_ANEW = {"function of an operator"}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_another_value_is_noticed_and_an_equal_one_is_the_same(make: Callable[[float], Any], request: Any) -> None:
    """Only lists, dicts, arrays and objects with attributes were compared, so that all else kept its first value."""
    value = make(1.0)
    before = comparable(value)
    assert before == comparable(value)
    assert before != comparable(make(2.0))
    if request.node.callspec.id not in _MADE_ANEW:
        assert before == comparable(make(1.0))


@pytest.mark.parametrize("value", [torch.ones(2), nn.Linear(2, 2), torch.Generator()], ids=["tensor", "module", "torch's"])
def test_what_is_compared_elsewhere_is_left_out(value: Any) -> None:
    with pytest.raises(Unplain):
        comparable(value)


class Unsure:
    """Has no contents, and cannot be compared with another one."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise ValueError

    def __hash__(self) -> int:
        return 0


def test_a_value_that_cannot_be_compared_is_the_same_only_as_itself() -> None:
    value = Unsure()
    assert comparable([value]) == comparable([value])
    assert comparable([value]) != comparable([Unsure()])


def test_a_large_list_that_changes_inside_an_object_is_noticed() -> None:
    """The list itself is still the same object."""
    held = SimpleNamespace(table=[1.0] * MANY)
    before = comparable(held)
    held.table[5] = 2.0
    assert comparable(held) != before


def test_modules_and_tensors_inside_are_no_values() -> None:
    held = SimpleNamespace(scale=1.0, layer=nn.Linear(2, 2), table=torch.ones(2))
    before = comparable(held)
    held.layer.extra, held.table = 3, torch.zeros(2)
    assert comparable(held) == before
    held.scale = 2.0
    assert comparable(held) != before


def test_numbers_that_do_not_count_are_left_out() -> None:
    varying = [(("attribute", "items"), ("index", 0))]
    assert comparable(SimpleNamespace(items=[1.0, 5]), varying) == comparable(SimpleNamespace(items=[2.0, 5]), varying)
    assert comparable(SimpleNamespace(items=[1.0, 5]), varying) != comparable(SimpleNamespace(items=[1.0, 6]), varying)
