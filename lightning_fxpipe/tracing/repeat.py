"""Makes single calls of a recorded graph again, to see what is inside of them or what they take: on fake tensors, or on tensors
with data, for the example's sizes or as many samples as one likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import FakeWorld
from lightning_fxpipe.pytree.sizes import SymbolicSize, as_size, tensor_bytes
from lightning_fxpipe.tracing.examples import call_function_node, filled_argument
from lightning_fxpipe.tracing.fake_run import symbol_values
from lightning_fxpipe.tracing.torch_calls import CallContext
from lightning_fxpipe.tracing.trace import TracedRegion
from lightning_fxpipe.user_code.exchange import exchanged_tensors
from lightning_fxpipe.user_code.placement import Placement

# Makes the call of a module; its tensors are to be fakes meanwhile (:meth:`Repeat.module_on_fakes`).
CallModule = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], Any]


class Repeat:
    """Makes calls of a graph again.

    Args:
        traced: The graph.
        num_samples: In the batch that the calls get; None: as many as the example has.
    """

    def __init__(self, traced: TracedRegion, num_samples: int | None = None) -> None:
        self._traced = traced
        self._num_samples = num_samples
        self._world = FakeWorld()

    @contextmanager
    def active(self) -> Iterator[None]:
        """During the block calls may be made: all new tensors are fakes, and autocast is what it was in the trace."""
        with self._world.active(), torch.no_grad(), self.autocast():
            yield

    def autocast(self) -> AbstractContextManager[Any]:
        """During the block autocast is what it was in the trace."""
        context = self._traced.signature.context
        return torch.autocast(self._traced.device.type, enabled=context.autocast_enabled, dtype=context.autocast_dtype)

    @property
    def is_possible(self) -> bool:
        """True if the graph is that of such a batch, too."""
        return self._num_samples in (None, self._traced.batch_size) or (
            bool(self._traced.batch_symbols) and self._traced.admits(self._sizes)
        )

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """That of the tensor that a node gives."""
        sizes = (as_size(size) for size in node.meta["val"].shape)
        return tuple(int(self._number(size)) if isinstance(size, SymbolicSize) else size for size in sizes)

    def blank(self, node: fx.Node) -> Tensor:
        """A tensor without data of the shape and kind of a node's."""
        value = node.meta["val"]
        return torch.empty(self.shape(node), dtype=value.dtype, device=value.device, requires_grad=value.requires_grad)

    def call(self, node: fx.Node, values: Mapping[fx.Node, Any], call_module: CallModule) -> Any:
        """Returns the result of a node's call for ``values`` of its operands; ``call_module`` makes it if it is one of a
        module.
        """
        args, kwargs = filled_argument((node.args, node.kwargs), values, self._number)
        if node.op == "call_module":
            return call_module(self._traced.root.get_submodule(str(node.target)), args, kwargs)
        return call_function_node(node, args, kwargs)

    @contextmanager
    def module_on_fakes(self, module: nn.Module) -> Iterator[None]:
        """During the block a module's tensors are fakes; afterwards it is what it was."""
        placement = Placement(module, self._traced.device)

        def fake(tensor: Tensor, _: str) -> Tensor:
            return self._world.static(tensor, placement.device_of(tensor))

        with exchanged_tensors(module, fake), placement.naming():
            yield

    def is_known(self, symbol: Any) -> bool:
        """Returns True if a symbol follows from the inputs' sizes, and not from data."""
        symbols: set[Any] = symbol.xreplace(self._traced.world.replacements()).free_symbols
        return symbols <= self._sizes.keys()

    @cached_property
    def _sizes(self) -> dict[Any, int | float]:
        sizes = {**example_sizes(self._traced), **self._traced.numbers.recorded}
        return sizes if self._num_samples is None else sizes | dict.fromkeys(self._traced.batch_symbols, self._num_samples)

    def _number(self, size: SymbolicSize) -> int | float | bool:
        return size.as_number(size.expression.xreplace(self._traced.world.replacements()).subs(self._sizes))


def example_sizes(traced: TracedRegion) -> dict[Any, int]:
    """The example's value of every expression that is a size of an input and no number."""
    return symbol_values(node.meta["val"] for node in traced.input_nodes)


def has_known_size(value: Tensor) -> bool:
    """Returns True if a tensor's size does not depend on data."""
    try:
        tensor_bytes(value)
    except ValueError:
        return False
    return True


def is_of_torch(node: fx.Node) -> bool:
    """Returns True if a call is one of torch's own functions: elsewhere there may be a custom autograd function, or a user's
    own that torch only hears of.
    """
    home = getattr(node.target, "__module__", None) or "torch"
    return node.op == "call_method" or home.split(".")[0] in ("torch", "_operator", "builtins")


def modes_of(node: fx.Node) -> AbstractContextManager[None]:
    """During the block the grad and autocast modes are those that a node's call was made under."""
    context: CallContext | None = node.meta.get("context")
    return nullcontext() if context is None else context.active()
