"""Builds the stage modules of a cut graph.

A stage is a ``torch.fx.GraphModule`` that refers to the very parameters, buffers and submodules of the user's model under
their own names: nothing is copied, and ``stage.named_parameters()`` gives the original FQNs. Its inputs are the tensors
received from earlier stages, then those of the region's own inputs that it uses; its outputs are the tensors that later stages
receive, values that it only passes on (relays) included, where they do not go past it (``planner.skips``). What each stage
computes for itself, such as an attention mask, is among the nodes of every stage that uses it.

``torch.fx.passes.split_module`` is not used: it would send sizes as integers, place a parameter used twice in one partition
only, and keep views of received memory that the next step overwrites.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from lightning_fxpipe._compat.modes import is_watched
from lightning_fxpipe._compat.torch import patched_attributes, storage_key, symbolic_expression
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.skips import Skip
from lightning_fxpipe.pytree.sizes import SymbolicSize, as_size, size_symbols
from lightning_fxpipe.tracing.activation_checkpointing import marks_of_modules, run_checkpoints
from lightning_fxpipe.tracing.held_tensors import attribute
from lightning_fxpipe.tracing.inner_results import taking
from lightning_fxpipe.tracing.kept_state import KEPT, set_kept
from lightning_fxpipe.tracing.signals import InnerPlace
from lightning_fxpipe.tracing.torch_calls import CallContext
from lightning_fxpipe.tracing.trace import TracedRegion
from lightning_fxpipe.user_code.frames import user_source


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Shape, type and gradient of a boundary tensor at given sizes.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        requires_grad: Whether autograd follows it.
        gradient_of: Numbers of the region's results whose gradients reach it; None: all.
        memory_order: Its dimensions from the outermost to the innermost in memory, if these are not in order: a tensor keeps
            the layout in which it was computed, such as ``channels_last``. Kernels, and the masks of dropout, depend on it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    gradient_of: frozenset[int] | None = None
    memory_order: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def has_gradient(self, results: Collection[int]) -> bool:
        """True if a gradient comes back where these of the region's results have one."""
        return self.requires_grad and (self.gradient_of is None or not self.gradient_of.isdisjoint(results))

    def empty(self, device: torch.device) -> Tensor:
        """Returns memory for such a tensor."""
        if self.memory_order is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        strides, stride = [1] * len(self.shape), 1
        for dim in reversed(self.memory_order):
            strides[dim], stride = stride, stride * max(1, self.shape[dim])
        return torch.empty_strided(self.shape, strides, dtype=self.dtype, device=device)

    def packed(self, tensor: Tensor) -> Tensor:
        """Returns such a tensor as a contiguous one, by a view where it has the expected layout."""
        return (tensor if self.memory_order is None else tensor.permute(self.memory_order)).contiguous()


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a traced region.

    Attributes:
        index: Position in the pipeline.
        module: ``module(*boundary, *[inputs[i] for i in region_inputs])`` returns a tuple.
        region_inputs: Which of the region's input tensors, and of the draws after them, the module takes.
        boundary_in: Nodes received: by ``skips_in``, then from the previous stage.
        boundary_out: Nodes sent: by ``skips_out``, then to the next stage; empty for the last, whose outputs are the region's
            own.
        skips_in: What comes past other stages, the first of ``boundary_in``.
        skips_out: What goes past other stages, the first of ``boundary_out``.
    """

    index: int
    module: fx.GraphModule
    region_inputs: tuple[int, ...]
    boundary_in: tuple[fx.Node, ...]
    boundary_out: tuple[fx.Node, ...]
    skips_in: tuple[Skip, ...] = ()
    skips_out: tuple[Skip, ...] = ()


def build_stage(assignment: Assignment, index: int, recomputed: Collection[str] = (), *, compiles: bool = False) -> Stage:
    """The module of one stage. Parameters may be on the meta device if the stage is not this rank's own.

    Args:
        assignment: All stages.
        index: Which of them.
        recomputed: Modules whose activations are not kept for the backward pass, but computed again.
        compiles: Whether the modules that it calls as a whole, and that have others inside, are compiled when they first run.
    """
    return _StageBuilder(assignment, index, recomputed, compiles).build()


def build_stages(assignment: Assignment) -> tuple[Stage, ...]:
    """All stages, for running them in one process."""
    return tuple(build_stage(assignment, index) for index in range(assignment.num_stages))


def stages_with_inputs(assignment: Assignment) -> frozenset[int]:
    """The stages that compute with a tensor that the region is called with; others need at most their sizes."""
    traced = assignment.chain.traced
    inputs = set(traced.input_nodes)
    returned = inputs & set(traced.output_node.all_input_nodes)
    last = assignment.num_stages - 1
    return frozenset(
        stage
        for stage in range(assignment.num_stages)
        if (stage == last and returned) or any(inputs & set(node.all_input_nodes) for node in assignment.nodes(stage))
    )


def boundary_specs(
    nodes: tuple[fx.Node, ...], sizes: Mapping[Any, int], sources: Callable[[fx.Node], frozenset[int]] | None = None
) -> tuple[TensorSpec, ...]:
    """Returns the specs of the tensors at a boundary.

    Args:
        nodes: The tensors.
        sizes: Values of the symbols.
        sources: Gives for each tensor the numbers of the results whose gradients reach it; None: all do.
    """
    return tuple(
        TensorSpec(
            shape=tuple(concrete_size(size, sizes, node.meta.get("source")) for size in node.meta["val"].shape),
            dtype=node.meta["val"].dtype,
            requires_grad=node.meta["val"].requires_grad,
            gradient_of=None if sources is None else sources(node),
            memory_order=_memory_order(node.meta["val"], sizes),
        )
        for node in nodes
    )


def _number(size: int | torch.SymInt, sizes: Mapping[Any, int]) -> int | None:
    expression = symbolic_expression(size)
    number = expression if isinstance(expression, int) else expression.subs(dict(sizes))
    return None if getattr(number, "free_symbols", None) else int(number)


def _memory_order(tensor: Tensor, sizes: Mapping[Any, int]) -> tuple[int, ...] | None:
    if tensor.layout is not torch.strided:
        return None
    strides = [stride for each in tensor.stride() if (stride := _number(each, sizes)) is not None]
    if len(strides) < tensor.dim():  # they depend on sizes that the boundaries do not have
        return None
    found = tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
    return None if found == tuple(range(len(strides))) else found


def concrete_size(size: int | torch.SymInt, sizes: Mapping[Any, int], source: str | None = None) -> int:
    """A possibly symbolic size as a number.

    Args:
        size: The size.
        sizes: Values of the symbols.
        source: Where the tensor is made; by default where user code runs.

    Raises:
        UnsupportedError: It depends on values.
    """
    number = _number(size, sizes)
    if number is None:
        raise UnsupportedError(
            "The size of a tensor that other ranks need depends on values of the batch.",
            where=source or user_source(),
            observed="a size such as that of unique(), nonzero() or indexing with a mask",
            expected="sizes determined by the shapes of the batch",
            todo="Compute the tensor before the first call of the model, after the last, or inside a module's forward.",
        )
    return number


class _StageBuilder:
    """Copies one stage's nodes into a graph of their own."""

    def __init__(self, assignment: Assignment, index: int, recomputed: Collection[str], compiles: bool) -> None:
        self._compiles = compiles
        self._traced: TracedRegion = assignment.chain.traced
        self._index = index
        self._is_last = index == assignment.num_stages - 1
        self._nodes = assignment.nodes(index)
        self._marks = marks_of_modules(self._nodes, frozenset(recomputed))
        self._boundary_in = assignment.received(index)
        self._boundary_out = () if self._is_last else assignment.sent(index)
        self._skips = assignment.skips
        present = {*self._nodes, *self._boundary_in}
        unread = assignment.chain.recomputation.unread
        self._blank = {node for user in self._nodes for node in unread.get(user, ()) if node not in present}
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}
        self._sizes: dict[Any, fx.Node | int] = {}
        self._owners: dict[str, Any] = {}
        self._held: dict[str, str] = {}  # what the graph calls a tensor, by its name in the stage
        self._called_inside: dict[str, nn.Module] = {}
        self._called = {str(node.target) for node in self._nodes if node.op == "call_module"}
        self._replacements = self._traced.world.replacements()

    def build(self) -> Stage:
        region_inputs = self._add_inputs()
        for node in self._nodes:
            self._copy(node)
        results = self._traced.output_node.args[0] if self._is_last else self._boundary_out
        self._graph.output(tuple(self._argument(results)))
        for size in self._sizes.values():
            if isinstance(size, fx.Node) and not size.users:
                self._graph.erase_node(size)
        self._called_inside.update(run_checkpoints(self._graph, self._owners))
        module = fx.GraphModule(self._owners, self._graph, class_name=f"Stage{self._index}")
        for path, submodule in self._called_inside.items():
            module.add_submodule(path, submodule)
        self._traced.held.add_stage(module, self._held)
        return Stage(
            index=self._index,
            module=module,
            region_inputs=region_inputs,
            boundary_in=self._boundary_in,
            boundary_out=self._boundary_out,
            skips_in=tuple(skip for skip in self._skips if skip.destination == self._index),
            skips_out=tuple(skip for skip in self._skips if skip.source == self._index),
        )

    # ------------------------------------------------------------------ inputs

    def _add_inputs(self) -> tuple[int, ...]:
        changed = {key for node in self._nodes for key in node.meta.get("mutated_storages", ())}
        received = [(node, self._graph.placeholder(f"boundary_{i}")) for i, node in enumerate(self._boundary_in)]
        used = self._used_inputs()
        inputs = [(node, self._graph.placeholder(str(node.target))) for _, node in used]
        for node, placeholder in received:
            self._values[node] = placeholder
            if storage_key(node.meta["val"]) in changed:
                # autograd forbids in-place changes of a leaf that requires grad, which a received tensor is
                self._values[node] = self._graph.call_method("clone", (placeholder,))
        self._values.update(inputs)
        for symbol in self._traced.numbers.places:
            self._sizes[symbol] = self._graph.call_function(self._traced.numbers.reader(symbol))
        for node in (*self._boundary_in, *(node for _, node in used)):
            if "draw" not in node.meta:  # there may be none
                self._offer_sizes(node)
        return tuple(i for i, _ in used)

    def _used_inputs(self) -> list[tuple[int, fx.Node]]:
        """The region's inputs that the stage needs: as operands, as results, or only to learn a size."""
        operands = {operand for node in self._nodes for operand in node.all_input_nodes}
        if self._is_last:
            operands |= set(self._traced.output_node.all_input_nodes)
        symbols = {symbol for node in self._nodes for symbol in size_symbols((node.args, node.kwargs))}
        symbols |= {symbol for node in self._blank for symbol in _all_symbols(node)}
        symbols = {known for symbol in symbols for known in self._current(symbol).free_symbols}
        symbols -= {symbol for node in self._boundary_in for symbol in _own_symbols(node)}
        used = []
        for i, node in enumerate((*self._traced.input_nodes, *self._traced.draw_nodes)):
            if node in operands or ("draw" not in node.meta and symbols & _own_symbols(node)):
                used.append((i, node))
                symbols -= _own_symbols(node)
        return used

    def _offer_sizes(self, node: fx.Node) -> None:
        """Makes the sizes of a tensor available to later nodes; the first tensor that has a size gives it."""
        for dim, size in enumerate(node.meta["val"].shape):
            expression = symbolic_expression(size)
            if getattr(expression, "is_Symbol", False) and expression not in self._sizes:
                self._sizes[expression] = self._graph.call_method("size", (self._values[node], dim))

    # ------------------------------------------------------------------ nodes

    def _add_blank(self, node: fx.Node) -> None:
        """Stands in for a tensor that the stage does not have, and whose values no recomputed call looks at."""
        value = node.meta["val"]
        shape = tuple(self._argument(as_size(size)) for size in value.shape)
        kind = {"dtype": value.dtype, "device": value.device, "requires_grad": value.requires_grad}
        self._values[node] = self._graph.call_function(torch.empty, (shape,), kind)

    def _copy(self, node: fx.Node) -> None:
        for operand in node.all_input_nodes:
            if operand in self._blank and operand not in self._values:
                self._add_blank(operand)
        args = self._argument(node.args)
        kwargs = self._argument(node.kwargs)
        operation, target = node.op, node.target
        context: CallContext | None = node.meta.get("context")
        if operation == "call_module":
            module = self._traced.root.get_submodule(str(target))
            sides, inner = node.meta.get("sides", ()), node.meta.get("inner_results", ())
            path = _free_name(str(target))
            is_compiled = self._compiles and next(module.children(), None) is not None
            if context is not None or sides or inner or KEPT in kwargs:
                self._called_inside[path] = module
                operation, target = "call_function", _taking_more(module, sides, inner)
            elif is_compiled:
                self._called_inside[path] = module
                operation, target = "call_function", _compiled(module)
            else:
                self._owners[path], target = module, path
        if context is not None:
            operation, target = "call_function", _under(target, context)
        copy = self._graph.create_node(operation, target, args, kwargs, name=node.name)
        checkpoints = (self._marks[node],) if node in self._marks else node.meta.get("checkpoints")
        copy.meta.update(module_path=node.meta["module_path"], source=node.meta.get("source"), checkpoints=checkpoints)
        self._values[node] = copy
        if isinstance(node.meta.get("val"), Tensor):
            self._offer_sizes(node)  # one that depends on data is known only here

    def _value(self, node: fx.Node) -> fx.Node:
        if node.op != "get_attr":
            return self._values[node]
        target = str(node.target)
        known = self._traced.held.constants
        owner = known[target] if target in known else attribute(self._traced.root, target)
        # Below a module that the stage calls, fx would register the tensor once more on the user's own module.
        inside = any(target.startswith(f"{path}.") for path in self._called)
        name, target = target, f"_fxpipe_tensor_{len(self._owners)}" if inside else _free_name(target)
        self._owners[target], self._held[target] = owner, name
        return self._graph.get_attr(target)

    def _argument(self, value: Any) -> Any:
        def in_stage(leaf: Any) -> Any:
            if isinstance(leaf, fx.Node):
                return self._value(leaf)
            if isinstance(leaf, torch.Generator):  # a graph's code cannot name it
                return self._graph.call_function(_returning(leaf))
            return self._size(leaf) if isinstance(leaf, SymbolicSize) else leaf

        return map_aggregate(value, in_stage)

    def _current(self, expression: Any) -> Any:
        """An expression with what the trace fixed, or found equal to something else, later on."""
        return expression.xreplace(self._replacements)

    def _size(self, size: SymbolicSize) -> Any:
        expression = self._current(size.expression)
        if expression.is_number:
            return size.as_number(expression)
        if expression in self._sizes:
            return self._sizes[expression]
        symbols = sorted(expression.free_symbols, key=str)
        operands = tuple(self._sizes[symbol] for symbol in symbols)
        function = _size_function(replace(size, expression=expression), symbols)
        self._sizes[expression] = self._graph.call_function(function, operands)
        return self._sizes[expression]


