"""Shapes of what a module returns, where its Python looks at tensor values and so cannot run without any.

The module runs on made-up data of the shapes that the trace has. Only the shapes, dtypes and gradients of its results are
kept, so its weights are made up too: a rank that has dropped them gets the same answer. Some runs tell what a size follows
from: two on different data must agree, and two with other values of each symbol show which sizes change along, and how.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat import outside_fakes, size_hint, symbolic_expression, tree_leaves, tree_map
from lightning_fxpipe.exchange import exchanged_tensors

Call = Callable[..., Any]


class ProbeFailed(Exception):
    """The module cannot run on made-up data, or the sizes of its results depend on the data."""


def probe_result(call: Call, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of ``call(module, *args, **kwargs)`` with fake tensors, found by running on made-up ones.

    Called under the fake mode that the arguments belong to.

    Raises:
        ProbeFailed: No such result can be found.
    """
    symbols = _symbolic_sizes((args, kwargs))
    try:
        first = _run(call, module, args, kwargs, {}, seed=1)
        again = _run(call, module, args, kwargs, {}, seed=2)
    except Exception as error:
        raise ProbeFailed(f"on made-up data: {type(error).__name__}: {str(error).splitlines()[:1]}") from error
    if _shapes(first) != _shapes(again):
        raise ProbeFailed("the sizes of its results depend on the data")
    runs = []
    try:
        for symbol, size in symbols.items():
            for other in (size_hint(size) + 1, 2 * size_hint(size) + 1):
                shapes = _shapes(_run(call, module, args, kwargs, {symbol: other}, seed=1))
                runs.append(_OtherSizes(symbol=symbol, size=other, sizes=_all_sizes(_shapes(first), shapes)))
    except Exception as error:
        if len(symbols) > 1:
            raise ProbeFailed("it does not run at other sizes") from error
        # What has the size of the batch is taken to follow it.
        flat = [size for shape in _shapes(first) for size in shape]
        follows = [(symbol, size_hint(size)) for symbol, size in symbols.items()]
        runs = [_OtherSizes(symbol=s, size=h + 1, sizes=[n + 1 if n == h else n for n in flat]) for s, h in follows]
    numbers = count()
    symbolic = iter([[_size_of(size, next(numbers), runs, symbols) for size in shape] for shape in _shapes(first)])

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty(next(symbolic), dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad)

    return tree_map(fake, first)


def _symbolic_sizes(tree: Any) -> dict[Any, Any]:
    """Sizes of the arguments that are a symbol by themselves, by that symbol."""
    sizes = [size for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) for size in leaf.shape]
    return {symbolic_expression(size): size for size in sizes if getattr(symbolic_expression(size), "is_Symbol", False)}


def _run(call: Call, module: nn.Module, args: Any, kwargs: Mapping[str, Any], sizes: Mapping[Any, int], *, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def concrete(size: int | torch.SymInt) -> int:
        expression = symbolic_expression(size)
        return size_hint(size) if isinstance(expression, int) else int(expression.subs({**_hints(size), **sizes}))

    def made_up(leaf: Any, _: str = "") -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = [concrete(size) for size in leaf.shape]
        with outside_fakes(), torch.no_grad():
            if leaf.is_floating_point():
                tensor = torch.randn(shape, generator=generator).to(leaf.dtype).to(leaf.device)
            else:
                tensor = torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)
        if isinstance(leaf, nn.Parameter):
            return nn.Parameter(tensor, requires_grad=leaf.requires_grad)
        return tensor.requires_grad_(leaf.requires_grad)

    values = tree_map(made_up, (args, dict(kwargs)))
    with exchanged_tensors(module, made_up), outside_fakes():
        return call(module, *values[0], **values[1])


def _hints(size: torch.SymInt | int) -> dict[Any, int]:
    """Every symbol of a size at the value that the trace ran with."""
    if not isinstance(size, torch.SymInt):
        return {}
    environment = size.node.shape_env
    return {symbol: int(environment.size_hint(symbol)) for symbol in size.node.expr.free_symbols}


def _shapes(result: Any) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


@dataclass(frozen=True, kw_only=True)
class _OtherSizes:
    """All sizes of the results with one symbol at another value."""

    symbol: Any
    size: int
    sizes: list[int]


def _all_sizes(before: list[tuple[int, ...]], after: list[tuple[int, ...]]) -> list[int]:
    if [len(shape) for shape in before] != [len(shape) for shape in after]:
        raise ProbeFailed("its results have other dimensions at other sizes")
    return [size for shape in after for size in shape]


def _size_of(before: int, number: int, runs: list[_OtherSizes], symbols: Mapping[Any, Any]) -> int | torch.SymInt:
    """A size as a multiple of the symbols that it grows with; ``number`` is its place among all sizes."""
    followed = {run.symbol: size_hint(symbols[run.symbol]) for run in runs if run.sizes[number] != before}
    coefficient, rest = divmod(before, math.prod(followed.values()))
    size: int | torch.SymInt = coefficient
    for symbol, hint in followed.items():
        grown = [(run.size, run.sizes[number]) for run in runs if run.symbol == symbol]
        if rest or any(after * hint != before * other for other, after in grown):
            raise ProbeFailed(f"a size of its results, {before} and then {grown[0][1]}, is no multiple of an input's")
        size = size * symbols[symbol]
    return size
