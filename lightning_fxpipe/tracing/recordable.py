"""Calls that can be traced, and comparison of two of them: one call of a module here, several calls of a step in
``tracing.span``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from lightning_fxpipe.errors import TraceError
from lightning_fxpipe.pytree.shapes import DimGroups
from lightning_fxpipe.pytree.structure import NotFillable, Structure, Template
from lightning_fxpipe.tracing.held_numbers import CallArgument, NumberPlace
from lightning_fxpipe.tracing.number_arguments import numbers_on, with_numbers, without_numbers
from lightning_fxpipe.tracing.prelude import PreludeFacts
from lightning_fxpipe.tracing.record import Recorder
from lightning_fxpipe.tracing.recorder_settings import RecorderSettings
from lightning_fxpipe.tracing.signals import RecordError
from lightning_fxpipe.tracing.step_record import StepRecord
from lightning_fxpipe.tracing.torch_calls import CallContext
from lightning_fxpipe.user_code.objects import lasting_objects
from lightning_fxpipe.user_code.placement import device_of
from lightning_fxpipe.user_code.step_code import code_of

INPUT_PREFIX = "region_input_"
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Recordable(ABC):
    """Part of a step that can be pipelined: a call of one module (:class:`RegionCall`), or several calls of a step
    (``StepRegion`` of ``tracing.span``).

    Attributes:
        batch_size: Samples in the example.
        batch_dim: Dimension of a tensor that has them; see ``batch_dim_of`` of ``pytree.shapes``.
        prelude_paths: Modules with parameters that the step called before, without training them.
        context: Modes that it is made under; None stands for those of the moment.
        varying: Dimensions of the tensors in :meth:`example`, besides the batch, whose sizes the trace should not depend on.
        numbers: Plain numbers, stored on modules or elsewhere or handed from call to call, that the trace should not depend on.
        ends_because: Why the step's later calls of the model, if there are any, are not pipelined.
    """

    example_names: ClassVar[tuple[str, str]]  # what the two parts of `example` are called in messages

    batch_size: int
    batch_dim: int = 0
    prelude_paths: tuple[str, ...] = ()
    context: CallContext | None = None
    varying: DimGroups = ()
    numbers: tuple[NumberPlace | CallArgument, ...] = ()
    ends_because: str = ""

    @property
    @abstractmethod
    def label(self) -> str:
        """Name in messages."""

    @property
    def opened_path(self) -> str | None:
        """Module that is always opened, because its own forward is what is recorded; None where there is none."""
        return None

    def numbers_on(self, root: nn.Module) -> AbstractContextManager[None]:
        """In the block, numbers that it gets lie where recorded code reads them."""
        return nullcontext()

    @abstractmethod
    def example(self) -> Any:
        """Returns the arguments, as a tree of tensors and constants."""

    @abstractmethod
    def code(self, root: nn.Module) -> Any:
        """The function that is recorded."""

    def source(self, root: nn.Module) -> str:
        """``file:line`` of the recorded code."""
        code = code_of(self.code(root))
        return f"{code.co_filename}:{code.co_firstlineno}" if code else "source unknown"

    def in_its_state(self, root: nn.Module, record: Callable[[Recordable], _T]) -> _T:
        """Runs ``record`` with user state as it is where the recorded code begins.

        What recorded code reads has the values that the code before it sets: numbers, tensors and flags on modules, in
        containers, in global variables.
        """
        return record(self)

    @abstractmethod
    def make_recorder(self, settings: RecorderSettings) -> Recorder:
        """A recorder for it."""

    @abstractmethod
    def run(self, root: nn.Module, recorder: Any, example: Any) -> Any:
        """Runs it on fakes of :meth:`example`, under the recorder; returns what later code may use."""

    def choose_results(self, num_results: int) -> tuple[int, ...]:
        """Which of so many tensors in the result are outputs of the graph."""
        return tuple(range(num_results))

    def record_of(self, recorder: Any) -> StepRecord | None:
        """Returns the record from which the step's other calls are repeated: None, with a single one."""
        return None