def _returning(value: Any) -> Callable[[], Any]:
    def generator() -> Any:
        return value

    return generator


def _size_function(symbolic: SymbolicSize, symbols: list[Any]) -> Callable[..., Any]:
    """A size as a function of the sizes that it follows from."""

    @lru_cache(maxsize=64)
    def size(*values: int | float) -> Any:
        bound = {symbol: sympy.sympify(value) for symbol, value in zip(symbols, values, strict=True)}
        return symbolic.as_number(symbolic.expression.xreplace(bound))

    return size


def _free_name(path: str) -> str:
    """The path of a module or tensor in the stage: its own, unless a GraphModule already has something of that name."""
    first, *rest = path.split(".")
    if hasattr(fx.GraphModule, first) or first in _GRAPH_MODULE_ATTRIBUTES:
        first = f"_fxpipe_named_{first}"
    # A keyword is a legal name of a module, but not in the code that fx writes.
    return ".".join(f"_fxpipe_named_{name}" if keyword.iskeyword(name) else name for name in (first, *rest))


# Set by GraphModule on its instances.
_GRAPH_MODULE_ATTRIBUTES = ("graph", "meta", "_graph", "_code", "training")


def _own_symbols(node: fx.Node) -> set[Any]:
    """Symbols that are, by themselves, a size of the node's tensor."""
    expressions = (symbolic_expression(size) for size in node.meta["val"].shape)
    return {expression for expression in expressions if getattr(expression, "is_Symbol", False)}


