"""The pipelined call of a module as a graph: runs the recorder, opens only the modules it is told to, checks what it may be
used for.

A trace is valid for one train/eval mode, one structure of inputs, one pattern of ``requires_grad`` and all sizes of the batch
and of the dimensions that vary which satisfy the guards met while recording; :meth:`TracedRegion.covers` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, zip_longest
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat import (
    FakeTensor,
    FakeWorld,
    TreeSpec,
    depends_on_data,
    has_hooks,
    isolated_rng,
    python_rng,
    symbolic_expression,
    tracing_friendly_torch,
    tree_flatten,
    tree_unflatten,
)
from lightning_fxpipe.calls import raising_source, user_source
from lightning_fxpipe.errors import TraceError
from lightning_fxpipe.exchange import Attributes, exchanged_tensors
from lightning_fxpipe.record import CallContext, MustStayWhole, Recorder, RecordError, RecorderSettings, recording
from lightning_fxpipe.recordable import CONSTANT_TYPES, Recordable, Signature, device_type, sign
from lightning_fxpipe.steprecord import StepRecord


@dataclass(frozen=True, kw_only=True)
class TracedRegion:
    """The recorded graph and what is needed to cut it and to use it.

    ``graph`` has placeholders for the tensors among the region's inputs, ``get_attr`` nodes for parameters, buffers and
    constants (one for each use), calls, and an output with the list of the tensors in the region's result. Each node's ``meta``
    has ``val`` (fake result), ``module_path``, ``source`` (``file:line`` in the user's code), ``mutated_storages`` and, where
    it differs from the region's own, ``context``.
    """

    graph: fx.Graph
    root: nn.Module = field(repr=False)
    signature: Signature = field(repr=False)
    batch_size: int
    input_shapes: tuple[tuple[Any, ...], ...]  # of the tensors in the region's example: ints and sympy symbols
    output_structure: TreeSpec = field(repr=False)
    output_leaves: tuple[Any, ...]  # an index into the output node's list for tensors (as TensorAt), else the constant
    constants: Mapping[str, Tensor] = field(repr=False)
    world: FakeWorld = field(repr=False)
    opened: tuple[str, ...]
    kept_whole: Mapping[str, str]
    record: StepRecord | None = field(default=None, repr=False)
    drawing: frozenset[str] = frozenset()

    @cached_property
    def input_nodes(self) -> tuple[fx.Node, ...]:
        """Placeholders of the input tensors."""
        return tuple(node for node in self.graph.nodes if node.op == "placeholder" and "draw" not in node.meta)

    @cached_property
    def draw_nodes(self) -> tuple[fx.Node, ...]:
        """Placeholders of the random tensors that may be drawn before the region runs; None where they are not."""
        return tuple(node for node in self.graph.nodes if "draw" in node.meta)

    @cached_property
    def output_node(self) -> fx.Node:
        """The node with the list of the tensors in the result."""
        return self.graph.output_node()

    def bind_sizes(self, shapes: tuple[tuple[int, ...], ...]) -> dict[Any, int] | None:
        """Values of the symbols for inputs of these shapes, or None where the graph does not cover them."""
        sizes: dict[Any, int] = {}
        for symbolic, actual in zip(self.input_shapes, shapes, strict=True):
            if len(symbolic) != len(actual):
                return None
            for expression, size in zip(symbolic, actual, strict=True):
                if isinstance(expression, int):
                    if expression != size:
                        return None
                elif sizes.setdefault(expression, size) != size:
                    return None
        # A symbol that the trace found to be a constant, or equal to another, must be so again.
        replaced = [sympy.Eq(symbol, value) for symbol, value in self.world.replacements().items()]
        conditions = [*self.world.guards(), *replaced]
        if any(not _holds(condition, sizes) for condition in conditions):
            return None
        if any(size < 2 for size in sizes.values()):
            return None  # torch decides broadcasting and contiguity differently for sizes 0 and 1
        return sizes

    def covers(self, call: Recordable) -> bool:
        """Whether the graph computes this call."""
        signature, shapes = sign(self.root, call)
        return signature == self.signature and self.bind_sizes(shapes) is not None


@dataclass(frozen=True, slots=True)
class TensorAt:
    """Stands in a region's result for the tensor at this position of the graph's output."""

    index: int


def is_torch_leaf(path: str, module: nn.Module) -> bool:
    """The finest granularity, ``torch.fx.Tracer``'s own: torch.nn modules stay whole, but for Sequential."""
    return module.__module__.startswith(("torch.nn", "torch.ao.nn")) and not isinstance(module, nn.Sequential)


def trace_region(
    root: nn.Module,
    call: Recordable,
    *,
    opened: Collection[str] | None = (),
    device: torch.device | None = None,
) -> TracedRegion:
    """Records the call of one module.

    Nothing of the module is changed: its parameters are exchanged for fakes while it runs, and whatever its Python sets on
    itself is undone.

    Args:
        root: Module that paths and FQNs are relative to.
        call: The call, with real example tensors.
        opened: Paths of the modules inside which nodes are wanted; the called module itself always is. ``None`` opens
            everything down to torch.nn's own modules.
        device: Device that parameters on the meta device are taken to be on.

    Raises:
        TraceError: The Python of the called module itself cannot be recorded.
    """
    signature, _ = sign(root, call)
    kept_whole: dict[str, str] = {}
    while True:
        try:
            with isolated_rng():
                before = python_rng()
                traced = _record(root, call, signature, opened, kept_whole, device)
                drew = before != python_rng()
                again = _record(root, call, signature, opened, kept_whole, device)
        except MustStayWhole as stop:
            if stop.path in ("", call.opened_path) or stop.path in kept_whole:
                raise _untraceable(root, call, stop.reason, stop.source) from stop
            kept_whole[stop.path] = stop.reason
        except RecordError as error:
            raise _untraceable(root, call, error.reason, error.source) from error
        else:
            _check_deterministic(root, call, traced.graph, again.graph, drew)
            drawing = traced.drawing - set(kept_whole)
            if opened is None or not drawing:
                return traced
            opened = {*opened, *drawing}


def _record(
    root: nn.Module,
    call: Recordable,
    signature: Signature,
    opened: Collection[str] | None,
    kept_whole: dict[str, str],
    device: torch.device | None,
) -> TracedRegion:
    actually_opened: dict[str, None] = {} if call.opened_path is None else {call.opened_path: None}

    def is_whole(path: str, module: nn.Module) -> bool:
        wanted_whole = is_torch_leaf(path, module) if opened is None else path not in opened
        if not wanted_whole and path not in kept_whole and has_hooks(module):
            kept_whole[path] = "hooks run around its forward"
        whole = (wanted_whole or path in kept_whole) and path != ""
        if not whole:
            actually_opened[path] = None
        return whole

    with fake_run(root, call, is_whole, device) as run:
        recorder = run.recorder
        try:
            result = call.run(root, recorder, run.example)
        except Exception as error:
            reason, source = f"{type(error).__name__}: {error}", raising_source(error) or user_source()
            raise _untraceable(root, call, reason, source) from error
        for path in actually_opened:
            if path or call.opened_path is not None:  # what a step sets on the LightningModule, it sets in every run
                _check_unchanged(path, run.attributes[path], recorder)
        output_leaves, output_structure = tree_flatten(result)
        output_nodes, described = _describe_output(recorder, output_leaves)
        recorder.graph.output(output_nodes)
    _erase_unused(recorder.graph)
    return TracedRegion(
        graph=recorder.graph,
        root=root,
        signature=signature,
        batch_size=call.batch_size,
        input_shapes=run.input_shapes,
        output_structure=output_structure,
        output_leaves=described,
        constants=recorder.constants,
        world=run.world,
        opened=tuple(path for path in actually_opened if path != call.opened_path),
        kept_whole=dict(kept_whole),
        record=call.record_of(recorder),
        # What they draw is that of one device only if the recorder sees it.
        drawing=frozenset(path for path in recorder.drawing if not is_torch_leaf(path, root.get_submodule(path))),
    )


def _describe_output(recorder: Recorder, leaves: list[Any]) -> tuple[list[fx.Node], tuple[Any, ...]]:
    nodes: list[fx.Node] = []
    described: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            described.append(TensorAt(len(nodes)))
            nodes.append(recorder.argument(leaf))
        elif isinstance(leaf, CONSTANT_TYPES):
            described.append(leaf)
        else:
            raise RecordError(f"the result has an object of type {type(leaf).__name__}, which cannot be looked into")
    return nodes, tuple(described)


def _batch_dims(tensor: Tensor, batch_size: int) -> tuple[int, ...]:
    return (0,) if batch_size > 1 and tensor.dim() > 0 and tensor.shape[0] == batch_size else ()


@dataclass(frozen=True, kw_only=True)
class FakeRun:
    """The module while its tensors are fakes and a recorder watches.

    Attributes:
        world: The fakes' world.
        recorder: The recorder, active.
        example: The region's example with fakes for its tensors.
        input_shapes: Shapes of those.
        attributes: What each module has, by path, before it runs.
    """

    world: FakeWorld
    recorder: Recorder
    example: Any
    input_shapes: tuple[tuple[Any, ...], ...]
    attributes: dict[str, Attributes]


@contextmanager
def fake_run(
    root: nn.Module, call: Recordable, is_whole: Callable[[str, nn.Module], bool], device: torch.device | None
) -> Iterator[FakeRun]:
    """Exchanges all tensors of the module for fakes, and records what the block runs."""
    world = FakeWorld()
    leaves, structure = tree_flatten(call.example())
    context = call.context or CallContext.current(device_type(call))
    device = device or next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
    paths = {id(module): path for path, module in reversed(list(root.named_modules()))}
    fqns: dict[int, str] = {}

    def fake_of(tensor: Tensor, fqn: str) -> Tensor:
        fake = tensor if isinstance(tensor, FakeTensor) else world.static(tensor, device)
        fqns[id(fake)] = fqn
        return fake

    group_of = {place: number for number, group in enumerate(call.varying) for place in group}
    positions = count()

    def fake_input(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        position = next(positions)
        groups = {dim: group_of[position, dim] for dim in range(leaf.dim()) if (position, dim) in group_of}
        return world.input(leaf.detach().requires_grad_(leaf.requires_grad), _batch_dims(leaf, call.batch_size), groups)

    with (
        exchanged_tensors(root, fake_of),
        torch.inference_mode(False),
        context.active(),
    ):
        attributes = {path: Attributes(module) for path, module in root.named_modules()}
        settings = RecorderSettings(module_paths=paths, tensor_fqns=fqns, is_whole=is_whole, device_type=device.type)
        recorder = call.make_recorder(settings)
        fakes = [fake_input(leaf) for leaf in leaves]
        shapes = (fake.shape for fake in fakes if isinstance(fake, Tensor))
        with tracing_friendly_torch(), world.active(), recording(recorder):
            yield FakeRun(
                world=world,
                recorder=recorder,
                example=tree_unflatten(fakes, structure),
                input_shapes=tuple(tuple(symbolic_expression(size) for size in shape) for shape in shapes),
                attributes=attributes,
            )


def _check_unchanged(path: str, before: Attributes, recorder: Recorder) -> None:
    """What an opened module sets on itself would happen in the trace only, so such a module stays whole; but for tensors,
    which the recorder knows."""
    changed = [name for name in before.changed() if (path, name) not in recorder.sides]
    if changed:
        raise MustStayWhole(path, f"its forward assigns self.{sorted(changed)[0]}", None)


def _check_deterministic(root: nn.Module, call: Recordable, first: fx.Graph, second: fx.Graph, drew: bool) -> None:
    """A graph that depends on random numbers, as with layer drop, would freeze one of the outcomes."""

    def described(graph: fx.Graph) -> list[tuple[str, str, str]]:
        return [(n.op, getattr(n.target, "__qualname__", str(n.target)), f"{n.args} {n.kwargs}") for n in graph.nodes]

    differing = [a for a, b in zip_longest(described(first), described(second)) if a != b]
    if not differing and not drew:
        return
    raise TraceError(
        f"The code of {_name(root, call)} may take another path each time it runs.",
        where=f"{call.label}, {call.source(root)}",
        observed=f"{differing[0]} one time only"
        if differing
        else "its Python draws random numbers while the graph is recorded",
        expected="the same operations each time",
        todo="Move the random choice (layer drop, stochastic depth) into the submodules that it concerns.",
    )


def _name(root: nn.Module, call: Recordable) -> str:
    return call.label if call.opened_path is None else type(root.get_submodule(call.opened_path)).__name__


def _erase_unused(graph: fx.Graph) -> None:
    """Drops calls whose result nobody uses, unless they change something, draw random numbers or make a size."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output", "call_module") or node.meta.get("mutated_storages"):
            continue
        value = node.meta.get("val")
        if isinstance(value, Tensor) and any(depends_on_data(size) for size in value.shape):
            continue
        if not any(
            word in str(node.target).lower() for word in ("rand", "draw", "dropout", "bernoulli", "normal", "multinomial")
        ):
            graph.erase_node(node)


def _holds(condition: sympy.Basic, sizes: Mapping[Any, int]) -> bool:
    value = condition.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()})
    # What is left of symbols depends on data: nothing that the inputs' shapes could contradict.
    return bool(value.free_symbols) or bool(value)


def _untraceable(root: nn.Module, call: Recordable, reason: str, source: str | None) -> TraceError:
    return TraceError(
        f"The forward of {_name(root, call)} cannot be recorded as a graph.",
        where=f"{call.label}, {source or 'source unknown'}",
        observed=reason,
        expected="code at this level that does not look at tensor values",
        todo="Move the code into a submodule: modules below this one that cannot be recorded are kept whole.",
    )
