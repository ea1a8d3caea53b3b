"""Walks through a step's own Python at run time: watches what it draws, and leads a region of several calls.

Before the region the calls are made as they stand, and what the region needs of them is kept. At its first call this rank's
stage runs; a stage that is not the last leaves the step there. On the last stage the Python between the region's calls runs on,
but its calls compute nothing: each returns the region's real output where it is one, and elsewhere a stand-in without data. A
sequence of calls that differs from the recorded one is an error. After the region's last call all is ordinary Python again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from lightning_fxpipe._compat.modes import function_mode_removed, unwatched_torch
from lightning_fxpipe._compat.torch import (
    FakeTensor,
    StandIns,
    checkpoints_replaced,
    patched_attributes,
    tree_flatten,
    tree_leaves,
)
from lightning_fxpipe.errors import FxPipeError, UnsupportedError
from lightning_fxpipe.microbatch.draws import BatchDraws
from lightning_fxpipe.pytree.sizes import SymbolicSize, as_size
from lightning_fxpipe.pytree.structure import Template
from lightning_fxpipe.reporting.wording import argument_words
from lightning_fxpipe.stages.build import concrete_size
from lightning_fxpipe.tracing.distributions import unvalidated_distributions
from lightning_fxpipe.tracing.held_numbers import CallArgument, is_number
from lightning_fxpipe.tracing.input_gradient import check_may_differentiate
from lightning_fxpipe.tracing.parameter_use import check_call
from lightning_fxpipe.tracing.set_between import SetBetween
from lightning_fxpipe.tracing.step_record import RecordedCall, TensorKey
from lightning_fxpipe.tracing.torch_calls import DIFFERENTIATING, LOOKS, CallContext, is_query
from lightning_fxpipe.tracing.trace import TracedRegion
from lightning_fxpipe.user_code.calls import call_name, calls_through, classes_with_own_call
from lightning_fxpipe.user_code.frames import user_source

# The outputs of a region for its inputs; None where it does not run, and its calls return tensors without data.
RunRegion = Callable[[list[Tensor]], "list[Tensor] | None"]

# An array of a tensor that trains is an error.
_NUMBERS = frozenset(function for function in LOOKS if function not in (Tensor.numpy, Tensor.__array__))
_GET_DEVICE: Any = Tensor.device.__get__
_COMPARED = (bool, int, float, complex, str, type(None), torch.dtype)


class StepMode(TorchFunctionMode):
    """Watches a step that is not being recorded.

    Args:
        root: The LightningModule.
        draws: Makes the random tensors.
        written: Gets the memory into which the step's calls write.

    Attributes:
        has_read_values: Whether the step has read values of tensors that train nothing, which may decide what it does.
    """

    def __init__(self, root: nn.Module, draws: BatchDraws, written: set[int] | None = None) -> None:
        super().__init__()
        self.has_read_values = False
        self._root = root
        self._draws = draws
        self._written = set() if written is None else written
        self._in_stage = False
        self._refused: FxPipeError | None = None

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Notes a refusal of the block's, the check of a call: the step may catch it."""
        try:
            yield
        except FxPipeError as error:
            self._refused = self._refused or error
            self._in_stage = True  # what the step's blocks do while it is left, such as ending a `no_grad`, has no number
            raise

    def check_refused(self) -> None:
        """Called where the step has ended: raises what was refused in it."""
        if self._refused is not None:
            raise self._refused

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._in_stage:
            return func(*args, **(kwargs or {}))
        if func == _GET_DEVICE and args[0].is_meta and id(args[0]) in self._placeholders:
            return self._root.device  # code goes on with it to make tensors there
        if func in DIFFERENTIATING:
            check_may_differentiate()
        # What is asked here is no call of the step, and of no interest to others who watch it.
        with unwatched_torch():
            try:  # not in a block of :meth:`refusing`, which costs more than the check
                if written := check_call(self._root, func, args, kwargs):
                    self._written.update(written)
            except FxPipeError as error:
                self._refused = self._refused or error
                raise
            if func in _NUMBERS and type(args[0]) is Tensor and args[0].requires_grad:
                args = (args[0].detach(), *args[1:])  # torch would warn of it, and name a line of ours
            elif func in LOOKS:
                self.has_read_values = True
        return self._draws.call(func, args, kwargs or {})

    @cached_property
    def _placeholders(self) -> frozenset[int]:
        """Ids of the tensors that other stages have."""
        own = (*self._root.parameters(), *self._root.buffers())
        return frozenset(id(tensor) for tensor in own if tensor.is_meta)

    def in_stage(self) -> AbstractContextManager[None]:
        """Does not watch during the block."""
        return _InStage(self)


