"""Makes single calls of a recorded graph again, on fake tensors of the example's sizes, to see what is inside of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import FakeWorld, size_hint, symbolic_expression
from lightning_fxpipe.pytree.sizes import SymbolicSize, as_number, tensor_bytes
from lightning_fxpipe.tracing.trace import TracedRegion
from lightning_fxpipe.user_code.exchange import exchanged_tensors
from lightning_fxpipe.user_code.placement import Placement

# Makes the call of a module; its tensors are to be fakes meanwhile (:meth:`Repeat.module_on_fakes`).
CallModule = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], Any]


class Repeat:
    """Makes calls of a graph again.

    Args:
        traced: The graph.
    """

    def __init__(self, traced: TracedRegion) -> None:
        self._traced = traced
        self._world = FakeWorld()

    @contextmanager
    def active(self) -> Iterator[None]:
        """During the block calls may be made: all new tensors are fakes, and autocast is what it was in the trace."""
        context = self._traced.signature.context
        autocast = torch.autocast(self._traced.device.type, enabled=context.autocast_enabled, dtype=context.autocast_dtype)
        with self._world.active(), torch.no_grad(), autocast:
            yield

    def blank(self, node: fx.Node) -> Tensor:
        """A tensor without data of the shape and kind of a node's."""
        value = node.meta["val"]
        sizes = [size_hint(size) for size in value.shape]
        return torch.empty(sizes, dtype=value.dtype, device=value.device, requires_grad=value.requires_grad)

    def call(self, node: fx.Node, values: Mapping[fx.Node, Any], call_module: CallModule) -> Any:
        """What a node's call gives.

        Args:
            node: A call.
            values: Those of its operands.
            call_module: Makes the call where it is one of a module.
        """
        args, kwargs = self._argument(node.args, values), self._argument(node.kwargs, values)
        if node.op == "call_module":
            return call_module(self._traced.root.get_submodule(str(node.target)), args, kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    @contextmanager
    def module_on_fakes(self, module: nn.Module) -> Iterator[None]:
        """During the block a module's tensors are fakes; afterwards it is what it was."""
        placement = Placement(module, self._traced.device)

        def fake(tensor: Tensor, _: str) -> Tensor:
            return self._world.static(tensor, placement.device_of(tensor))

        with exchanged_tensors(module, fake), placement.naming():
            yield

    def is_known(self, symbol: Any) -> bool:
        """Whether a symbol follows from the inputs' sizes, and not from data."""
        symbols: set[Any] = symbol.xreplace(self._traced.world.replacements()).free_symbols
        return symbols <= self._sizes.keys()

    @cached_property
    def _sizes(self) -> dict[Any, int]:
        return example_sizes(self._traced)

    def _argument(self, value: Any, values: Mapping[fx.Node, Any]) -> Any:
        if isinstance(value, fx.Node):
            return values[value]
        if isinstance(value, SymbolicSize):
            expression = value.expression.xreplace(self._traced.world.replacements())
            return as_number(expression.subs(self._sizes))
        if isinstance(value, (tuple, list)):
            items = [self._argument(item, values) for item in value]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, Mapping):
            return {key: self._argument(item, values) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self._argument(bound, values) for bound in (value.start, value.stop, value.step)))
        return value


def example_sizes(traced: TracedRegion) -> dict[Any, int]:
    """The example's value of every expression that is a size of an input and no number."""
    sizes = [size for node in traced.input_nodes for size in node.meta["val"].shape]
    return {symbolic_expression(size): size_hint(size) for size in sizes if isinstance(size, torch.SymInt)}


def has_known_size(value: Tensor) -> bool:
    """Whether a tensor's size does not depend on data."""
    try:
        tensor_bytes(value)
    except ValueError:
        return False
    return True


def is_of_torch(node: fx.Node) -> bool:
    """Whether a call is one of torch's own functions: elsewhere there may be a custom autograd function, or a user's own that
    torch only hears of."""
    home = getattr(node.target, "__module__", None) or "torch"
    return node.op == "call_method" or home.split(".")[0] in ("torch", "_operator", "builtins")


@contextmanager
def modes_of(node: fx.Node) -> Iterator[None]:
    """During the block the grad and autocast modes are those that a node's call was made under."""
    context = node.meta.get("context")
    if context is None:
        yield
    else:
        with context.active():
            yield
