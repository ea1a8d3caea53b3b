"""Values that recorded tensors have in the call that the trace was made from.

Fakes have no data, yet some of what a model asks has an answer already: a tensor that follows from the region's inputs alone
can be computed, without the model's weights, from the inputs of the traced call. It may go through modules of torch's own
that have none, such as padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from lightning_fxpipe._compat.torch import outside_fakes, storage_key
from lightning_fxpipe.pytree.sizes import SymbolicSize, size_symbols
from lightning_fxpipe.reporting.wording import error_words, node_words
from lightning_fxpipe.rng import isolated_rng
from lightning_fxpipe.tracing.torch_calls import CallContext

_DRAWS = (
    *("rand", "drawn", "dropout", "bernoulli", "normal", "multinomial", "poisson", "binomial", "uniform", "exponential"),
    *("cauchy", "geometric", "gumbel", "rrelu", "fractional"),
)
_NUM_DRAWS = 8


class NoExample(Exception):
    """The value cannot be known from the example."""


def draws(node: fx.Node) -> bool:
    """Returns True if a call draws random numbers."""
    target = type(node.meta["stateless"]) if "stateless" in node.meta else node.target
    name = getattr(target, "__name__", str(target)).lower()
    return any(word in name for word in _DRAWS)


def cone(node: fx.Node) -> set[fx.Node]:
    """The node and all that it follows from."""
    return _followed(node, lambda current: current.all_input_nodes)


def _followed(node: fx.Node, before: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The node, those ``before`` it, those before them, and so on."""
    found, waiting = {node}, [node]
    while waiting:
        new = {*before(waiting.pop())} - found
        found |= new
        waiting += new
    return found


class Examples:
    """Computes values from the inputs of the traced call.

    Args:
        inputs: Real tensors, by the graph's placeholders.
        sizes: Values of the symbols.
        constants: Real tensors that the graph refers to by name.
    """

    def __init__(self, inputs: Mapping[str, Tensor], sizes: Mapping[Any, int | float], constants: Mapping[str, Tensor]) -> None:
        self._inputs, self._sizes, self._constants = inputs, sizes, constants
        self._values: dict[fx.Node, Any] = {}

    def value(self, node: fx.Node) -> Any:
        """The value of a node that follows from inputs and constants only.

        Raises:
            NoExample: It follows from weights or random numbers, goes through a module with weights or one of the user's, or
                was changed in place.
        """
        if any(draws(other) for other in cone(node)):
            raise NoExample(f"{node_words(node)} is drawn at random")
        return self._compute(node, self._values)

    def constant(self, node: fx.Node) -> Any:
        """The value that a node has in every call: it follows from numbers, and at most from the kind of other tensors.

        What is changed in place has its last value.

        Raises:
            NoExample: It follows from the inputs, weights or random numbers, or from the number of samples.
        """
        nodes = _read_for(node)
        for other in nodes:
            if draws(other) or other.op == "placeholder" or size_symbols((other.args, other.kwargs)):
                raise NoExample(f"{other.name} is not a constant")
        known: dict[fx.Node, Any] = {}
        with outside_fakes(), torch.no_grad():
            for other in node.graph.nodes:
                if other in nodes:
                    blanks = {
                        operand: _without_memory(operand, other) for operand in other.all_input_nodes if operand not in nodes
                    }
                    known[other] = self._run(other, known | blanks)
        return known[node]

    def outcomes(self, node: fx.Node) -> set[bool]:
        """The truth values of a node, which may depend on random numbers; several draws.

        Raises:
            NoExample: As :meth:`value`, but for random numbers.
        """
        times = _NUM_DRAWS if any(draws(other) for other in cone(node)) else 1
        values = [self._compute(node, {} if times > 1 else self._values) for _ in range(times)]
        with outside_fakes():
            return {bool(value) for value in values}

    def _compute(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        nodes = cone(node)
        storages = {storage_key(n.meta["val"]) for n in nodes if isinstance(n.meta.get("val"), Tensor)}
        for other in node.graph.nodes:
            if storages & other.meta.get("mutated_storages", set()):
                raise NoExample(f"{node_words(other)} changes a value in place")
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
            raise NoExample(f"{node_words(node)} was computed earlier")
        if node.op == "placeholder":
            return self._inputs[str(node.target)].detach().clone()
        if node.op == "get_attr" and str(node.target) in self._constants:
            return self._constants[str(node.target)]
        if node.op not in ("call_function", "call_method") and "stateless" not in node.meta:
            raise NoExample(f"{node_words(node)} is a weight or a module's result")
        args, kwargs = filled_argument((node.args, node.kwargs), known, self._number)
        context: CallContext | None = node.meta.get("context")
        modes = context.active() if context is not None and context.autocast_enabled else nullcontext()
        try:
            with modes:
                return call_function_node(node, args, kwargs)
        except Exception as error:
            raise NoExample(f"{node_words(node)} fails: {error_words(error)}") from error

    def _number(self, size: SymbolicSize) -> int | float | bool:
        result = size.expression.subs(dict(self._sizes))
        if result.free_symbols:
            raise NoExample("a size depends on data")
        return size.as_number(result)


def filled_argument(value: Any, values: Mapping[fx.Node, Any], number: Callable[[SymbolicSize], Any]) -> Any:
    """An argument of a node, or all of them, with ``values`` in place of nodes, and each symbolic size as a ``number``."""
    if isinstance(value, fx.Node):
        return values[value]
    if isinstance(value, SymbolicSize):
        return number(value)
    if isinstance(value, (tuple, list)):
        items = [filled_argument(item, values, number) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return {key: filled_argument(item, values, number) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(filled_argument(bound, values, number) for bound in (value.start, value.stop, value.step)))
    return value


def call_function_node(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Returns the result of a node's function, method or module without weights for other arguments."""
    if node.op == "call_module":
        return node.meta["stateless"](*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


# What they take of their first operand, or of the others, is shape, dtype and device.
_OF_A_KIND = frozenset("new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like".split())  # noqa: SIM905
_WITHOUT_SHAPE = frozenset("new_zeros new_ones new_full new_empty to type_as".split())  # noqa: SIM905
_TO_A_KIND = frozenset("to type_as view_as reshape_as expand_as".split())  # noqa: SIM905


def _read_for(node: fx.Node) -> set[fx.Node]:
    """The nodes whose values a node's value follows from, with all changes that are made to them in place."""

    def read(current: fx.Node) -> list[fx.Node]:
        name = getattr(current.target, "__name__", str(current.target))
        first = [arg for arg in current.args[:1] if isinstance(arg, fx.Node)]
        operands = [] if name in _OF_A_KIND else first if name in _TO_A_KIND else current.all_input_nodes
        storage = storage_key(current.meta["val"]) if isinstance(current.meta.get("val"), Tensor) else None
        return [*operands, *(other for other in node.graph.nodes if storage in other.meta.get("mutated_storages", ()))]

    return _followed(node, read)


def _without_memory(node: fx.Node, user: fx.Node) -> Tensor:
    """A tensor of the kind of a node's, for a call that looks at nothing else."""
    value = node.meta["val"]
    name = getattr(user.target, "__name__", str(user.target))
    if any(not isinstance(size, int) for size in value.shape):
        if name in _WITHOUT_SHAPE:
            return torch.empty((), dtype=value.dtype, device=value.device)
        raise NoExample(f"{node.name} has the size of the batch")
    return torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)