class _InStage:
    # No generator, like the next: such blocks are around each microbatch.
    def __init__(self, mode: StepMode) -> None:
        self._mode = mode
        self._removed = function_mode_removed(mode)

    def __enter__(self) -> None:
        self._mode._in_stage = True
        self._removed.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._removed.__exit__(*exception)
        self._mode._in_stage = False


class watched_step:
    """Runs the block, the step's code, with its random tensors made by ``draws``; arguments as those of :class:`StepMode`."""

    def __init__(self, root: nn.Module, draws: BatchDraws, written: set[int] | None = None) -> None:
        self._mode = StepMode(root, draws, written)

    def __enter__(self) -> StepMode:
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self._mode

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._mode.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if kind is None:
            self._mode.check_refused()


class DryRunEnds(BaseException):
    """Ends a step whose region runs without data, where its last call is, or the first that leaves tensors on modules."""


class Replay(StepMode):
    """Leads one run of a step through a region of several calls.

    Args:
        root: The LightningModule.
        traced: The region, with the calls that were recorded.
        sizes: Values of the symbols in it.
        device_type: Of this rank's device.
        draws: Makes what the step draws.
        run: Computes the region's outputs from its inputs.
        exchanged: Gets the tensors that the step now hands to a call in place of those that the stages have from elsewhere than
            the step's calls; without, that is another path.
        between: Tells what the step sets between its calls; without, it is not looked for.
        written: Gets the memory into which the step's calls write.

    Attributes:
        has_set_between: True if the step has set what a later call reads.
        other_numbers: Numbers that the step hands to its calls, where the graph has others as constants.
    """

    def __init__(
        self,
        root: nn.Module,
        traced: TracedRegion,
        sizes: Mapping[Any, int],
        *,
        device_type: str,
        draws: BatchDraws,
        run: RunRegion,
        exchanged: dict[str, Tensor] | None = None,
        between: SetBetween | None = None,
        written: set[int] | None = None,
    ) -> None:
        super().__init__(root, draws, written)
        assert traced.record is not None
        self._record = traced.record
        self._held, self._traced = traced.held, traced
        self._exchanged, self._between = exchanged, between
        self.has_set_between = False
        self.other_numbers: list[CallArgument] = []
        self._sizes = sizes
        self._run = run
        self._own_call_classes = classes_with_own_call(root.modules())
        self._paths = {id(module): path for path, module in reversed(list(root.named_modules()))}
        self._device_type = device_type
        self._count = 0
        self._is_inside = self._is_dry_run = False
        self._stand_ins = StandIns()
        self._tensors: dict[TensorKey, Tensor] = {}  # what the step has got so far
        self._keys: dict[int, TensorKey] = {}

    @contextmanager
    def lead(self, arguments: tuple[Any, Sequence[Any]]) -> Iterator[None]:
        """Runs the block, the step's code.

        A step that returns before the region's first call, as one that skips a batch, runs to its end.

        Args:
            arguments: The step's: the batch, and those after its index.

        Raises:
            UnsupportedError: The step takes another path than the one recorded.
        """
        # The region's first call may stand in a block without gradients, which is none of the others' business.
        self._ambient = CallContext.current(self._device_type)
        for position, tensor in enumerate(Template.of(arguments).tensors):
            self._remember(tensor, TensorKey(-1, position))
        with calls_through(self), unvalidated_distributions(), self._no_checkpoints():
            yield
        self.check_refused()
        record = self._record
        if record.first < self._count <= record.last:  # one that makes none of them skips the batch
            raise UnsupportedError(
                "The step ended before making all traced calls of the model.",
                observed=f"{self._count} calls",
                expected=f"at least {record.last + 1}, up to {record.calls[-1].name}, {record.calls[-1].source}",
                todo="Make the same calls for every batch. A step that skips some of them cannot be pipelined.",
            )

    @contextmanager
    def _no_checkpoints(self) -> Iterator[None]:
        """In the block the step's own checkpoints run what is in them, up to the region's end: the stages have them, too, and a
        second run of the step's code would be given what the stages have computed.
        """

        def is_own() -> bool:
            return not self._in_stage and self._count <= self._record.last

        routed = vars(torch.autograd.Function)["apply"]

        def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            if cls is not CheckpointFunction or not is_own():
                return routed.__get__(None, cls)(*args, **kwargs)
            function, _, *rest = args
            trains = torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in rest)
            with torch.set_grad_enabled(trains):
                return function(*rest)

        replaced = checkpoints_replaced(lambda options: nullcontext() if is_own() else None)
        with patched_attributes(replaced, (torch.autograd.Function, "apply", classmethod(apply))):
            yield

    # ------------------------------------------------------------------ numbering, as in span.SpanRecorder

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        execute = partial(super().__torch_function__, func, types)
        kwargs = kwargs or {}
        if self._in_stage or self._is_inside or is_query(func):
            return execute(args, kwargs)
        return self._number(call_name(func), execute, args, kwargs)

    def call_module(self, original_call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Makes the call, or gives what the stages have computed for it."""
        path = self._paths.get(id(module))
        if self._in_stage or self._is_inside or path is None or path in self._record.transparent:
            return original_call(module, *args, **kwargs)
        if self._count < self._record.first and self._is_staged(path, module):
            with self.refusing():  # the step makes fewer calls before the model's than when it was traced
                raise self._other_path(self._record.calls[0], path, args, kwargs)
        if self._between is not None and self._record.first < self._count <= self._record.last:
            with self.in_stage():
                self.has_set_between |= self._between.reaching(module, (args, kwargs)) is not None
        return self._number(path, lambda args, kwargs: original_call(module, *args, **kwargs), args, kwargs)

    def _is_staged(self, path: str, module: nn.Module) -> bool:
        """True for a module of the region that other ranks may have the parameters of."""
        return any(call.name == path for call in self._record.calls) and next(module.parameters(), None) is not None

    def classes_with_own_call(self) -> set[type[nn.Module]]:
        """Classes of the modules, and their bases, that override ``nn.Module.__call__``."""
        return self._own_call_classes

    def _number(
        self,
        name: str,
        execute: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        number, self._count = self._count, self._count + 1
        call = None
        if number > self._record.last:
            with self.refusing():
                self._check_has_data(name, args, kwargs)
        if self._record.first <= number <= self._record.last:
            call = self._record.calls[number - self._record.first]
            if number == self._record.first and self._exchanged is None:
                self._held.refresh()
            with self.refusing():
                self._check_same(call, name, args, kwargs)
            if number == self._record.first:
                self._run_region()
                if self._between is not None:
                    self._between.note_call_end()
            if self._is_dry_run and (number == self._record.last or call.sides):
                raise DryRunEnds
            if call.result is not None and (self._is_dry_run or not call.is_aside):
                return self._replay(call, args, kwargs)
            if call.answer is not None:  # a trace is used for batches that give this one
                return call.answer
        self._is_inside = True
        try:
            result = execute(args, kwargs)
        finally:
            self._is_inside = False
        if call is not None:
            for tensor, key in zip(Template.of(result).tensors, call.keys, strict=False):
                self._remember(tensor, key)
        elif number < self._record.first:
            for position, tensor in enumerate(Template.of(result).tensors):
                self._remember(tensor, TensorKey(number, position))
        return result

    # ------------------------------------------------------------------ the region

    def _run_region(self) -> None:
        inputs = [self._tensors[key] for key in self._record.inputs]
        try:
            with self.in_stage(), self._ambient.active():
                outputs = self._run(inputs)
        except BaseException:
            self._in_stage = True  # as in :meth:`refusing`
            raise
        self._is_dry_run = outputs is None
        for key, output in zip(self._record.wanted, outputs or (), strict=outputs is not None):
            self._remember(output, key)

    def _replay(self, call: RecordedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert call.result is not None
        if call.is_aside:  # it returns what it changes
            for key, leaf in zip(call.arguments, tree_leaves((args, kwargs)), strict=True):
                if isinstance(key, TensorKey) and key.is_held:
                    self._remember(leaf, key)
        tensors = []
        for key, recorded in zip(call.keys, call.result.tensors, strict=True):
            tensor = self._tensors.get(key)
            if tensor is None:
                tensor = self._stand_in(recorded)
                self._remember(tensor, key)
            tensors.append(tensor)
        for path, attribute, key in call.sides:
            if key in self._tensors:
                setattr(self._root.get_submodule(path), attribute, self._tensors[key])
        return call.result.structure.fill(tensors, [self._constant(as_size(size)) for size in call.result.sizes])

    def _stand_in(self, recorded: Tensor) -> Tensor:
        """A tensor without data in place of a result that no later code needs."""
        shape = tuple(concrete_size(size, self._sizes) for size in recorded.shape)
        with self.in_stage():
            return self._stand_ins.make(shape, recorded.dtype, recorded.device, recorded.requires_grad)

    def _constant(self, recorded: Any) -> Any:
        """A recorded constant as it is at these sizes."""
        return recorded.value(self._traced.values(self._sizes)) if isinstance(recorded, SymbolicSize) else recorded

    def _remember(self, tensor: Tensor, key: TensorKey) -> None:
        """The first identity of a tensor is its own, as when the step was recorded."""
        key = self._keys.setdefault(id(tensor), key)
        self._tensors[key] = tensor

    # ------------------------------------------------------------------ checks

    def _check_same(self, call: RecordedCall, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, structure = tree_flatten((args, kwargs))
        context = self._ambient.current_if_other()
        same = name == call.name and structure == call.structure and context == call.context
        same = same and all(
            self._is_same(recorded, leaf) or self._takes_number(CallArgument(call.number, name, position), recorded, leaf)
            for position, (recorded, leaf) in enumerate(zip(call.arguments, leaves, strict=True))
        )
        if not same:
            raise self._other_path(call, name, args, kwargs)

    def _other_path(self, call: RecordedCall, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnsupportedError:
        recorded = [self._constant(argument) for argument in call.arguments]
        expected = _call_words(call.name, ["a tensor" if isinstance(r, TensorKey) else argument_words(r) for r in recorded])
        observed = _call_words(name, [argument_words(leaf) for leaf in tree_leaves((args, kwargs))])
        return UnsupportedError(
            "The step takes a different path between its calls of the model than when it was traced.",
            where=user_source(),
            observed=observed + (", with other tensors or modes" if observed == expected else ""),
            expected=f"{expected}, as at {call.source or 'the same place'}",
            todo="Move the code that varies between batches before the first call of the model, after the last, or into a "
            "module's forward.",
        )

    def _is_same(self, recorded: Any, actual: Any) -> bool:
        if not isinstance(recorded, TensorKey):
            is_float = isinstance(recorded, SymbolicSize) and isinstance(actual, float)
            recorded = self._constant(recorded)
            if is_float:
                return math.isclose(recorded, actual, rel_tol=1e-12)  # sums may be rounded in another order
            return bool(recorded == actual) if isinstance(recorded, _COMPARED) else type(recorded) is type(actual)
        if not isinstance(actual, Tensor):
            return False
        if recorded.is_held and id(actual) not in self._keys:
            return self._is_held(recorded.name, actual)
        return self._keys.get(id(actual)) == recorded

    def _takes_number(self, place: CallArgument, recorded: Any, actual: Any) -> bool:
        """Takes another number than the last batch's, where a trace is looked for; notes it where the graph has a constant."""
        if self._exchanged is None or not is_number(actual):
            return False
        if isinstance(recorded, SymbolicSize):
            return self._traced.numbers.take_argument(place, actual)
        if type(recorded) is not type(actual):
            return False
        self.other_numbers.append(place)
        return True

    def _is_held(self, name: str, tensor: Tensor) -> bool:
        """Returns True if the stages have a tensor as the one with this name, or will have."""
        if not self._held.is_known(name):
            return True  # the call is made anew, as no part of the graph
        if self._exchanged is None:
            return self._held.has(name, tensor)
        return self._exchanged.setdefault(name, tensor) is tensor

    def _check_has_data(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values())):
            raise UnsupportedError(
                "The step uses a value of the pipelined calls that it did not use when it was traced.",
                where=user_source(),
                observed=f"an argument of {name} that only the stages hold",
                expected="the same use of the model's results for every batch",
                todo="Use the value in every step, for example in a loss term with weight zero.",
            )


def _call_words(name: str, arguments: Sequence[str]) -> str:
    return f"a call {name}({', '.join(arguments)})"
