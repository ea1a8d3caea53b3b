"""A region of several calls: a step that calls an encoder and then a decoder, two towers, a teacher, a parameter of its own.

The whole step runs once on fake tensors with its calls numbered (*torch functions and modules that the step calls itself; what
runs inside a module has no number*). The region spans from the first to the last call that uses a parameter. Everything
between is part of the graph; whatever of it the code after needs is an output.

Inputs of the graph are the batch's tensors and what the code before the region computed, known by the number of the call that
made it. Numbers are the same in every run of the step, fake or real, as long as it takes the same path.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat import (
    FakeTensor,
    isolated_rng,
    outside_fakes,
    patched_attributes,
    silenced_loggers,
    size_hint,
    tree_flatten,
)
from lightning_fxpipe.calls import call_name, is_query, user_source
from lightning_fxpipe.errors import TraceError
from lightning_fxpipe.record import CallContext, HiddenTensor, MustStayWhole, Recorder, RecordError, RecorderSettings
from lightning_fxpipe.recordable import INPUT_PREFIX, Recordable
from lightning_fxpipe.region import IsRegion, StepCall, find_region, holds_any, trains
from lightning_fxpipe.shapes import DimGroups
from lightning_fxpipe.sizes import as_size
from lightning_fxpipe.steprecord import RecordedCall, StepRecord, TensorKey
from lightning_fxpipe.structure import Template
from lightning_fxpipe.trace import fake_run

_BATCH = -1  # stands for the batch in a TensorKey


@dataclass(frozen=True, kw_only=True)
class Span:
    """Which of a step's calls are the region.

    Attributes:
        first, last: Numbers of the first and last call.
        wanted: The tensors that later code uses, in the order in which they are made.
    """

    first: int
    last: int
    wanted: tuple[TensorKey, ...]


@dataclass(frozen=True, kw_only=True)
class StepRegion:
    """Several calls of a step, pipelined together; see :class:`lightning_fxpipe.recordable.RegionCall` for the members."""

    step: StepCall
    span: Span
    batch_size: int

    prelude_paths: tuple[str, ...] = ()
    opened_path: str | None = None
    context: CallContext | None = None
    varying: DimGroups = ()

    @property
    def label(self) -> str:
        """What it is, for messages."""
        return f"several calls of {_step_name(self.step)}"

    @property
    def example_names(self) -> tuple[str, str]:
        """What the two parts of :meth:`example` are called in messages."""
        return "batch", "args[2:]"

    def example(self) -> Any:
        """The batch, and what follows the batch's index among the step's arguments."""
        return _example(self.step)

    def source(self, root: nn.Module) -> str:
        """``file:line`` of the step."""
        code = getattr(inspect.unwrap(_function(self.step)), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else "source unknown"

    def make_recorder(self, settings: RecorderSettings) -> SpanRecorder:
        """A recorder for it."""
        return SpanRecorder(settings, self.span)

    def run(self, root: nn.Module, recorder: SpanRecorder, example: Any) -> Any:
        """Runs the step on fakes up to the region's last call; returns the wanted tensors."""
        recorder.add_batch(Template.of(example).tensors)
        with suppress(_SpanEnds):
            run_step(root, self.step, example, _ignore)
        return [recorder.tensors[key] for key in self.span.wanted]

    def record_of(self, recorder: SpanRecorder) -> StepRecord:
        """The calls of the step within the region."""
        return StepRecord(
            first=self.span.first,
            last=self.span.last,
            calls=tuple(recorder.calls),
            inputs=tuple(recorder.inputs),
            outputs=self.span.wanted,
        )


class _SpanEnds(BaseException):
    """Leaves the step after the region's last call; not an ``Exception``, so that the step's own handlers let it pass."""


