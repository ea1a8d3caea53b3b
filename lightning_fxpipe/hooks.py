"""Runs the hooks of user code so that each rank's sees, logs and decides what it would on one device.

While a hook of the LightningModule or of a callback that is not Lightning's own runs,

* placeholders of other stages' tensors give the real values and gradients (:mod:`lightning_fxpipe.wholemodel`),
* ``self.log`` takes rank 0's value where ranks have different ones, such as times and memory, so that monitors decide alike,
* ``trainer.should_stop`` holds for every rank once one has set it,

Hooks of Lightning's own callbacks, and whatever the strategy does inside a hook, run as they are.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, BasePredictionWriter
from lightning.pytorch.core.hooks import CheckpointHooks, ModelHooks
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_fxpipe._compat import function_mode_removed, patched_attributes, unwatched_torch, wrapped_step_hooks
from lightning_fxpipe.bytecode import loaded_variables
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.messages import warn
from lightning_fxpipe.optimizers import StageOptimizer, with_inner
from lightning_fxpipe.sending import sendable
from lightning_fxpipe.sizes import plain_number
from lightning_fxpipe.topology import Topology
from lightning_fxpipe.wholemodel import WholeModel, WholeView

# Those that run before the module is split, on one rank only, or on data, are left alone.
_NOT_WRAPPED = {"setup", "configure_model", "configure_sharded_model", "on_exception", "state_dict", "load_state_dict"}
_MODULE_HOOKS = (
    *(name for kind in (ModelHooks, CheckpointHooks) for name in vars(kind) if not name.startswith("_")),
    *("configure_optimizers", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
)
_CALLBACK_HOOKS = tuple(
    name for name, value in vars(Callback).items() if inspect.isfunction(value) and not name.startswith("_")
)
_OWN_PACKAGES = ("lightning.", "pytorch_lightning.", "lightning_fxpipe.")

_GRADIENTS, _VALUES, _LOGGING, _STOP, _DIGEST, _MINUS_DIGEST = range(6)
_NOTHING = -math.inf


@dataclass(kw_only=True)
class Frame:
    """A hook that is running.

    Attributes:
        view: The mode that shows it the whole model.
        values: Values of placeholders, once somebody has looked.
        gradients: Gradients of placeholders, once somebody has looked.
    """

    view: WholeView
    values: dict[int, Tensor] | None = None
    gradients: dict[int, Tensor | None] | None = None


class Hooks:
    """Runs hooks on all ranks of a pipeline.

    Args:
        module: The LightningModule, split.
        whole: Brings the tensors of other stages.
        topology: This rank's place.
    """

    def __init__(self, module: LightningModule, whole: WholeModel, topology: Topology) -> None:
        self._module = module
        self._whole = whole
        self._topology = topology
        self._frame: Frame | None = None
        self._agreed = False
        self._reported: set[str] = set()
        self._installed = ExitStack()
        self._output_readers: frozenset[str] = frozenset()
        self._batch_readers: frozenset[str] = frozenset()
        self._changes_batches = False
        self._optimizers: Sequence[StageOptimizer] = ()

    # ------------------------------------------------------------------ where hooks are

    def install(self, trainer: Trainer) -> None:
        """Wraps the hooks of user code until the module's ``teardown`` hook, the last one, or :meth:`uninstall`."""
        self.uninstall()
        if self._topology.num_stages == 1:
            return
        hooks = list(_hooks_of_users(trainer, self._module))
        patches = [(owner, name, self._wrapped(trainer, getattr(owner, name))) for owner, name in hooks]
        patches.append((self._module, "teardown", self._last(self._wrapped(trainer, self._module.teardown))))
        patches += [(self._module, name, self._logging(getattr(self._module, name))) for name in ("log", "log_dict")]
        if not trainer.is_global_zero:
            # Rank 0 has the predictions, and a file is written once.
            writers = [callback for callback in _callbacks(trainer) if isinstance(callback, BasePredictionWriter)]
            patches += [(w, name, _write_nothing) for w in writers for name in ("write_on_batch_end", "write_on_epoch_end")]
        self._output_readers = _readers(hooks, "output")
        self._batch_readers = _readers([(o, n) for o, n in hooks if not isinstance(o, BasePredictionWriter)], "batch")
        self._changes_batches = _changes_batches(trainer, self._module)
        self._installed.enter_context(patched_attributes(*patches))

    def follow(self, optimizers: Sequence[StageOptimizer]) -> None:
        """Hooks see the parameters of the whole model in the groups of these optimizers."""
        self._optimizers = optimizers if self._topology.num_stages > 1 else ()
        # It would look at each gradient of the other stages, which the rank that has them sets to zero.
        patches = [(each.optimizer, "zero_grad", self.outside(each.optimizer.zero_grad)) for each in self._optimizers]
        self._installed.enter_context(patched_attributes(*patches))

    @contextmanager
    def around_optimizers(self, trainer: Trainer) -> Iterator[None]:
        """During the block, a step of the optimizers, their hooks are hooks of user code."""
        with ExitStack() as stack:
            for optimizer in self._optimizers:
                for part in with_inner(optimizer.optimizer):
                    stack.enter_context(wrapped_step_hooks(part, partial(self._wrapped, trainer)))
            yield

    def patch(self, *patches: tuple[Any, str, Any]) -> None:
        """Sets (object, name, value) for as long as the hooks are wrapped."""
        self._installed.enter_context(patched_attributes(*patches))

    def uninstall(self) -> None:
        """Leaves the hooks as they were."""
        self._installed.close()
        self._output_readers = frozenset()

    @property
    def are_running(self) -> bool:
        """Whether a hook of user code runs."""
        return self._frame is not None

    def see_batches(self, step: str) -> bool:
        """Whether user code besides the step looks at its batches, on their way to the step or in a hook."""
        names = {f"on_{_short(step)}_batch_{moment}" for moment in ("start", "end")}
        return self._changes_batches or bool(names & self._batch_readers)

    def sendable_output(self, step: str, output: Any) -> tuple[Any, ...]:
        """What a step returned for a batch, on the CPU, where a hook of user code looks at it and other ranks cannot know it.

        Returns:
            The output alone, or nothing.
        """
        name = f"on_{_short(step)}_batch_end"
        # A loss is known on every rank.
        if name not in self._output_readers or output is None or (step == "training_step" and isinstance(output, Tensor)):
            return ()

        def refusal(observed: str) -> UnsupportedError:
            return UnsupportedError(
                f"The {step} returns something that {name} cannot get on the other ranks.",
                observed=observed,
                expected="tensors and plain values: only the last stage runs the step to its end",
                todo="Return a tensor, a number or a dict of them.",
            )

        return (sendable(output, refusal),)

    def _wrapped(self, trainer: Trainer, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._frame is not None:  # called by another hook
                return hook(*args, **kwargs)
            with self.running(trainer):
                return hook(*args, **kwargs)

        return run

    def _last(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            finally:
                self.uninstall()

        return run

    @contextmanager
    def running(self, trainer: Trainer) -> Iterator[Frame]:
        """The block is user code, on every rank."""
        view = WholeView(self._whole.placeholders(), self.values, self._gradients, self._topology.device)
        self._frame = frame = Frame(view=view)
        try:
            with view, self._whole_groups():
                yield frame
            self._end(trainer)
        finally:
            self._frame = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The block is no user code, and sees this rank's stage only. What it does may change what a hook has seen."""
        frame = self._frame
        if frame is None:
            yield
            return
        self._frame = None
        self._hide_others()
        try:
            with function_mode_removed(frame.view):
                yield
        finally:
            self._show_others()
            frame.values = frame.gradients = None
            self._frame = frame

    def outside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which is no user code wherever it is called."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.suspended():
                return function(*args, **kwargs)

        return run

    @contextmanager
    def _whole_groups(self) -> Iterator[None]:
        self._show_others()
        try:
            yield
        finally:
            self._hide_others()

    def _show_others(self) -> None:
        for optimizer in self._optimizers:
            optimizer.show_others()

    def _hide_others(self) -> None:
        for optimizer in self._optimizers:
            optimizer.hide_others()

    # ------------------------------------------------------------------ what ranks ask each other

    def values(self) -> dict[int, Tensor]:
        """Values of this rank's placeholders, by the placeholder's identity, for a hook that runs."""
        assert self._frame is not None
        if self._frame.values is None:
            self._vote({_VALUES: 1.0})
        assert self._frame.values is not None
        return self._frame.values

    def _gradients(self) -> dict[int, Tensor | None]:
        assert self._frame is not None
        if self._frame.gradients is None:
            self._vote({_GRADIENTS: 1.0})
        assert self._frame.gradients is not None
        return self._frame.gradients

    def _end(self, trainer: Trainer) -> None:
        """Takes part in what other ranks ask for, until none does."""
        asked = True
        while asked:
            result, _ = self._vote({_STOP: float(trainer.should_stop)})
            asked = any(result[kind] > 0 for kind in (_GRADIENTS, _VALUES, _LOGGING))
        if result[_STOP] > 0:
            trainer.should_stop = True

    def _vote(
        self, mine: Mapping[int, float], logged: dict[str, float] | None = None
    ) -> tuple[list[float], list[dict[str, float] | None]]:
        """One round: what any rank wants is done by all.

        Returns:
            The largest of each entry, and where the ranks log different values, what each one logs.
        """
        frame = self._frame
        assert frame is not None
        vote = torch.full((6,), _NOTHING, dtype=torch.float64)
        for kind, value in mine.items():
            vote[kind] = value
        all_logged: list[dict[str, float] | None] = []
        with unwatched_torch():
            dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._topology.control_group)
            result: list[float] = vote.tolist()
            if result[_GRADIENTS] > 0:
                gradients = self._whole.gradients()
                frame.gradients = gradients if frame.gradients is None else frame.gradients
            if result[_VALUES] > 0:
                values = self._whole.values()
                frame.values = values if frame.values is None else frame.values
            if result[_LOGGING] > 0 and result[_DIGEST] != -result[_MINUS_DIGEST]:
                all_logged = [None] * self._topology.num_stages
                dist.all_gather_object(all_logged, logged, group=self._topology.control_group)
        return result, all_logged

    # ------------------------------------------------------------------ logging

    def _logging(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``log`` or ``log_dict`` with values that all ranks agree on, while a hook runs."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def log(*args: Any, **kwargs: Any) -> Any:
            if self._frame is None or self._agreed:
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            arguments = bound.arguments
            if not arguments.get("rank_zero_only"):
                if "dictionary" in arguments:
                    arguments["dictionary"] = self._agree(arguments["dictionary"])
                else:
                    arguments["value"] = self._agree({arguments["name"]: arguments["value"]})[arguments["name"]]
            self._agreed = True  # log_dict calls log
            try:
                return original(*bound.args, **bound.kwargs)
            finally:
                self._agreed = False

        return log

    def _agree(self, values: Any) -> Any:
        """The values, with rank 0's where the ranks have others; what is no number is left as it is."""
        numbers_logged = {name: plain_number(value) for name, value in values.items() if _is_number(value)}
        if not numbers_logged:
            return values
        digest = _digest(numbers_logged)
        _, by_stage = self._vote({_LOGGING: 1.0, _DIGEST: digest, _MINUS_DIGEST: -digest}, numbers_logged)
        zeros = by_stage[-1] if by_stage else None  # rank 0 holds the last stage
        if zeros is None:
            return values
        self._report({n for logged in by_stage if logged for n in logged if not _same(logged[n], zeros.get(n))})
        return {name: _as(value, zeros[name]) if name in zeros else value for name, value in values.items()}

    def _report(self, names: set[str]) -> None:
        new = sorted(names - self._reported)
        self._reported |= names
        if new:
            warn(
                f"A hook logs values that differ between the ranks of the pipeline: {', '.join(new)}. Rank 0's are taken. That "
                "is right for times and memory; what is computed from something that only one rank has must come from rank 0, "
                "which runs the steps to their end."
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.numel() == 1)


def _same(one: float, other: float | None) -> bool:
    return other is not None and (one == other or (math.isnan(one) and math.isnan(other)))


def _as(value: Any, number: float) -> Any:
    """The number in the form of the value; the value itself where it is the same."""
    if _same(plain_number(value), number):
        return value
    return torch.full_like(value, number) if isinstance(value, Tensor) else type(value)(number)


def _digest(values: Mapping[str, float]) -> float:
    """A number that is different for different values; exact in float64, and not negative."""
    text = repr([(name, value.hex()) for name, value in values.items()])
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big"))


def _write_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _callbacks(trainer: Trainer) -> list[Callback]:
    return list(getattr(trainer, "callbacks", ()))


def _hooks_of_users(trainer: Trainer, module: LightningModule) -> Iterator[tuple[Any, str]]:
    """Owner and name of each hook that runs user code."""
    for name in dict.fromkeys(_MODULE_HOOKS):
        if name not in _NOT_WRAPPED and is_overridden(name, module):
            yield module, name
    for callback in _callbacks(trainer):
        for name in _CALLBACK_HOOKS:
            is_user_code = _calls_users(callback) or not _is_own(getattr(callback, name))
            if name not in _NOT_WRAPPED and is_user_code and is_overridden(name, callback, Callback):
                yield callback, name


def _calls_users(callback: Callback) -> bool:
    """Whether the callback's inherited hooks run user code, or compare parameters of the whole model."""
    return not _is_own(type(callback)) or isinstance(callback, BaseFinetuning)


def _is_own(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).startswith(_OWN_PACKAGES)


def _short(step: str) -> str:
    """What a step is called in the names of hooks."""
    return step.removesuffix("_step").replace("training", "train")


def _changes_batches(trainer: Trainer, module: LightningModule) -> bool:
    """Whether user code gets each batch between the loader and the step."""
    names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    data: Any = getattr(trainer, "datamodule", None)
    return any(
        is_overridden(name, module) or (data is not None and is_overridden(name, data, LightningDataModule)) for name in names
    )


def _readers(hooks: Iterable[tuple[Any, str]], argument: str) -> frozenset[str]:
    """The hooks that look at their argument with such a name, or may do so."""
    return frozenset(name for owner, name in hooks if _reads(getattr(owner, name), name, argument))


def _reads(hook: Callable[..., Any], name: str, argument: str) -> bool:
    """Whether an ``on_..._batch_...`` hook looks at its argument with the step's outputs, or at its batch."""
    if not re.fullmatch("on_.*_batch_(end|start)", name) or (argument == "output" and name.endswith("_start")):
        return False
    function = inspect.unwrap(hook)
    code = getattr(function, "__code__", None)
    parameters = list(inspect.signature(hook).parameters.values())
    found = {p.name for p in parameters if argument in p.name and not p.name.startswith("batch_i")}
    if code is None or len(found) != 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return True
    (variable,) = found
    if variable in code.co_cellvars:
        return True
    return variable in loaded_variables(code)