@dataclass(frozen=True, kw_only=True)
class RegionCall(Recordable):
    """The call that is pipelined, as seen in one run of the user's step.

    Attributes:
        path: Path of the called module inside the root.
        args, kwargs: Its arguments, with real tensors.
        wanted: For each tensor in the result whether the step uses it; None where that is not known.
        prelude: What the arguments depend on besides the batch's shapes and constants; see ``tracing.prelude``.
        reach: Runs a function of the call at the moment of the call, in a dry run of the code before it; None where this is
            that moment.
        is_one_of_many: Whether parameters that it does not use belong to other calls, which are planned by themselves.
    """

    example_names = "args", "kwargs"

    path: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    wanted: tuple[bool, ...] | None = None
    prelude: PreludeFacts | None = None
    reach: Callable[[Callable[[RegionCall], Any]], Any] | None = field(default=None, repr=False, compare=False)
    is_one_of_many: bool = False

    @property
    def label(self) -> str:
        """Its module's path."""
        return self.path or "the module"

    @property
    def opened_path(self) -> str | None:
        """The called module."""
        return self.path

    def in_its_state(self, root: nn.Module, record: Callable[[Recordable], _T]) -> _T:
        """Runs ``record`` when the step's code before the call has run."""
        if self.reach is None:
            with self.numbers_on(root):
                return record(self)
        result: _T = self.reach(lambda call: record(replace(self, args=call.args, kwargs=call.kwargs, reach=None)))
        return result

    def numbers_on(self, root: nn.Module) -> AbstractContextManager[None]:
        """In the block, the called module has the numbers that it is called with."""
        return numbers_on(root.get_submodule(self.path), self.args, self.kwargs)

    def example(self) -> Any:
        """Its arguments, but for the numbers in them: forward gets those that lie on the module."""
        return without_numbers(self.args, self.kwargs)

    def code(self, root: nn.Module) -> Any:
        """The module's forward."""
        return type(root.get_submodule(self.path)).forward

    def make_recorder(self, settings: RecorderSettings) -> Recorder:
        """One for the module's inside."""
        return Recorder(settings, region_path=self.path)

    def run(self, root: nn.Module, recorder: Recorder, example: Any) -> Any:
        """Makes the call."""
        lasting = lasting_objects(root)
        known = set(map(id, Template.of(example, shared=lasting).tensors))
        module = root.get_submodule(self.path)
        args, kwargs = with_numbers(module, *example)
        result = module.forward(*args, **kwargs)
        # What the forward puts into its arguments would be missing in them when the stages run.
        if any(id(tensor) not in known for tensor in Template.of(example, shared=lasting).tensors):
            raise RecordError("it stores a tensor in one of its arguments, from which later code may read it")
        return result

    def choose_results(self, num_results: int) -> tuple[int, ...]:
        """Selects the results that the step uses, if they are known."""
        if self.wanted is None or len(self.wanted) != num_results:
            return super().choose_results(num_results)
        return tuple(index for index, is_wanted in enumerate(self.wanted) if is_wanted)


@dataclass(frozen=True, kw_only=True)
class Signature:
    """All that must be equal for a trace to be used again, but for the sizes of the tensors."""

    label: str
    path: str | None  # of the module whose forward was recorded; None where a step's own code was
    structure: Structure  # of the example, constants included
    tensors: tuple[tuple[int, torch.dtype, torch.device, bool], ...]  # (rank, dtype, device, requires_grad)
    training: tuple[bool, ...]
    trainable: tuple[bool, ...]
    context: CallContext


def sign(root: nn.Module, call: Recordable) -> tuple[Signature, tuple[tuple[int, ...], ...]]:
    """The signature of a call and the shapes of its tensors.

    Raises:
        TraceError: An argument has tensors that cannot be exchanged.
    """
    template = taken_apart(call, lasting_objects(root))
    region = root.get_submodule(call.opened_path or "")
    signature = Signature(
        label=call.label,
        path=call.opened_path,
        structure=template.structure,
        tensors=tuple((tensor.dim(), tensor.dtype, tensor.device, tensor.requires_grad) for tensor in template.tensors),
        training=tuple(module.training for module in region.modules()),
        trainable=tuple(parameter.requires_grad for parameter in region.parameters()),
        context=context_of(call),
    )
    return signature, tuple(tuple(tensor.shape) for tensor in template.tensors)


def taken_apart(call: Recordable, lasting: Mapping[int, Any]) -> Template:
    """Splits the call's arguments into tensors and the rest; ``lasting`` are, by ``id``, objects that modules keep between
    calls.

    Raises:
        TraceError: An argument has tensors that cannot be exchanged.
    """
    try:
        return Template.of(call.example(), shared=lasting)
    except NotFillable as error:
        raise TraceError(
            f"The call of {call.label} has an argument that cannot be traced.",
            observed=str(error),
            expected="tensors in containers or objects",
            todo="Pass the tensors as separate arguments.",
        ) from error


def context_of(call: Recordable) -> CallContext:
    """The modes that the call is made under."""
    if call.context is not None:
        return call.context
    return CallContext.current(device_of(Template.of(call.example()).tensors).type)