class SpanRecorder(Recorder):
    """Records the calls of a step from the span's first to its last; others run on fakes and leave no node.

    Attributes:
        calls: The step's own calls within the span.
        inputs: Where each input of the graph comes from.
        tensors: The tensors that the step's calls have made so far, and those of the batch.
    """

    def __init__(self, settings: RecorderSettings, span: Span) -> None:
        super().__init__(settings)
        self.calls: list[RecordedCall] = []
        self.inputs: list[TensorKey] = []
        self.tensors: dict[TensorKey, Tensor] = {}
        self._span = span
        self._count = 0
        self._keys: dict[int, TensorKey] = {}

    def add_batch(self, tensors: tuple[Tensor, ...]) -> None:
        """Makes the batch's tensors inputs of the graph; each stage takes those that it uses."""
        for position, tensor in enumerate(tensors):
            key = TensorKey(_BATCH, position)
            self._remember(tensor, key)
            self._add_span_input(tensor, key)

    # ------------------------------------------------------------------ the step's own calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def record() -> Any:
            return super(SpanRecorder, self).__torch_function__(func, types, args, kwargs)

        if self._is_nested or is_query(func):
            return record()
        return self._number(call_name(func), func, record, args, kwargs or {}, is_module=False)

    def call_module(self, original_call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls a module; gives the call a number if the step makes it."""
        path = self._module_paths.get(id(module))

        def record() -> Any:
            return super(SpanRecorder, self).call_module(original_call, module, args, kwargs)

        if self._is_nested or path is None:
            return record()
        return self._number(path, partial(original_call, module), record, args, kwargs, is_module=True)

    def _may_leave_tensors(self) -> bool:
        return len(self._module_stack) == 2  # a module that the step calls itself: the last stage sets them, see `replay`

    @property
    def _is_nested(self) -> bool:
        """Whether a call is made by a module, or by us."""
        return self._paused or len(self._module_stack) > 1

    def _number(
        self,
        name: str,
        function: Callable[..., Any],
        record: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_module: bool,
    ) -> Any:
        number = self._count
        self._count += 1
        if number < self._span.first:
            with self.paused():
                result = function(*args, **kwargs)
            self._remember_result(number, result)
            return result
        arguments, structure = tree_flatten((args, kwargs))
        described = tuple(self.describe(leaf) for leaf in arguments)  # before it can change them
        source = user_source()
        num_nodes, sides = len(self.graph.nodes), dict(self.sides)
        result = record()
        keys = self._remember_result(number, result)
        new_sides = [(side, tensor) for side, tensor in self.sides.items() if sides.get(side) is not tensor]
        in_graph = len(self.graph.nodes) > num_nodes
        self.calls.append(
            RecordedCall(
                number=number,
                name=name,
                arguments=described,
                structure=structure,
                result=Template.of(result) if in_graph else None,
                keys=keys if in_graph else (),
                sides=tuple(
                    (path, attribute, self._remember(tensor, TensorKey(number, len(keys) + position, f"{path}.{attribute}")))
                    for position, ((path, attribute), tensor) in enumerate(new_sides)
                ),
                is_module=is_module,
                source=source,
            )
        )
        self.after_call(number, num_nodes)
        return result

    def after_call(self, number: int, num_nodes: int) -> None:
        """Called after each call of the span; ``num_nodes`` is the graph's length before it."""
        if number == self._span.last:
            raise _SpanEnds

    # ------------------------------------------------------------------ which tensor is which

    def describe(self, leaf: Any) -> Any:
        """An argument as a constant, a size, or the identity of a tensor."""
        if isinstance(leaf, Tensor):
            known = self._keys.get(id(leaf))
            return known or TensorKey(_BATCH, 0, self._tensor_fqns.get(id(leaf), "constant"))
        return as_size(leaf) if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)) else leaf

    def key_of(self, tensor: Tensor) -> TensorKey | None:
        """Identity of a tensor that a call of the step made."""
        return self._keys.get(id(tensor))

    def _remember_result(self, number: int, result: Any) -> tuple[TensorKey, ...]:
        tensors = Template.of(result).tensors
        return tuple(self._remember(tensor, TensorKey(number, position)) for position, tensor in enumerate(tensors))

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
            return self._add_span_input(tensor, key)
        return super()._tensor_argument(tensor)

    def _add_span_input(self, tensor: Tensor, key: TensorKey) -> fx.Node:
        node = self.add_input(f"{INPUT_PREFIX}{len(self.inputs)}", tensor)
        self.inputs.append(key)
        return node


def run_step(root: nn.Module, step: StepCall, example: Any, log: Callable[..., None]) -> Any:
    """Runs a step on the fakes of its example. What it would log goes to ``log``."""
    batch, further = example
    muted = [(root, name, log) for name in ("log", "log_dict") if hasattr(root, name)]
    with patched_attributes(*muted), silenced_loggers(root):
        return step.function(batch, *step.args[1:2], *further, **step.kwargs)


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None


def _example(step: StepCall) -> Any:
    # The batch's index is another one every time, and no part of what makes two calls alike.
    return step.args[0] if step.args else None, step.args[2:]


def _function(step: StepCall) -> Callable[..., Any]:
    function = step.function
    while hasattr(function, "func"):
        function = function.func
    return function


def _step_name(step: StepCall) -> str:
    return getattr(_function(step), "__name__", "the step")


# --------------------------------------------------------------------------------------------------- finding the span


def locate_region(
    root: nn.Module,
    step: StepCall,
    *,
    batch_size: int,
    device: torch.device | None = None,
    fallback: IsRegion = trains,
) -> Recordable:
    """What of a step is pipelined: the only call that uses parameters, or the span of several.

    Where the step cannot run on fake tensors far enough to tell, the first call of a module that ``fallback`` accepts is taken,
    and later ones run on the last stage.

    Raises:
        TraceError: The step never calls a model with parameters.
        UnsupportedError: Parameters are used before the region, so that gradients would have to flow out of the pipeline.
    """
    survey = _survey(root, step, batch_size, device)
    if survey is None or not survey.users:
        return find_region(root, step, batch_size=batch_size, is_region=fallback)
    if len(survey.users) == 1 and not survey.leaves_something_behind():
        # Also where a single function is all that uses parameters: there is no model to pipeline, and this says so.
        return find_region(root, step, batch_size=batch_size, is_region=holds_any)
    first, last = survey.users[0], survey.users[-1]
    return StepRegion(
        step=step, span=Span(first=first, last=last, wanted=survey.used_after(first, last)), batch_size=batch_size
    )


