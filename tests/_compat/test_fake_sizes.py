"""Arithmetic on sizes gives what torch's own gives."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lightning_fxpipe._compat import torch as _compat
from lightning_fxpipe._compat.fake_sizes import decided_comparisons, number_hint, symbolic_math
from lightning_fxpipe._compat.torch import FakeWorld, patched_attributes, symbolic_expression

OPERATIONS: list[Callable[[Any, Any], Any]] = [
    *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.truediv),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, torch.sym_max, torch.sym_min),
]


def sizes() -> tuple[FakeWorld, torch.SymInt, torch.SymInt]:
    world = FakeWorld()
    x = world.input(torch.ones(6, 4), [0, 1])
    assert isinstance(x.shape[0], torch.SymInt)
    assert isinstance(x.shape[1], torch.SymInt)
    return world, x.shape[0], x.shape[1]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_results_are_those_of_torch(operation: Callable[[Any, Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time they are remembered; numbers of another type are others, though they are equal."""
    _, a, b = sizes()
    monkeypatch.setattr(_compat, "Sizes", ShapeEnv)
    _, c, d = sizes()
    assert type(c.node) is SymNode is not type(a.node)
    for one, other, expected in ((a, b, (c, d)), (a, 2, (c, 2)), (a, 2.0, (c, 2.0)), (3, a, (3, c)), (a + b, a, (c + d, c))):
        wanted = operation(*expected)
        for result in (operation(one, other), operation(one, other)):
            assert type(result) is type(wanted)
            assert symbolic_expression(result) == symbolic_expression(wanted)
            assert getattr(result, "node", wanted.node).hint == wanted.node.hint


def test_a_result_is_calculated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, a, b = sizes()
    assert symbolic_expression(a * b + 2 * a) == symbolic_expression(a) * symbolic_expression(b) + 2 * symbolic_expression(a)

    def again(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(SymNode, "_mul", again)
    monkeypatch.setattr(SymNode, "_add", again)
    assert isinstance(a * b + 2 * a, torch.SymInt)


def test_a_symbol_that_is_found_to_be_a_number_is_that_in_results_from_then_on() -> None:
    _, a, b = sizes()
    assert symbolic_expression(a + b) == symbolic_expression(a) + symbolic_expression(b)
    assert a == 6  # a guard
    assert symbolic_expression(a + b) == 6 + symbolic_expression(b)


def test_whether_a_size_is_a_number_is_asked_once_for_each_symbol_that_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _, a, b = sizes()
    asked: list[SymNode] = []
    original = SymNode.maybe_as_int

    def maybe_as_int(node: SymNode) -> int | None:
        asked.append(node)
        return original(node)

    monkeypatch.setattr(SymNode, "maybe_as_int", maybe_as_int)
    assert a.node.maybe_as_int() is None
    asked.clear()
    assert a.node.maybe_as_int() is None
    assert asked == []
    assert a == 6  # a guard
    assert [a.node.maybe_as_int(), b.node.maybe_as_int()] == [6, None]


def test_results_are_forgotten_with_the_trace() -> None:
    world, a, b = sizes()
    with world.active():
        assert a + b > 2
        assert world.shape_env.results
    assert not world.shape_env.results


@pytest.mark.parametrize("value", [0.25, -3, 1])
def test_a_number_that_is_no_size_is_a_symbol_and_a_comparison_a_condition(value: float) -> None:
    world = FakeWorld()
    symbol, number = world.shape_env.number(value)
    other, _ = world.shape_env.number(value)
    assert symbol != other
    with world.active():
        scaled = torch.ones(4, 2) * (1 - number)
        assert scaled.shape == (4, 2)
        assert not world.guards()
        assert bool(number > 0) is (value > 0)
    (condition,) = world.guards()
    assert condition.free_symbols == {symbol}
    assert float(symbolic_expression(1 - number).subs({symbol: value})) == 1 - value


_FUNCTIONS = ["exp", "log", "sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "log2"]
_OF_MATH = [(math, name) for name in (*_FUNCTIONS, "asin", "acos", "atan")]
_OF_NUMPY = [(np, name) for name in (*_FUNCTIONS, "arcsin", "arccos", "arctan")]


@pytest.mark.parametrize(("module", "name"), [*_OF_MATH, *_OF_NUMPY], ids=lambda each: getattr(each, "__name__", each))
def test_functions_of_math_and_numpy_give_expressions_of_numbers(module: Any, name: str) -> None:
    world, value = FakeWorld(), 0.25
    symbol, number = world.shape_env.number(value)
    original = getattr(module, name)
    with world.active(), patched_attributes(*symbolic_math()):
        found = getattr(module, name)(number)
        assert getattr(module, name)(value) == original(value)
    assert getattr(module, name) is original
    assert not world.guards()
    assert not world.replacements()
    for other in (value, 0.75):
        assert float(symbolic_expression(found).subs({symbol: other})) == pytest.approx(original(other), rel=1e-14)


@pytest.mark.parametrize("name", ["minimum", "maximum", "power"])
def test_functions_of_numpy_of_two_numbers_give_expressions(name: str) -> None:
    world = FakeWorld()
    symbol, number = world.shape_env.number(0.25)
    original = getattr(np, name)
    with world.active(), patched_attributes(*symbolic_math()):
        found = getattr(np, name)(number, 0.5)
    for other in (0.25, 0.75):
        assert float(symbolic_expression(found).subs({symbol: other})) == pytest.approx(original(other, 0.5), rel=1e-14)


def test_functions_of_math_ask_for_sizes_as_they_did() -> None:
    """Code goes on with ``int(math.sqrt(n))`` as a size."""
    world = FakeWorld()
    fake = world.input(torch.ones(9, 2), (0,))
    with world.active(), patched_attributes(*symbolic_math()):
        assert type(math.sqrt(fake.shape[0])) is float


def test_the_hint_of_a_number_is_its_value() -> None:
    world = FakeWorld()
    _, number = world.shape_env.number(0.25)
    assert [number_hint(each) for each in (number * 2, 3, "x")] == [0.5, 3, "x"]
    assert not world.guards()


def test_a_comparison_of_sizes_is_a_flag_in_user_code_and_undecided_in_torchs() -> None:
    """Functions in C refuse anything but a bool."""
    world, size, _ = sizes()
    assert type(size > 3) is torch.SymBool
    with world.active(), patched_attributes(*decided_comparisons()):
        assert (size > 3) is True
        assert eval("size > 3", {"size": size, "__name__": "torch.nn"}).__class__ is torch.SymBool
    assert len(world.guards()) == 1
