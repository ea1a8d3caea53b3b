"""Which tensor is which node of a graph that is being written, and how values become arguments of nodes.

Tensors map to nodes by identity. Sizes stay symbolic (``pytree.sizes``), objects are made anew from the tensors
inside them (``user_code.objects``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import SYMBOLIC_TYPES, FakeTensor, depends_on_data, storage_key, tree_leaves
from lightning_fxpipe.pytree.sizes import as_size
from lightning_fxpipe.pytree.structure import NotFillable, Template
from lightning_fxpipe.tracing.activation_checkpointing import Checkpoint
from lightning_fxpipe.tracing.examples import draws
from lightning_fxpipe.tracing.gradient_flow import GradientFlow
from lightning_fxpipe.tracing.signals import HiddenTensor, RecordError
from lightning_fxpipe.tracing.torch_calls import CallContext
from lightning_fxpipe.user_code.frames import user_source
from lightning_fxpipe.user_code.objects import PLAIN_TYPES, refill, tensor_of

CONSTANT_PREFIX = "_fxpipe_constant_"


class GraphWriter:
    """A graph and the tensors that its nodes stand for.

    Args:
        tensor_fqns: FQN of each (fake) parameter and buffer, by ``id``.
        lasting: By ``id``, objects that modules keep from one call to the next.
        region_path: Path of the module whose forward is written down.
        device_type: Device whose autocast state is part of a node's context.

    Attributes:
        graph: The graph.
        sides: Tensors left on modules, by path and attribute.
        constants: Tensors that are neither parameters, buffers nor results, by their names in the graph.
        is_paused: Whether calls leave no nodes now.
        gradient_flow: Which tensors get gradients.
    """

    def __init__(self, tensor_fqns: Mapping[int, str], lasting: Mapping[int, Any], region_path: str, device_type: str) -> None:
        self.graph = fx.Graph()
        self.sides: dict[tuple[str, str], Tensor] = {}
        self.constants: dict[str, Tensor] = {}
        self._tensor_fqns = tensor_fqns
        self._lasting = lasting
        self._nodes: dict[int, fx.Node] = {}
        self._constant_names: dict[int, str] = {}
        self._alive: list[Any] = []  # a freed tensor's id would be given to another
        self._by_storage: dict[int, list[Tensor]] = {}  # those that nodes stand for
        self.gradient_flow = GradientFlow(tensor_fqns)
        self._module_stack = [region_path]
        self._last_input: fx.Node | None = None
        self._device_type = device_type
        self._ambient = CallContext.current(device_type)
        self._checkpoints: tuple[Checkpoint, ...] = ()  # that run now, the outermost first
        self.is_paused = False

    def add_input(self, name: str, tensor: Tensor) -> fx.Node:
        """Makes a tensor one of the graph's inputs."""
        if self._last_input is not None:
            place: Any = self.graph.inserting_after(self._last_input)
        else:
            place = self.graph.inserting_before(next(iter(self.graph.nodes), None))
        with place:
            node = self._last_input = self.graph.placeholder(name)
        node.meta["module_path"] = ""
        self._bind_tensor(tensor, node)
        return node

    def argument(self, value: Any) -> Any:
        """``value`` as an fx argument: tensors replaced by nodes, containers rebuilt, sizes left symbolic."""
        if isinstance(value, Tensor):
            return self._tensor_argument(value)
        if isinstance(value, SYMBOLIC_TYPES):
            return as_size(value)
        if isinstance(value, np.generic):  # some are numbers of Python's, too, but a graph's code cannot name them
            return value.item()
        if value is None or value is Ellipsis or isinstance(value, (*PLAIN_TYPES, torch.Generator)):
            return value
        if isinstance(value, torch.Size):
            return tuple(self.argument(size) for size in value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            if not any(isinstance(leaf, (Tensor, *SYMBOLIC_TYPES)) for leaf in tree_leaves(value)):
                return value
            return self._call_here(type(value), tuple(self.argument(item) for item in value))
        if isinstance(value, (tuple, list)):
            return type(value)([self.argument(item) for item in value])
        if isinstance(value, slice):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        if type(value) is dict or type(value).__name__ == "OrderedDict":
            return {key: self.argument(item) for key, item in value.items()}
        template = self._template_of([value])
        return self._refill(template, range(len(template.tensors)), 1)[1][0]

    def _refill(self, template: Template, sent: Sequence[int], count: int) -> tuple[fx.Node, list[fx.Node]]:
        """Nodes of a list of ``count`` objects made anew, and of each of them."""
        if any(isinstance(held, nn.Module) and any(True for _ in held.parameters()) for held in template.structure.references):
            raise RecordError("a module with parameters is an argument of another module")
        tensors = [self.argument(template.tensors[index]) for index in sent]
        sizes = [self.argument(size) for size in template.sizes]
        node = self._call_here(refill(template.structure, sent), (tensors, sizes))
        return node, [self._call_here(operator.getitem, (node, index)) for index in range(count)]

    def _append(
        self,
        operation: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        path: str,
        mutated: set[int],
        result: Any,
    ) -> fx.Node:
        """Writes down a call."""
        node = self.graph.create_node(operation, target, args, kwargs)
        node.meta.update(module_path=path, source=user_source(), mutated_storages=mutated, checkpoints=self._checkpoints)
        if (context := self._ambient.current_if_other()) is not None:
            # Kept with the node rather than as enter/exit nodes, so that no cut can fall inside a no_grad block.
            node.meta["context"] = context
        self._bind_output(result, node)
        with self.pause():
            self._note_written(mutated)
        return node

    def _note_written(self, storages: set[int]) -> None:
        """Notes that a call writes into tensors: their nodes may have gradients then, as of `t[i] = x`, which has no result."""
        for tensor in chain.from_iterable(self._by_storage.get(storage, ()) for storage in storages):
            node = self._nodes[id(tensor)]
            if tensor.requires_grad:
                node.meta["val"].requires_grad_(True)
                self.gradient_flow.note(node, tensor)

    def _call_here(self, function: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        """The node of a call that the code does not make, but that what it does now needs."""
        node = self.graph.call_function(function, args)
        node.meta.update(module_path=self._running_path(), source=user_source())
        return node

    def _part_of(self, call: fx.Node, function: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        """The node that takes something out of what a call has made."""
        node = self.graph.call_function(function, args)
        node.meta.update(module_path=call.meta["module_path"], source=call.meta.get("source"), part_of=call)
        return node

    def sides_below(self, path: str) -> set[str]:
        """Attributes with tensors that code inside a module has set, as named from there."""
        prefix = f"{path}." if path else ""
        names = (f"{owner}.{name}" if owner else name for owner, name in self.sides)
        return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}

    def has(self, tensor: Tensor) -> bool:
        """Returns True if the graph has a tensor: as an input, or made by a call."""
        return id(tensor) in self._nodes

    def has_from_code(self, tensor: Tensor) -> bool:
        """True if a tensor is an input, or made by a call that is no whole module's."""
        node = self._nodes.get(id(tensor))
        while node is not None and "part_of" in node.meta:
            node = node.meta["part_of"]
        return node is not None and node.op != "call_module"

    def recorded_by(self, tensor: Tensor) -> str | None:
        """The path of the opened module, with the region's for its own, whose call has made a tensor; None for others, and for
        those of modules, which a call may have changed.
        """
        node = None if id(tensor) in self._tensor_fqns else self._nodes.get(id(tensor))
        return None if node is None or node.op in ("placeholder", "get_attr") else str(node.meta.get("module_path", ""))

    def _tensor_argument(self, tensor: Tensor) -> fx.Node:
        node = self._nodes.get(id(tensor))
        if node is not None:
            return node
        fqn = self._tensor_fqns.get(id(tensor))
        if fqn is None:
            fqn = self._name_unknown(tensor)
        # One node for each use: a parameter that two stages use is then simply two nodes.
        node = self.graph.get_attr(fqn)
        node.meta.update(val=tensor, module_path=self._running_path())
        return node

    def _name_unknown(self, tensor: Tensor) -> str:
        """Gives a constant a name: a tensor that no node has made and that has none.

        Raises:
            HiddenTensor: It is no constant.
        """
        if isinstance(tensor, FakeTensor):
            raise HiddenTensor("it uses a tensor that was not computed during tracing, such as a cached value")
        name = self._constant_name(tensor)
        self.constants[name] = tensor
        return name

    def _constant_name(self, tensor: Tensor) -> str:
        self._alive.append(tensor)
        return self._constant_names.setdefault(id(tensor), f"{CONSTANT_PREFIX}{len(self._constant_names)}")

    def _bind_tensor(self, tensor: Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
        if tensor.layout is torch.strided:
            self._by_storage.setdefault(storage_key(tensor), []).append(tensor)
        # An alias, because a later in-place call may change the tensor's own shape and requires_grad.
        with self.pause():
            node.meta["val"] = tensor.detach().requires_grad_(tensor.requires_grad)
            self.gradient_flow.note(node, tensor)

    def _bind_output(self, value: Any, node: fx.Node) -> None:
        """Gives every tensor inside a call's result a node."""
        if isinstance(value, Tensor):
            self._bind_tensor(value, node)
            return
        items: list[tuple[Callable[..., Any], Any, Any]] = []  # (getter, key, item)
        if isinstance(value, (tuple, list)):
            items = [(operator.getitem, index, item) for index, item in enumerate(value)]
        elif isinstance(value, Mapping):
            items = [(operator.getitem, key, item) for key, item in value.items()]
        elif is_dataclass(value):
            items = [(getattr, field.name, getattr(value, field.name)) for field in fields(value)]
        elif value is not None and not isinstance(value, (*PLAIN_TYPES, *SYMBOLIC_TYPES)):
            self._bind_inside(node, self._template_of(value), node)
        for getter, key, item in items:
            if self._template_of(item).tensors:
                self._bind_output(item, self._part_of(node, getter, (node, key)))

    def _bind_inside(self, holder: fx.Node, template: Template, call: fx.Node) -> None:
        """Gives the tensors that a call left in an object nodes, where they have none."""
        for index, tensor in enumerate(template.tensors):
            if isinstance(tensor, FakeTensor) and id(tensor) not in self._nodes and id(tensor) not in self._tensor_fqns:
                self._bind_tensor(tensor, self._part_of(call, tensor_of(index, len(template.tensors)), (holder,)))

    def _template_of(self, value: Any) -> Template:
        try:
            return Template.of(value, shared=self._lasting)
        except NotFillable as error:
            raise RecordError(str(error)) from error

    def _running_path(self) -> str:
        return self._module_stack[-1]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Records nothing during the block."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    @contextmanager
    def under_checkpoint(self, options: Mapping[str, Any]) -> Iterator[None]:
        """Marks the nodes made during the block as recorded under a checkpoint."""
        before, self._checkpoints = self._checkpoints, (*self._checkpoints, Checkpoint(options))
        try:
            yield
        finally:
            self._checkpoints = before


def erase_unused(graph: fx.Graph) -> None:
    """Drops calls whose result is unused, unless they change something, draw random numbers or make a size."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output", "call_module"):
            continue
        if node.meta.get("checks") or node.meta.get("mutated_storages"):
            continue
        value = node.meta.get("val")
        if isinstance(value, Tensor) and any(depends_on_data(size) for size in value.shape):
            continue
        if not draws(node):
            graph.erase_node(node)
