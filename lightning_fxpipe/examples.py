"""Values that recorded tensors have in the call that the trace was made from.

Fakes have no data, yet some of what a model asks has an answer already: a tensor that follows from the region's inputs alone
can be computed, without the model's weights, from the inputs of the traced call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from lightning_fxpipe._compat import outside_fakes, storage_key
from lightning_fxpipe.rng import isolated_rng
from lightning_fxpipe.sizes import SymbolicSize, as_number
from lightning_fxpipe.torchcalls import CallContext
from lightning_fxpipe.wording import error_words, node_words

_DRAWS = ("rand", "drawn", "dropout", "bernoulli", "normal", "multinomial")
_NUM_DRAWS = 8


class NoExample(Exception):
    """The value cannot be known from the example."""


def draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers."""
    name = getattr(node.target, "__name__", str(node.target)).lower()
    return any(word in name for word in _DRAWS)


def cone(node: fx.Node) -> list[fx.Node]:
    """The node and all that it follows from, in no particular order."""
    found, waiting = {node}, [node]
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand not in found:
                found.add(operand)
                waiting.append(operand)
    return list(found)


class Examples:
    """Computes values from the inputs of the traced call.

    Args:
        inputs: Real tensors, by the graph's placeholders.
        sizes: Values of the symbols.
        constants: Real tensors that the graph refers to by name.
    """

    def __init__(self, inputs: Mapping[str, Tensor], sizes: Mapping[Any, int], constants: Mapping[str, Tensor]) -> None:
        self._inputs, self._sizes, self._constants = inputs, sizes, constants
        self._values: dict[fx.Node, Any] = {}

    def value(self, node: fx.Node) -> Any:
        """The value of a node that follows from inputs and constants only.

        Raises:
            NoExample: It follows from weights or random numbers, goes through a module, or was changed in place.
        """
        if any(draws(other) for other in cone(node)):
            raise NoExample(f"{node_words(node)} is drawn at random")
        return self._computed(node, self._values)

    def outcomes(self, node: fx.Node) -> set[bool]:
        """The truth values of a node, which may depend on random numbers; several draws.

        Raises:
            NoExample: As :meth:`value`, but for random numbers.
        """
        times = _NUM_DRAWS if any(draws(other) for other in cone(node)) else 1
        values = [self._computed(node, {} if times > 1 else self._values) for _ in range(times)]
        with outside_fakes():
            return {bool(value) for value in values}

    def _computed(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        nodes = cone(node)
        storages = {storage_key(n.meta["val"]) for n in nodes if isinstance(n.meta.get("val"), Tensor)}
        for other in node.graph.nodes:
            if storages & other.meta.get("mutated_storages", set()):
                raise NoExample(f"{node_words(other)} changes something in place")
        order = {other: index for index, other in enumerate(node.graph.nodes)}
        with outside_fakes(), torch.no_grad(), isolated_rng():
            torch.seed()  # so that several draws differ
            for other in sorted(nodes, key=order.__getitem__):
                if other not in known:
                    known[other] = self._run(other, known)
        return known[node]

    def _run(self, node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
        if "draw" in node.meta:
            return None  # nothing is drawn ahead here
        if node.op == "placeholder" and str(node.target) not in self._inputs:
            raise NoExample(f"{node_words(node)} was computed before")
        if node.op == "placeholder":
            return self._inputs[str(node.target)].detach().clone()
        if node.op == "get_attr" and str(node.target) in self._constants:
            return self._constants[str(node.target)]
        if node.op not in ("call_function", "call_method"):
            raise NoExample(f"{node_words(node)} is a weight or a module's result")
        args, kwargs = self._real((node.args, node.kwargs), known)
        context: CallContext | None = node.meta.get("context")
        try:
            if context is not None and context.autocast_enabled:
                with context.active():
                    return _call(node, args, kwargs)
            return _call(node, args, kwargs)
        except Exception as error:
            raise NoExample(f"{node_words(node)} fails: {error_words(error)}") from error

    def _real(self, value: Any, known: Mapping[fx.Node, Any]) -> Any:
        if isinstance(value, fx.Node):
            return known[value]
        if isinstance(value, SymbolicSize):
            result = value.expression.subs(dict(self._sizes))
            if result.free_symbols:
                raise NoExample("a size depends on data")
            return as_number(result)
        if isinstance(value, (tuple, list)):
            return type(value)([self._real(item, known) for item in value])
        if isinstance(value, Mapping):
            return {key: self._real(item, known) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self._real(item, known) for item in (value.start, value.stop, value.step)))
        return value


def _call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]
