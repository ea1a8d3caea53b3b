"""A region of several calls: a step that calls an encoder and then a decoder, two towers, a teacher, a parameter of its own.

The whole step runs once on fake tensors with its calls numbered (*torch functions and modules that the step calls itself; what
runs inside a module has no number*). The region spans from the first to the last call that uses a parameter. Everything
between is part of the graph; whatever of it the code after needs is an output.

Inputs of the graph are the batch's tensors and what the code before the region computed, known by the number of the call that
made it. Numbers are the same in every run of the step, fake or real, as long as it takes the same path.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from lightning_fxpipe._compat.lightning import silenced_loggers
from lightning_fxpipe._compat.torch import SYMBOLIC_TYPES, tree_flatten, tree_unflatten
from lightning_fxpipe.pytree.sizes import as_size
from lightning_fxpipe.pytree.structure import Template
from lightning_fxpipe.rng import python_rng
from lightning_fxpipe.tracing.calls_aside import CallsAside
from lightning_fxpipe.tracing.graph_writer import GraphWriter
from lightning_fxpipe.tracing.held_numbers import CallArgument
from lightning_fxpipe.tracing.parameter_use import is_in_place, written_by
from lightning_fxpipe.tracing.prelude import logs_to, say_nothing
from lightning_fxpipe.tracing.record import Recorder
from lightning_fxpipe.tracing.recordable import INPUT_PREFIX, Recordable
from lightning_fxpipe.tracing.recorder_settings import RecorderSettings
from lightning_fxpipe.tracing.region import StepCall
from lightning_fxpipe.tracing.step_record import RecordedCall, Span, StepRecord, TensorKey
from lightning_fxpipe.tracing.torch_calls import LOOKS, check_parametrizations, is_query
from lightning_fxpipe.user_code.calls import call_name
from lightning_fxpipe.user_code.frames import user_source
from lightning_fxpipe.user_code.snapshot import passing_over

_BATCH = -1  # stands for the batch in a TensorKey


@dataclass(frozen=True, kw_only=True)
class StepRegion(Recordable):
    """Several calls of a step, pipelined together."""

    example_names = "batch", "args[2:]"

    step: StepCall
    span: Span

    @property
    def label(self) -> str:
        """The step."""
        return f"several calls of {step_name(self.step)}"

    def example(self) -> Any:
        """The batch, and what follows the batch's index among the step's arguments."""
        # The batch's index is another one every time, and no part of what makes two calls alike.
        return self.step.args[0] if self.step.args else None, self.step.args[2:]

    def code(self, root: nn.Module) -> Any:
        """The step's function."""
        return self.step.function

    def make_recorder(self, settings: RecorderSettings) -> SpanRecorder:
        """One for what the span's calls do."""
        return SpanRecorder(settings, self.span, self.step.function)

    def run(self, root: nn.Module, recorder: SpanRecorder, example: Any) -> Any:
        """Runs the step on fakes up to the region's last call; returns the wanted tensors."""
        recorder.know_batch(Template.of(example).tensors)
        with suppress(_SpanEnds):
            run_step(root, self.step, example, say_nothing)
        recorder.aside.erase(recorder.graph)
        return [recorder.tensors[key] for key in self.span.wanted]

    def record_of(self, recorder: SpanRecorder) -> StepRecord:
        """The calls of the step within the region."""
        return StepRecord(**vars(self.span), calls=tuple(recorder.calls), inputs=tuple(recorder.inputs))


class _SpanEnds(BaseException):
    """Leaves the step after the region's last call; not an ``Exception``, so that the step's own handlers let it pass."""