def _all_symbols(node: fx.Node) -> set[Any]:
    """Symbols that the sizes of the node's tensor follow from."""
    return {symbol for size in node.meta["val"].shape for symbol in getattr(symbolic_expression(size), "free_symbols", ())}


def _taking_more(
    module: nn.Module, sides: tuple[tuple[str, str], ...], inner_places: tuple[InnerPlace, ...]
) -> Callable[..., Any]:
    """Calls a module with what an earlier call has kept for it. Returns, with its result, the tensors that it leaves on itself
    and its submodules, and results of modules inside it.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        set_kept(module, kwargs.pop(KEPT, {}))
        with taking(module, inner_places) as inner:
            result = module(*args, **kwargs)
        if not sides and not inner:
            return result
        return result, (*(getattr(module.get_submodule(path), name) for path, name in sides), *inner)

    called.__name__ = type(module).__name__
    return called


_CALL = nn.Module.__call__


def _compiled(module: nn.Module) -> Callable[..., Any]:
    """Calls a module, compiled at its first call. The code of blocks that are alike is compiled once: torch keeps what it makes
    by the code of ``forward``, and takes their parameters as inputs.
    """
    run = torch.compile(module)

    def called(*args: Any, **kwargs: Any) -> Any:
        # What watches operators would be compiled itself, and sees nothing of compiled code.
        if is_watched():
            return module(*args, **kwargs)
        # What watches the step's calls of modules would be compiled, too, for each module by itself.
        with patched_attributes((nn.Module, "__call__", _CALL)):
            return run(*args, **kwargs)

    called.__name__ = type(module).__name__
    return called


def _under(target: str | Callable[..., Any], context: CallContext) -> Callable[..., Any]:
    """A call of a function, method or module under the grad and autocast modes that the model made it under."""

    def under(*args: Any, **kwargs: Any) -> Any:
        with context.active():
            if isinstance(target, str):
                return getattr(args[0], target)(*args[1:], **kwargs)
            return target(*args, **kwargs)

    under.__name__ = f"under_{target if isinstance(target, str) else getattr(target, '__name__', 'call')}"
    return under
