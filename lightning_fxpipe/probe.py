"""Shapes of what a module returns, where its Python looks at tensor values and so cannot run without any.

The module runs on made-up data of the shapes that the trace has. Only the shapes, dtypes and gradients of its results are
kept, so its weights are made up too: a rank that has dropped them gets the same answer. Three runs tell what a size follows
from: two on different data must agree, and one with other sizes shows which sizes change along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    try:
        larger = _run(call, module, args, kwargs, {symbol: size_hint(size) + 1 for symbol, size in symbols.items()}, seed=1)
        sizes = [list(zip(a, b, strict=True)) for a, b in zip(_shapes(first), _shapes(larger), strict=True)]
    except Exception:
        # It does not run at other sizes. What has the size of an input is taken to follow it.
        sizes = [[(size, size + 1 if _followed(symbols, size) else size) for size in shape] for shape in _shapes(first)]
    symbolic = iter([[_size_of(pair, symbols) for pair in shape] for shape in sizes])

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


def _followed(symbols: Mapping[Any, Any], size: int) -> bool:
    return any(size_hint(symbol) == size for symbol in symbols.values())


def _size_of(pair: tuple[int, int], symbols: Mapping[Any, Any]) -> int | torch.SymInt:
    """A size that was ``pair[0]``, and ``pair[1]`` with every symbol one larger."""
    before, after = pair
    if before == after:
        return before
    for size in symbols.values():
        hint = size_hint(size)
        factor = after - before  # d(factor * symbol) when the symbol grows by one
        if before == factor * hint:
            followed: torch.SymInt = size * factor
            return followed
    raise ProbeFailed(f"a size of its results, {before} and then {after}, follows from no input")
