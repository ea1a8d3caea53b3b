"""Looks at values that follow from a region's inputs: ``int(lengths.max())``, ``lengths.tolist()``, ``if mask.any():``.

While a region is recorded there are no values, but what follows from its inputs alone is known for the call that the trace is
made from. The code gets that answer, and the trace serves a later call if its inputs give the same one; else another is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lightning_fxpipe._compat.torch import outside_fakes, size_hint
from lightning_fxpipe.tracing.examples import Examples, NoExample, cone
from lightning_fxpipe.tracing.torch_calls import LOOKS

# Branches on values of the batch within a region, each of which may double the number of its graphs.
MAX_BRANCHES = 3


@dataclass(frozen=True, kw_only=True)
class Look:
    """A look at a value.

    Attributes:
        function: How the code looks, one of ``LOOKS`` of ``tracing.torch_calls``.
        node: Computes the value, in a graph of its own.
        answer: What the code got.
    """

    function: Callable[..., Any]
    node: fx.Node
    answer: Any


class Looks:
    """The looks of one recording, with copies of the nodes that their values follow from: the graph may drop those."""

    def __init__(self) -> None:
        self.all: list[Look] = []
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}

    def may_branch(self, function: Callable[..., Any]) -> bool:
        """True for a branch, if there are not many already."""
        return function is Tensor.__bool__ and len(self.all) < MAX_BRANCHES

    def answer(self, function: Callable[..., Any], node: fx.Node, examples: Examples) -> Any:
        """Returns the result of ``function`` for the value of a node.

        Raises:
            NoExample: The value does not follow from the inputs.
        """
        answer = _answer(function, examples.value(node))
        needed = cone(node)
        for other in node.graph.nodes:
            if other in needed and other not in self._copies:
                self._copies[other] = self._graph.node_copy(other, self._copies.__getitem__)
        self.all.append(Look(function=function, node=self._copies[node], answer=answer))
        return answer


def looks_hold(
    looks: Sequence[Look], inputs: Mapping[str, Tensor], sizes: Mapping[Any, int | float], constants: Mapping[str, Tensor]
) -> bool:
    """Returns True if code would see the same for other inputs.

    Args:
        looks: What it has looked at.
        inputs: The inputs, by the names of the graph's placeholders.
        sizes: Values of the symbols.
        constants: Tensors that the graph refers to by name.
    """
    examples = Examples(inputs, sizes, constants)
    try:
        return all(_answer(look.function, examples.value(look.node)) == look.answer for look in looks)
    except NoExample:
        return False


def _answer(function: Callable[..., Any], value: Tensor) -> Any:
    with outside_fakes():
        answer = LOOKS[function](value)
    return answer.tolist() if function in (Tensor.numpy, Tensor.__array__) else answer


def look_unrecorded(func: Callable[..., Any], tensor: Tensor, example: Tensor | None = None) -> Any:
    """Returns what code that looks at a tensor without data sees: the traced call's value, or ones where that is unknown."""
    shape = [size_hint(size) for size in tensor.shape]
    with outside_fakes():
        return LOOKS[func](torch.ones(shape, dtype=tensor.dtype) if example is None else example)
