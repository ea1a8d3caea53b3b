"""Symbols for the sizes of fake tensors, on which the same arithmetic is done once. torch 2.9-2.15.

Whatever is asked of a tensor (is it contiguous, how large is its memory) is a dozen of sums and products of its sizes, each of
which torch puts into a normal form anew.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

_OPERATIONS = "add sub mul int_floordiv mod eq ne ge gt le lt sym_max sym_min and_ or_".split()  # noqa: SIM905

# How often a symbol was found equal to another; before torch 2.13, how often anything about symbols was found.
_num_replacements = attrgetter(
    next(filter(vars(ShapeEnv()).__contains__, ("_replacements_version_counter", "_version_counter")))
)


class Sizes(ShapeEnv):
    """Does not note in whose code a symbol or guard comes about, and remembers what sums and products of symbols are.

    The code is not used here. To find it, torch imports its compiler: 17 MiB, and 0.2 seconds of each process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[tuple[Any, ...], Any] = {}
        self.numbers: set[Any] = set()  # symbols that are no sizes

    def number(self, value: int | float) -> tuple[Any, Any]:
        """Makes a symbol for a number that is no size; returns it, and the symbolic number that code gets.

        No public name does. torch 2.9-2.15.
        """
        source = ConstantSource(f"number_{len(self.numbers) + 1}")
        symbol = self.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        self.numbers.add(symbol)
        make = self.create_symfloatnode if isinstance(value, float) else self.create_symintnode
        return symbol, make(symbol, hint=value, source=source)

    def create_symintnode(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces torch's function."""
        size = super().create_symintnode(*args, **kwargs)
        if isinstance(size, torch.SymInt):
            size.node.__class__ = _Size
        return size

    def _get_user_frame(self) -> None:
        return None


def _once(name: str, calculate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """An operation on two sizes that is done once in an environment, as long as no symbol is found equal to another."""

    def operation(one: Any, other: Any) -> Any:
        sizes = one.shape_env
        if one._hint is None or other._hint is None:  # it depends on data
            return calculate(one, other)
        operands = (one._expr, one.pytype, one._optimized_summation, other._expr, other.pytype, other._optimized_summation)
        key = (name, *operands, _num_replacements(sizes))
        result = sizes.results.get(key)
        if result is None:
            result = sizes.results[key] = calculate(one, other)
            result.__class__ = _Size
        return result

    return operation


class _Size(SymNode):
    """A size, a truth about sizes, or a number among them."""

    _as_int: tuple[int, int | None] = (-1, None)  # with the number of replacements for which it holds

    def maybe_as_int(self) -> int | None:
        """Replaces torch's function, which walks through the expression for each size of each tensor that it makes."""
        num_replacements = _num_replacements(self.shape_env)
        if self._as_int[0] != num_replacements:
            self._as_int = (num_replacements, super().maybe_as_int())
        return self._as_int[1]

    def wrap_int(self, num: int) -> Any:
        sizes: Any = self.shape_env
        result = sizes.results.get(num)
        if result is None:
            result = sizes.results[num] = super().wrap_int(num)
            result.__class__ = _Size
        return result


for _name in _OPERATIONS:
    setattr(_Size, _name, _once(_name, getattr(SymNode, _name)))


def number_hint(value: Any) -> Any:
    """Returns the value that a trace runs with in place of a symbolic float; other values as they are. torch 2.9-2.15."""
    hint = value.node.hint if isinstance(value, torch.SymFloat) else None
    return value if hint is None else float(hint)


def _is_of_numbers(value: Any) -> bool:
    """True for an expression of numbers that are no sizes."""
    if not isinstance(value, (torch.SymFloat, torch.SymInt)) or not isinstance(value.node.shape_env, Sizes):
        return False
    return bool(value.node.expr.free_symbols <= value.node.shape_env.numbers)


_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "pow": pow,
    "exp": lambda value: math.e**value,
    "log": lambda value: torch._sym_log2(value) * math.log(2),  # type: ignore[attr-defined]
    **{
        name: getattr(torch, f"_sym_{name}")
        for name in "sqrt cos cosh sin sinh tan tanh asin acos atan log2".split()  # noqa: SIM905
    },
}
# Functions of numpy, most of which have the names of those of math.
_OF_NUMPY = {
    **{{"pow": "power", "asin": "arcsin", "acos": "arccos", "atan": "arctan"}.get(name, name): name for name in _OF_NUMBERS},
    "minimum": "min",
    "maximum": "max",
}
_OF_TWO: dict[str, Callable[..., Any]] = {"pow": pow, "min": torch.sym_min, "max": torch.sym_max}


def symbolic_math() -> list[tuple[Any, str, Any]]:
    """Patches by which functions of :mod:`math` and numpy return expressions for symbolic numbers, and do not ask for values.

    torch has most of these functions, under private names. torch 2.9-2.15.
    """

    def call(original: Callable[..., Any], name: str, *values: Any, **options: Any) -> Any:
        if options or not any(map(_is_of_numbers, values)) or (len(values) == 2) != (name in _OF_TWO):
            return original(*values, **options)
        with torch._C.DisableTorchFunction():
            return (_OF_TWO.get(name) or _OF_NUMBERS[name])(*map(torch.sym_float, values))

    places = [*((math, name, name) for name in _OF_NUMBERS), *((np, name, ours) for name, ours in _OF_NUMPY.items())]
    return [(module, name, partial(call, getattr(module, name), ours)) for module, name, ours in places]


# Who may compare sizes without deciding anything by it.
_UNDECIDED = ("torch", "sympy", "lightning_fxpipe")


def decided_comparisons() -> list[tuple[Any, str, Any]]:
    """Patches by which user code that compares sizes or numbers gets a bool, and the condition is one of the trace.

    Functions in C accept no other flag: ``torch.set_grad_enabled(self.global_step < 100)``, ``x.sum(1, keepdim=len(x) > 1)``.
    torch 2.9-2.15.
    """

    def decided(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def compare(one: Any, other: Any) -> Any:
            truth = original(one, other)
            if type(truth) is not torch.SymBool or truth.node.hint is None:
                return truth
            package = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            return truth if package in _UNDECIDED else bool(truth)

        return compare

    names = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
    return [(kind, name, decided(vars(kind)[name])) for kind in (torch.SymInt, torch.SymFloat) for name in names]