class SpanRecorder(Recorder):
    """Records the calls of a step from the span's first to its last; others run on fakes and leave no node.

    Attributes:
        calls: The step's own calls within the span.
        inputs: Where each input of the graph comes from.
        tensors: The tensors that the step's calls have made so far, and those of the batch.
        aside: Calls within the span that are no part of the region.
    """

    begins_with_first_call = True

    def __init__(self, settings: RecorderSettings, span: Span, function: Any) -> None:
        super().__init__(settings)
        self.calls: list[RecordedCall] = []
        self.inputs: list[TensorKey] = []
        self.tensors: dict[TensorKey, Tensor] = {}
        self.aside = CallsAside()
        self._span, self._function = span, function
        self._count = 0
        self._keys: dict[int, TensorKey] = {}

    def begin(self) -> None:
        """Called before user code runs: that before the region."""

    def know_batch(self, tensors: tuple[Tensor, ...]) -> None:
        """Tells the batch's tensors, which are inputs of the graph already; each stage takes those that it uses."""
        for position, tensor in enumerate(tensors):
            self._remember(tensor, TensorKey(_BATCH, position))
            self.inputs.append(TensorKey(_BATCH, position))

    # ------------------------------------------------------------------ the step's own calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def record(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
            return super(SpanRecorder, self).__torch_function__(func, types, args, kwargs)

        if self._is_nested or is_query(func):
            return record(args, kwargs)
        return self._number(call_name(func), func, record, args, kwargs or {}, is_module=False)

    def call_module(self, original_call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls a module; gives the call a number if the step makes it."""
        path = self._module_paths.get(id(module))

        def record(args: Any, kwargs: Any) -> Any:
            return super(SpanRecorder, self).call_module(original_call, module, args, kwargs)

        if not self._is_nested and path in self._span.transparent:
            return original_call(module, *args, **kwargs)
        if self._is_nested or path is None:
            return record(args, kwargs)
        self.aside.check_module(path, module)
        check_parametrizations()
        self.between.note_call_begin(module)
        return self._number(path, partial(original_call, module), record, args, kwargs, is_module=True)

    def _may_leave_tensors(self) -> bool:
        return len(self._module_stack) == 2  # a module that the step calls itself: the last stage sets them, see `replay`

    @property
    def is_recording(self) -> bool:
        """True if what runs now becomes part of the graph: after the first call of the span has begun."""
        return not self.is_paused and self._count > self._span.first

    def _runs_step(self) -> bool:
        return self.is_recording and not self._is_nested

    @property
    def _is_nested(self) -> bool:
        """True if a call is made by a module, or by us."""
        return self.is_paused or len(self._module_stack) > 1

    def _number(
        self,
        name: str,
        function: Callable[..., Any],
        record: Callable[[Any, Any], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_module: bool,
    ) -> Any:
        self.before_call()
        number = self._count
        self._count += 1
        if number < self._span.first:
            with self.pause():
                result = self._span.answers[number] if number in self._span.answers else function(*args, **kwargs)
            self._remember_result(number, result)
            return result
        if number == self._span.first:
            self.generators_before = python_rng()
            with self.pause(), passing_over(self._watches):
                self._settings.begin_region()
                self.between.note_begin(self._function)
        given, structure = tree_flatten((args, kwargs))
        arguments = [
            self._settings.number_argument(CallArgument(number, name, position), leaf) for position, leaf in enumerate(given)
        ]
        args, kwargs = tree_unflatten(arguments, structure)
        described = tuple(self.describe(leaf) for leaf in arguments)  # before it can change them
        source, context = user_source(), self._ambient.current_if_other()
        held = [leaf for leaf, key in zip(arguments, described, strict=True) if isinstance(key, TensorKey) and key.is_held]
        last, sides = next(iter(reversed(self.graph.nodes)), None), dict(self.sides)
        has_begun = self.has_begun(number)
        result = self.record(partial(record, args, kwargs), partial(function, *args, **kwargs))
        nodes = _nodes_after(self.graph, last)
        is_aside = False
        if not is_module and has_begun:
            is_aside = self.aside.takes(nodes, arguments, held, written_by(function, args, kwargs), result)
        keys = self._remember_result(number, result, described[0] if is_aside and is_in_place(function) else None)
        new_sides = [(side, tensor) for side, tensor in self.sides.items() if sides.get(side) is not tensor]
        self.calls.append(
            RecordedCall(
                number=number,
                name=name,
                arguments=described,
                structure=structure,
                result=self._template_of(result) if nodes else None,
                keys=keys if nodes else (),
                sides=tuple(
                    (path, attribute, self._remember(tensor, TensorKey(number, len(keys) + position, f"{path}.{attribute}")))
                    for position, ((path, attribute), tensor) in enumerate(new_sides)
                ),
                is_module=is_module,
                source=source,
                is_aside=is_aside,
                answer=result if function in LOOKS and not nodes else None,
                context=context,
            )
        )
        self.after_call(number, nodes)
        if not has_begun:
            self.between.note_region_begin()
        return result

    def has_begun(self, number: int) -> bool:
        """Returns True if a call comes after the first that uses parameters."""
        return number > self._span.first

    def record(self, record: Callable[[], Any], execute: Callable[[], Any]) -> Any:
        """Makes a call of the span with ``record``; ``execute`` would make it unrecorded."""
        return record()

    def before_call(self) -> None:
        """Called before each call of the step."""

    def after_call(self, number: int, nodes: Sequence[fx.Node]) -> None:
        """Called after each call of the span, with the nodes that it has added."""
        if number == self._span.last:
            raise _SpanEnds

    # ------------------------------------------------------------------ which tensor is which

    def describe(self, leaf: Any) -> Any:
        """An argument as a constant, a size, or the identity of a tensor."""
        if isinstance(leaf, Tensor):
            known = self._keys.get(id(leaf))
            return known or TensorKey(_BATCH, 0, self._tensor_fqns.get(id(leaf)) or self._constant_name(leaf))
        return as_size(leaf) if isinstance(leaf, SYMBOLIC_TYPES) else leaf

    def key_of(self, tensor: Tensor) -> TensorKey | None:
        """Identity of a tensor that a call of the step made."""
        return self._keys.get(id(tensor))

    def _remember_result(self, number: int, result: Any, key: TensorKey | None = None) -> tuple[TensorKey, ...]:
        tensors = Template.of(result).tensors
        return tuple(self._remember(tensor, key or TensorKey(number, position)) for position, tensor in enumerate(tensors))

    def _remember(self, tensor: Tensor, key: TensorKey) -> TensorKey:
        """The first identity of a tensor is its own; an in-place call returns one that is known."""
        if id(tensor) not in self._keys:
            self._keys[id(tensor)] = key
            self._alive.append(tensor)
        key = self._keys[id(tensor)]
        self.tensors[key] = tensor
        return key

    def _tensor_argument(self, tensor: Tensor) -> fx.Node:
        key = self._keys.get(id(tensor))
        if id(tensor) not in self._nodes and key is not None and key.call < self._span.first:
            self.inputs.append(key)
            return self.add_input(f"{INPUT_PREFIX}{len(self.inputs) - 1}", tensor)
        return super()._tensor_argument(tensor)

    def _name_unknown(self, tensor: Tensor) -> str:
        if self._is_nested or id(tensor) in self._keys:
            return super()._name_unknown(tensor)
        # What the step's own code has by another way than from its calls, it would not have in a run in stages.
        return GraphWriter._name_unknown(self, tensor)


def _nodes_after(graph: fx.Graph, last: fx.Node | None) -> list[fx.Node]:
    """The calls at the end of a graph; what follows its last input may be another one."""
    nodes = itertools.takewhile(lambda node: node is not last, reversed(graph.nodes))
    return [node for node in nodes if node.op != "placeholder"][::-1]


def run_step(root: nn.Module, step: StepCall, example: Any, log: Callable[..., None]) -> Any:
    """Runs a step on the fakes of its example. What it would log goes to ``log``; its metrics count nothing."""
    batch, further = example
    with logs_to(log, root, "log", "log_dict"), silenced_loggers(root):
        return step.function(batch, *step.args[1:2], *further, **step.kwargs)


def step_name(step: StepCall) -> str:
    """Name of the step's function, for messages."""
    function = step.function
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", "the step")