def _survey(root: nn.Module, step: StepCall, batch_size: int, device: torch.device | None) -> _Survey | None:
    """The calls of a step; None where it cannot run on fake tensors up to a call that uses parameters."""
    call = _WholeStep(step=step, batch_size=batch_size, root=root)
    with isolated_rng(), fake_run(root, call, lambda path, _: path != "", device) as run:
        survey = run.recorder
        assert isinstance(survey, _Survey)
        try:
            survey.add_batch(Template.of(run.example).tensors)
            survey.note_use(run_step(root, step, run.example, survey.note_log))
            survey.note_use([_held(module) for module in root.modules()])
            survey.completed = True
        except HiddenTensor as error:
            if survey.users:
                raise _hidden(step, error) from error
            return None
        except (Exception, MustStayWhole, RecordError):
            return survey if survey.users else None
    return survey


def _held(module: nn.Module) -> Any:
    """What a module has as plain attributes, and in lists and dicts."""
    return [value for value in vars(module).values() if isinstance(value, (Tensor, list, dict, tuple))]


def _hidden(step: StepCall, error: HiddenTensor) -> TraceError:
    return TraceError(
        f"{_step_name(step)} uses a tensor that the model has left somewhere during its call.",
        where=error.source,
        observed="a tensor that is neither a result of the call nor an attribute of a module",
        expected="results, or attributes that the model's forward sets",
        todo="Return the tensor from the model's forward, or keep it as an attribute of the module that computes it.",
    )


class _Survey(SpanRecorder):
    """Records a whole step, all modules whole, to learn which calls use parameters and what is used after them.

    Code after the region may look at values (``loss.item()``), of which there are none: it is shown ones, and no call after
    such a look is counted to the region, because whether it is made may depend on the value.
    """

    def __init__(self, settings: RecorderSettings, root: nn.Module) -> None:
        super().__init__(settings, Span(first=0, last=-1, wanted=()))
        self.users: list[int] = []
        self.completed = False
        self._uses: list[tuple[float, TensorKey]] = []  # (number of a call, what it uses)
        self._root = root
        self._parameters = {fqn for fqn, _ in root.named_parameters(remove_duplicate=False)}
        self._has_looked = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._is_nested and func in _LOOKS and isinstance(args[0], FakeTensor) and self.users:
            self._has_looked = True
            self.note_use(args[0])
            self._count += 1
            shape = [size_hint(size) for size in args[0].shape]
            with self.paused(), outside_fakes():
                return _LOOKS[func](torch.ones(shape, dtype=args[0].dtype))
        return super().__torch_function__(func, types, args, kwargs)

    def after_call(self, number: int, num_nodes: int) -> None:
        self._uses += [(number, leaf) for leaf in self.calls[-1].arguments if isinstance(leaf, TensorKey)]
        new = list(self.graph.nodes)[num_nodes:]
        if not self._has_looked and any(self._uses_parameters(node) for node in new):
            self.users.append(number)

    def _uses_parameters(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return holds_any(self._root.get_submodule(str(node.target)))
        return node.op == "get_attr" and str(node.target) in self._parameters

    def note_use(self, value: Any) -> None:
        """The tensors in ``value`` are used by code that needs their values, wherever it stands."""
        keys = [self.key_of(tensor) for tensor in Template.of(value).tensors]
        self._uses += [(math.inf, key) for key in keys if key is not None]

    def note_log(self, *args: Any, **kwargs: Any) -> None:
        """In place of ``self.log``."""
        self.note_use((args, kwargs))

    def leaves_something_behind(self) -> bool:
        """Whether a call that uses parameters leaves more than its result."""
        return any(call.sides for call in self.calls if call.number in self.users)

    def used_after(self, first: int, last: int) -> tuple[TensorKey, ...]:
        """The tensors made within the span that later code uses; all of them where the step did not come to its end."""
        calls = [call for call in self.calls if first <= call.number <= last]
        made = [key for call in calls for key in (*call.keys, *(key for *_, key in call.sides)) if key.call >= first]
        used = {key for number, key in self._uses if number > last}
        used |= {key for call in calls for path, _, key in call.sides if path == call.name}  # nobody else would set them
        return tuple(dict.fromkeys(key for key in made if not self.completed or key in used))


# Ways in which code looks at a tensor's values.
_LOOKS: dict[Callable[..., Any], Callable[[Tensor], Any]] = {
    Tensor.item: Tensor.item,
    Tensor.tolist: Tensor.tolist,
    Tensor.numpy: Tensor.numpy,
    Tensor.__array__: Tensor.numpy,
    Tensor.__bool__: bool,
    Tensor.__float__: float,
    Tensor.__int__: int,
    Tensor.__index__: int,
}


@dataclass(frozen=True, kw_only=True)
class _WholeStep(StepRegion):
    """A step that is surveyed from its first call to its end."""

    root: nn.Module
    span: Span = Span(first=0, last=-1, wanted=())

    def make_recorder(self, settings: RecorderSettings) -> _Survey:
        """A recorder for it."""
        return _Survey(settings, self.root)
