"""Runs the hooks of user code so that each rank's sees, logs and decides what it would on one device.

While a hook of the LightningModule or of a callback that is not Lightning's own runs,

* placeholders of other stages' tensors give the real values and gradients (``hooks.whole_model``),
* ``self.log`` takes rank 0's value where ranks have different ones, such as times and memory, so that monitors decide alike,
* calls of ``self.log`` that rank 0 alone makes (``if self.global_rank == 0: ...``) are made by all,
* ``trainer.should_stop`` holds for every rank once one has set it,
* what rank 0 alone changes in tensors and optimizers is changed on every rank (``hooks.rank_zero_changes``),
* random numbers go on from rank 0's when the hook is over,
* what it writes to files is written by rank 0,
* collectives of torch.distributed give all ranks rank 0's values (``distributed.replica``).

Hooks of Lightning's own callbacks, and whatever the strategy does inside a hook, run as they are.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from lightning_fxpipe._compat.lightning import lightning_class, own_replaced
from lightning_fxpipe._compat.modes import function_mode_removed, without_modes
from lightning_fxpipe._compat.roots import in_all_roots
from lightning_fxpipe._compat.step_hooks import wrapped_step_hooks
from lightning_fxpipe._compat.torch import patched_attributes
from lightning_fxpipe.distributed.agreement import gather_values, of_last_stage
from lightning_fxpipe.distributed.failure import has_failed
from lightning_fxpipe.distributed.rank_zero import Shared, answer
from lightning_fxpipe.distributed.replica import Replica, replaced_functions
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.errors import UnsupportedError, no_end_of_epoch
from lightning_fxpipe.hooks.frame import Frame
from lightning_fxpipe.hooks.hook_code import callbacks, hooks_of_users, on_classes
from lightning_fxpipe.hooks.hook_readers import Readers
from lightning_fxpipe.hooks.logged_numbers import as_it_is, in_form_of, is_number, same_number
from lightning_fxpipe.hooks.rank_zero_changes import rank_zero_changes
from lightning_fxpipe.hooks.whole_model import TRACERS, Used, WholeModel, WholeView, add_accumulated, in_place, take_accumulated
from lightning_fxpipe.hooks.whole_optimizers import WholeOptimizers
from lightning_fxpipe.optim.optimizers import StageOptimizer, text_of, with_inner
from lightning_fxpipe.pytree.portable import on_host
from lightning_fxpipe.pytree.sizes import held_number, plain_numbers
from lightning_fxpipe.reporting.messages import warn
from lightning_fxpipe.rng import python_rng, rng_state, set_rng_state
from lightning_fxpipe.user_code.files import lead_nowhere, writing
from lightning_fxpipe.user_code.frames import framework_calls, user_source

# What a rank says in a vote; of a digest its negative, too, so that the largest of both tell whether all are the same.
_GRADIENTS, _VALUES, _LOGGING, _SHARING, _STOP, _DIGEST, _MINUS_DIGEST, _LOGGED, _MINUS_LOGGED, _RNG, _MINUS_RNG = range(11)
_JOINING, _MINUS_JOINING, _ELSEWHERE, _STATES, _TOUCHED, _OPTIONS, _MINUS_OPTIONS, _NUM_KINDS = range(11, 19)
_LOOKS, _NOTHING = (_GRADIENTS, _VALUES, _STATES), -math.inf
_REQUESTS = (*_LOOKS, _LOGGING, _SHARING, _JOINING)
_Voted = tuple[list[float], list[dict[str, float] | None]]


class Hooks:
    """Runs hooks on all ranks of a pipeline.

    Args:
        module: The LightningModule, split.
        whole: Brings the tensors of other stages.
        topology: This rank's place.
        replica: What hooks see of the ranks.

    Attributes:
        readers: Which of them read batches and results of steps.
    """

    def __init__(self, module: LightningModule, whole: WholeModel, topology: Topology, replica: Replica) -> None:
        self._module = module
        self._whole = whole
        self._topology = topology
        self._replica = replica
        self._frame: Frame | None = None
        self._agreed = False
        self._reported: set[str] = set()
        self._installed = ExitStack()
        self._followed = ExitStack()  # what is patched in optimizers
        self.readers = Readers()
        self._temporary: set[str] = set()  # paths of files that hooks have made by tempfile
        self._optimizers = WholeOptimizers(module, topology, self._states)

    # ------------------------------------------------------------------ where hooks are

    def install(self, trainer: Trainer) -> None:
        """Wraps the hooks of user code until the module's ``teardown`` hook, the last one, or :meth:`uninstall`."""
        self.uninstall()
        if self._topology.num_ranks == 1:
            return
        hooks = list(hooks_of_users(trainer, self._module))
        patches = [(owner, name, self._wrap(trainer, getattr(owner, name))) for owner, name in hooks]
        if (self._module, "lr_scheduler_step") not in hooks:  # Lightning's, which calls the user's scheduler
            patches.append((self._module, "lr_scheduler_step", _never_ending_epoch(self._module.lr_scheduler_step)))
        patches += [(logger, "log_metrics", _never_ending_epoch(logger.log_metrics)) for logger in trainer.loggers]
        patches.append((self._module, "teardown", self._last(self._wrap(trainer, self._module.teardown))))
        for name in ("log", "log_dict"):
            patches += own_replaced(self._module, self._logging(getattr(lightning_class(self._module), name)), name)
        kinds = in_all_roots(BasePredictionWriter)
        if not trainer.is_global_zero and type(self._module).print is lightning_class(self._module).print:
            patches += own_replaced(self._module, _do_nothing, "print")  # in a step all ranks take themselves for rank 0
        if not self._topology.is_last:  # that rank has the predictions, and a file is written once
            writers = [callback for callback in callbacks(trainer) if isinstance(callback, kinds)]
            patches += [(w, name, _do_nothing) for w in writers for name in ("write_on_batch_end", "write_on_epoch_end")]
            lead_nowhere([self._module, *callbacks(trainer)])
        self.readers = Readers.among(hooks, trainer, self._module)
        self._installed.enter_context(patched_attributes(*on_classes(patches)))
        self._installed.enter_context(replaced_functions((owner, name, self._tracer) for owner, name in TRACERS))

    def follow(self, optimizers: Sequence[StageOptimizer]) -> None:
        """Hooks see the parameters of the whole model in the groups of these optimizers."""
        self._optimizers.follow(optimizers if self._topology.num_ranks > 1 else ())
        # It would look at each gradient of the other stages, which the rank that has them sets to zero.
        patches = [(o.optimizer, "zero_grad", self._zeroing(o.optimizer.zero_grad)) for o in self._optimizers]
        # It puts in states past the property that notices their use.
        patches += [(o.optimizer, "load_state_dict", self._loading(o.optimizer.load_state_dict)) for o in self._optimizers]
        self._followed.close()
        self._followed.enter_context(patched_attributes(*patches))

    @contextmanager
    def around_optimizers(self, trainer: Trainer) -> Iterator[None]:
        """During the block, a step of the optimizers, their hooks are hooks of user code."""
        with ExitStack() as stack:
            for optimizer in self._optimizers:
                for part in with_inner(optimizer.optimizer):
                    stack.enter_context(wrapped_step_hooks(part, partial(self._wrap, trainer)))
            yield

    def patch(self, *patches: tuple[Any, str, Any]) -> None:
        """Sets (object, name, value) for as long as the hooks are wrapped."""
        self._installed.enter_context(patched_attributes(*on_classes(patches)))

    def uninstall(self) -> None:
        """Leaves the hooks as they were."""
        self._followed.close()
        self._installed.close()
        self.readers = replace(self.readers, of_outputs=frozenset())

    def show_state(self, state: Mapping[str, Any]) -> None:
        """Has hooks see all of a ``state_dict()`` of the module, until the next one."""
        self._whole.show_state(state)

    @property
    def are_running(self) -> bool:
        """True if a hook of user code runs."""
        return self._frame is not None

    def _wrap(self, trainer: Trainer, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._frame is not None:  # called by another hook
                return hook(*args, **kwargs)
            name = getattr(hook, "__name__", "a hook")
            with no_end_of_epoch(name), self.running(trainer, name):
                return hook(*args, **kwargs)

        return run

    def _tracer(self, trace: Callable[..., Any]) -> Callable[..., Any]:
        """A tracer, which in a hook finds the values of other stages in the module: it reads them past torch's functions."""

        @functools.wraps(trace)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._frame is None:
                return trace(*args, **kwargs)
            with in_place(self._module, self.values()), function_mode_removed(self._frame.view):
                return trace(*args, **kwargs)

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
    def running(self, trainer: Trainer, name: str, *, is_joint: bool = False) -> Iterator[Frame]:
        """The block is user code, on every rank; with ``is_joint`` such as takes the same path on all."""
        whole = self._whole
        used = Used(values=self.values, gradients=self._gradients, common=self._touch)
        view = WholeView(whole.placeholders(), whole.held, used, self._topology.device)
        files = writing(is_real=self._topology.is_last, share=self._share, temporary=self._temporary)
        self._frame = frame = Frame(name=name, view=view, files=files, is_joint=is_joint)
        try:
            with self._optimizers.shown(whole=True):
                with view, files, self._replica.acting(self._share):
                    yield frame
                self._end(trainer)
        finally:
            self._frame = None

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """The block is no user code, and sees this rank's stage only. What it does may change what a hook has seen."""
        frame = self._frame
        if frame is None:
            yield
            return
        if frame.is_joint:
            self.meet()
        self._frame, frame.files.is_active = None, False
        try:
            with self._optimizers.shown(whole=False), function_mode_removed(frame.view), self._replica.aside():
                yield
        finally:
            frame.values, frame.gradients, frame.has_states = None, None, False
            self._frame, frame.files.is_active = frame, True

    def outside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which is no user code wherever it is called."""
        return self.suspend()(function)

    def _zeroing(self, zero_grad: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(zero_grad)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.together("optimizer.zero_grad"):
                return zero_grad(*args, **kwargs)

        return run

    def _loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._frame is not None:
                self._states()
            return load(*args, **kwargs)

        return run

    # ------------------------------------------------------------------ what ranks ask each other

    def meet(self) -> None:
        """Called by every rank before they do something together: some may look at what others have, and wait for these."""
        asked = self._frame is not None
        while asked:
            result, _ = self._vote({})
            asked = any(result[kind] > 0 for kind in _REQUESTS)

    def values(self) -> dict[int, Tensor]:
        """Values of this rank's placeholders, by the placeholder's identity, for a hook that runs."""
        assert self._frame is not None
        if self._frame.values is None:
            self._vote({_VALUES: 1.0})
        assert self._frame.values is not None
        return self._frame.values

    def _gradients(self) -> dict[int, Tensor | None]:
        assert (frame := self._frame) is not None
        if frame.gradients is None:
            self._vote({_GRADIENTS: 1.0})
            take_accumulated(frame.values)  # the owner's have these, too
        assert frame.gradients is not None
        add_accumulated(frame.gradients, frame.values)
        return frame.gradients

    def _states(self) -> None:
        assert self._frame is not None
        if not self._frame.has_states:
            self._vote({_STATES: 1.0})

    def _touch(self) -> None:
        assert self._frame is not None
        self._frame.touched = True

    def _share(self, value: Any) -> Any:
        """Rank 0's value, where rank 0 comes here, too; else the rank's own."""
        assert self._frame is not None
        mine = framework_calls(), value
        is_answered = False
        while not is_answered:
            result, _ = self._vote({_SHARING: 1.0}, shared=mine)
            if not _asks_first(result):  # the others are here, or where they wait for no rank of this call
                is_answered, value = answer(mine, self._frame.zeros)
        return value

    @contextmanager
    def together(self, what: str, *, changes_gradients: bool = False) -> Iterator[None]:
        """Suspends around what every rank must do. Raises :class:`UnsupportedError` in a hook if some rank does not.

        With ``changes_gradients``, what they do changes gradients in place: a hook may hold those that it has looked at.
        """
        seen = None if (frame := self._frame) is None else frame.gradients
        if frame is not None and not frame.is_joint and not has_failed():
            digest = _digest_of(what)
            are_back = True
            while are_back:  # from what they ask for, before they come here
                result, _ = self._vote({_JOINING: digest, _MINUS_JOINING: -digest} | self._changes())
                are_back = any(result[kind] > 0 for kind in (*_LOOKS, _LOGGING, _SHARING))
            if result[_ELSEWHERE] > 0 or result[_JOINING] != -result[_MINUS_JOINING]:
                raise _not_together(what)
            self._follow_rank_zero(result)
        renewed = None
        with self.suspend():
            yield
            if changes_gradients and seen is not None:
                renewed = self._whole.gradients_in(seen)
        if frame is not None:
            frame.gradients = renewed

    def _end(self, trainer: Trainer) -> None:
        """Takes part in what other ranks ask for, until none does, and makes the ranks equal again."""
        assert (frame := self._frame) is not None
        asked = True
        while asked:
            logged = _digest_of([entry["name"] for entry in frame.logged])
            random = _digest_of(python_rng(), torch.get_rng_state().numpy().tobytes())
            mine = {_STOP: float(trainer.should_stop), _LOGGED: logged, _RNG: random} | self._changes()
            result, _ = self._vote(mine | {_MINUS_LOGGED: -logged, _MINUS_RNG: -random})
            asked = any(result[kind] > 0 for kind in _REQUESTS)
        self._follow_rank_zero(result)
        if result[_STOP] > 0:
            trainer.should_stop = True
        if result[_LOGGED] != -result[_MINUS_LOGGED]:
            self._log_missing(frame.logged)
        if result[_RNG] != -result[_MINUS_RNG]:
            state = of_last_stage(rng_state(), self._topology)
            set_rng_state({key: value for key, value in state.items() if key != "cuda"})

    def _changes(self) -> dict[int, float]:
        """Says in a vote what this rank may have changed alone."""
        assert self._frame is not None
        add_accumulated(self._frame.gradients, self._frame.values)
        options = _digest_of(text_of(self._optimizers.entries(states=False)))
        touched = {_TOUCHED: 1.0} if self._frame.touched else {}
        return {_OPTIONS: options, _MINUS_OPTIONS: -options} | touched

    def _follow_rank_zero(self, result: Sequence[float]) -> None:
        """Changes on this rank what rank 0 has changed. Called by every rank, with the result of a vote."""
        assert (frame := self._frame) is not None
        have_options = result[_OPTIONS] == -result[_MINUS_OPTIONS]
        has_looked = frame.values is not None or frame.gradients is not None or frame.has_states
        if frame.is_joint or not (has_looked or result[_TOUCHED] > 0 or not have_options):
            return
        is_touched = result[_TOUCHED] > 0
        with without_modes():
            tensors = self._whole.entries(frame.values, frame.gradients, common=is_touched)
            optimizers = self._optimizers.entries(states=frame.has_states)
            before = self._whole.fingerprints
            changes = rank_zero_changes(tensors | optimizers, before, self._topology, frame.name)
            self._whole.follow_changes({name: value for name, value in changes.items() if name in tensors})
            self._optimizers.follow_changes({name: value for name, value in changes.items() if name in optimizers})

    def _vote(self, mine: Mapping[int, float], logged: dict[str, float] | None = None, shared: Shared | None = None) -> _Voted:
        """One round: what any rank wants is done by all.

        Args:
            mine: What this rank says.
            logged: What it is about to log.
            shared: The call that it makes, and its value.

        Returns:
            The largest of each entry, and where the ranks log different values, what each one logs.
        """
        assert (frame := self._frame) is not None
        vote = torch.full((_NUM_KINDS,), _NOTHING, dtype=torch.float64)
        vote[_ELSEWHERE] = _NOTHING if _JOINING in mine else 1.0
        for kind, number in mine.items():
            vote[kind] = number
        all_logged: list[dict[str, float] | None] = []
        with without_modes():
            dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._topology.control_group)
            result: list[float] = vote.tolist()
            if result[_GRADIENTS] > 0:
                gradients = self._whole.gradients()
                frame.gradients = gradients if frame.gradients is None else frame.gradients
            if result[_VALUES] > 0:
                values = self._whole.values()
                frame.values = values if frame.values is None else frame.values
            if result[_STATES] > 0:
                frame.has_states = True
                self._optimizers.bring_states()
            looks = any(result[kind] > 0 for kind in _LOOKS)
            if result[_LOGGING] > 0 and not looks and result[_DIGEST] != -result[_MINUS_DIGEST]:
                all_logged = gather_values(self._topology.control_group, logged)
            if result[_SHARING] > 0 and not _asks_first(result):
                frame.zeros = of_last_stage(shared, self._topology)
        return result, all_logged

    # ------------------------------------------------------------------ logging

    def _logging(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``log`` or ``log_dict`` with values that all ranks agree on, while a hook runs."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def log(*args: Any, **kwargs: Any) -> Any:
            if self._frame is None or self._agreed:
                return original(self._module, *args, **kwargs)
            bound = signature.bind(self._module, *args, **kwargs)
            arguments = bound.arguments
            if not arguments.get("rank_zero_only"):
                if "dictionary" in arguments:
                    arguments["dictionary"] = values = self._agree(arguments["dictionary"])
                else:
                    values = self._agree({arguments["name"]: arguments["value"]})
                    arguments["value"] = values[arguments["name"]]
                options = {key: option for key, option in arguments.items() if key not in ("self", "dictionary")}
                numbers_logged = {name: value for name, value in values.items() if is_number(value)}
                self._frame.logged += [{**options, "name": name, "value": as_it_is(v)} for name, v in numbers_logged.items()]
            self._agreed = True  # log_dict calls log
            try:
                return original(*bound.args, **bound.kwargs)
            finally:
                self._agreed = False

        return log

    def _agree(self, values: Any) -> Any:
        """The values, with rank 0's where the ranks have others; what is no number is left as it is."""
        held = {name: held_number(value) for name, value in values.items() if is_number(value)}
        if not held:
            return values
        numbers_logged = dict(zip(held, *plain_numbers([*held.values()]), strict=True))
        digest = _digest_of([(name, value.hex()) for name, value in numbers_logged.items()])
        are_others_back = True
        while are_others_back:  # to look at something, before they come to this call
            result, by_rank = self._vote({_LOGGING: 1.0, _DIGEST: digest, _MINUS_DIGEST: -digest}, numbers_logged)
            are_others_back = any(result[kind] > 0 for kind in _LOOKS)
        zeros = by_rank[0] if by_rank else None
        if zeros is None:
            return values
        self._report({n for logged in by_rank if logged for n in logged if not same_number(logged[n], zeros.get(n))})
        return {name: in_form_of(value, zeros[name]) if name in zeros else value for name, value in values.items()}

    def _log_missing(self, logged: list[dict[str, Any]]) -> None:
        """Makes the calls that rank 0 has made and this rank has not. Called by every rank."""
        mine = Counter(entry["name"] for entry in logged)
        self._agreed = True
        try:
            for entry in of_last_stage(on_host(logged) if self._topology.is_last else logged, self._topology):
                if mine[entry["name"]]:
                    mine[entry["name"]] -= 1
                    continue
                value = entry["value"]
                value = value.to(self._topology.device) if isinstance(value, Tensor) else value
                lightning_class(self._module).log(self._module, **{**entry, "value": value})
        finally:
            self._agreed = False

    def _report(self, names: set[str]) -> None:
        new = sorted(names - self._reported)
        self._reported |= names
        if new:
            warn(
                f"A hook logs values that differ between the ranks of the pipeline: {', '.join(new)}. Rank 0's values are "
                "used, as is intended for times and memory. If a value comes from the step's results, compute it on rank 0, "
                "which alone runs steps to their end."
            )


def _asks_first(result: Sequence[float]) -> bool:
    """True if a rank asks for something that comes before the ranks' calls of Lightning or torch."""
    return any(result[kind] > 0 for kind in (*_LOOKS, _LOGGING))


def _not_together(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"Only some ranks of the pipeline call {what} in a hook.",
        where=user_source(),
        observed="a call on some ranks only",
        expected="a call on every rank, because each holds a part of the model",
        todo="Call it on every rank, without a condition such as trainer.is_global_zero. Files are written only once.",
    )


def _digest_of(*values: Any) -> float:
    """A number that is different for different values; exact in float64, and not negative."""
    return float(int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=6).digest(), "big"))


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _never_ending_epoch(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        with no_end_of_epoch(getattr(hook, "__name__", "a hook")):
            return hook(*args, **kwargs)

    return run
