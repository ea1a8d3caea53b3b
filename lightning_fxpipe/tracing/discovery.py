"""Finds what of a step is pipelined, by running the whole step once on fake tensors.

The run tells which of the step's calls use parameters and what of their results later code uses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import SYMBOLIC_TYPES, FakeTensor
from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.pytree.structure import Template
from lightning_fxpipe.reporting.wording import error_words
from lightning_fxpipe.rng import isolated_rng
from lightning_fxpipe.tracing.calls_aside import attribute_tensors
from lightning_fxpipe.tracing.examples import cone
from lightning_fxpipe.tracing.fake_run import fake_run
from lightning_fxpipe.tracing.input_gradient import InputGradient, OwnGradient, functions_before, input_gradient, own_gradient
from lightning_fxpipe.tracing.parameter_use import (
    ParameterMisuse,
    check_call,
    check_changes,
    check_same_parameters,
    parameters_by_name,
    with_todays_memory,
)
from lightning_fxpipe.tracing.prelude import say_nothing
from lightning_fxpipe.tracing.recordable import INPUT_PREFIX, Recordable
from lightning_fxpipe.tracing.recorder_settings import RecorderSettings, is_torch_leaf
from lightning_fxpipe.tracing.region import IsRegion, NoModelCall, StepCall, find_region, holds_any, trains
from lightning_fxpipe.tracing.repeat import has_known_size
from lightning_fxpipe.tracing.signals import HiddenTensor, Learned, MustStayWhole, NoRegion, RecordAgain, RecordError
from lightning_fxpipe.tracing.span import SpanRecorder, StepRegion, run_step, step_name
from lightning_fxpipe.tracing.state_reads import check_values_read
from lightning_fxpipe.tracing.step_record import Span, TensorKey
from lightning_fxpipe.tracing.torch_calls import DIFFERENTIATING, LOOKS
from lightning_fxpipe.tracing.value_looks import look_unrecorded
from lightning_fxpipe.user_code.exchange import OwnAttributes
from lightning_fxpipe.user_code.frames import raising_source, user_source
from lightning_fxpipe.user_code.placement import device_of
from lightning_fxpipe.user_code.snapshot import Snapshot
from lightning_fxpipe.user_code.step_code import locals_up_to, may_differ_between_batches

_LOOKS = "reads values of tensors, which may determine the later calls"
_logger = logging.getLogger("lightning_fxpipe")
_CONTAINERS = (list, tuple, dict)
# A step that calls the model for none of so many batches is taken to have none.
_MAX_SKIPPED = 3
# Modules inside each other that are taken for the step's own code.
_MAX_DEPTH = 4


def regions(
    root: nn.Module,
    step: StepCall,
    *,
    batch_size: int,
    batch_dim: int = 0,
    device: torch.device | None = None,
    fallback: IsRegion = trains,
    needs_model: bool = True,
) -> Iterator[Recordable]:
    """Yields the regions of a step that may be pipelined: the best first, then smaller ones in case that cannot be cut.

    The best is the only call that uses parameters, or the span of several. Where the step cannot run on fake tensors far enough
    to tell, the first call of a module that ``fallback`` accepts is taken, and later ones run on the last stage.

    A branch on values of the batch (``if (labels == 1).any():``) between two calls is part of the region: every rank has the
    batch. The region ends there only if its calls leave parameters unused, which the other branch may use.

    A smaller one takes a module's forward for the step's own code: it ends where that reads values which are unknown
    beforehand, and the rest of the step is ordinary Python on the last stage.

    Args:
        root: The LightningModule.
        step: The step, with a microbatch.
        batch_size: Samples in that.
        batch_dim: Dimension of the batch in its tensors.
        device: Where the module is taken to be; by default where the batch is.
        fallback: What is a model, where the step cannot run on fakes.
        needs_model: Whether a step that uses a parameter without calling a module is refused: there is nothing to cut.

    Raises:
        NoModelCall: The step never calls a model with parameters.
        UnsupportedError: Parameters are used before the region, so that gradients would have to flow out of the pipeline, or
            the step changes them.
    """
    device = device or device_of(Template.of((step.args, dict(step.kwargs))).tensors)
    whole = WholeStep(step=step, batch_size=batch_size, batch_dim=batch_dim, root=root)
    discovery = _discover(whole, device)
    if discovery.has_branches and not discovery.uses_all_parameters():
        whole = replace(whole, may_branch=False)
        discovery = _discover(whole, device)
    because, users = discovery.ends_because(), discovery.users
    if because:
        _logger.debug("%s: calls of the model after the pipelined ones cannot be detected: %s", step_name(step), because)
    if len(users) > 1 or users and (discovery.leaves_something_behind() or not (needs_model or discovery.calls_model)):
        return chain([discovery.region()], _smaller(whole, frozenset(), device))
    is_region = holds_any if users else fallback
    call = find_region(root, step, batch_size=batch_size, batch_dim=batch_dim, device=device, is_region=is_region)
    call = replace(call, wanted=discovery.wanted_of_call(users[0]) if users else None, ends_because=because)
    return chain([call], _smaller(whole, frozenset({call.path}), device))


def _smaller(whole: WholeStep, transparent: frozenset[str], device: torch.device | None) -> Iterator[StepRegion]:
    for _ in range(_MAX_DEPTH):
        try:
            discovery = _discover(replace(whole, span=replace(whole.span, transparent=transparent)), device)
        except FxPipeError:
            return  # the error of the best region says more
        if not discovery.users:
            return
        if transparent:
            yield discovery.region()
        called = [call.name for call in discovery.calls if call.number in discovery.users and call.is_module]
        deeper = transparent.union(path for path in called if not is_torch_leaf(path, whole.root.get_submodule(path)))
        if deeper == transparent:
            return
        transparent = deeper


def first_regions(root: nn.Module, call: Callable[..., StepCall], **options: Any) -> Iterator[Recordable]:
    """The regions of a step at the start of a run, which may skip its first batches.

    Args:
        root: The LightningModule.
        call: ``call(batch_idx=i)`` is the step with that index.
        **options: For :func:`regions`.

    Raises:
        NoModelCall: The step calls no model for any of the first indices.
    """
    for batch_idx in range(_MAX_SKIPPED):
        with suppress(NoModelCall):
            return regions(root, call(batch_idx=batch_idx), **options)
    return regions(root, call(batch_idx=_MAX_SKIPPED), **options)


def _discover(call: WholeStep, device: torch.device | None) -> _Discovery:
    """The calls of a step; none that uses parameters where it cannot run on fake tensors up to one."""
    learned = Learned()
    while True:
        try:
            return _discover_knowing(call, device, learned)
        except RecordAgain as knowing_more:
            learned.take(knowing_more.lessons)


def _discover_knowing(call: WholeStep, device: torch.device | None, learned: Learned) -> _Discovery:
    root, step = call.root, call.step
    with isolated_rng(), fake_run(root, call, lambda path, _: path != "", device, learned) as run:
        discovery = run.recorder
        assert isinstance(discovery, _Discovery)
        try:
            discovery.know_batch(Template.of(run.example).tensors)
            given = run_step(root, step, run.example, lambda *logged, **more: discovery.note_given((logged, more)))
            discovery.note_given(given)
            discovery.note_use([attribute_tensors(module) for module in root.modules()])
            discovery.caches = _caches(root, step, run.example, discovery)
            own = [(key[0], value) for key, value in run.guards.items() if isinstance(key, tuple)]
            discovery.is_fixed &= not any(path is None or isinstance(value, bool) for path, value in own)
        except HiddenTensor as error:
            if discovery.users:
                raise error.refusal(step_name(step)) from error
            discovery.note_end(error, error.source)
        except (ParameterMisuse, InputGradient, OwnGradient):
            raise
        except (Exception, MustStayWhole, RecordError) as error:
            if isinstance(cause := error.__cause__ or error, NoRegion):
                raise cause from None
            _logger.debug("%s does not complete on tensors without data", step_name(step), exc_info=error)
            discovery.note_end(error, raising_source(error))
        if discovery.misuse is not None:
            raise discovery.misuse
        check_values_read(root, discovery.attributes_read, discovery.left_values, step_name(step))
        discovery.check_shared_state()
        check_same_parameters(root, discovery.parameters)
    return discovery


def _caches(root: nn.Module, step: StepCall, example: Any, discovery: _Discovery) -> set[tuple[str, str]]:
    """Selects the tensors left on modules, by path and attribute, that a second run of the step does not set again."""
    if not (left := {(path, attribute) for call in discovery.calls for path, attribute, _ in call.sides}):
        return left
    before, first = {path: OwnAttributes(module) for path, module in root.named_modules()}, Snapshot({"self": root})
    discovery.called.clear()
    discovery.is_second_run = True
    try:
        with discovery.pause():
            run_step(root, step, example, say_nothing)
        unset = {side for side in left if side[0] in discovery.called}
        return unset - {(path, name) for path, own in before.items() for name in own.assigned_tensors()}
    except (Exception, RecordError):
        _logger.debug("%s does not run twice on tensors without data", step_name(step), exc_info=True)
        return set()
    finally:
        first.restore()


class _Discovery(SpanRecorder):
    """Records a whole step, all modules whole, to learn which calls use parameters and what is used after them.

    Code after the region may look at values (``loss.item()``), of which there are none: it is shown ones, and no call after
    such a look is counted to the region, because whether it is made may depend on the value. A branch on values that follow
    from the batch takes the batch's path, and the calls after it are counted.
    """

    def __init__(self, settings: RecorderSettings, whole: WholeStep) -> None:
        super().__init__(settings, whole.span, whole.step.function)
        self.users: list[int] = []
        self.calls_model = False
        self.misuse: ParameterMisuse | None = None
        self.answers: dict[int, Any] = {}  # to looks at values, by the number of the call
        # Whether the step uses the same for every batch, as far as its code tells.
        self.is_fixed = not may_differ_between_batches(whole.root, whole.step.function)
        self._reachable: set[TensorKey] = set()  # what the step could use after the last of the users
        self._is_user_last = False
        self._uses: list[tuple[float, TensorKey]] = []  # (number of a call, what it uses)
        self._whole = whole
        self._root = root = whole.root
        self._parameters = {fqn for fqn, _ in root.named_parameters(remove_duplicate=False)}
        self._first_look: str | None = None  # after the last of the users
        self._why_it_ends = _LOOKS
        self._must_end = False  # at a look, of which no later call is counted
        self._made_before: frozenset[fx.Node] = frozenset()  # the first of the users
        self.has_branches = False  # on such values, among the region's calls
        self._end: str | None = None  # why the step has not come to its end, if it has not
        self._has_failed = False  # with an error of its own, which is not for want of values
        self.caches: set[tuple[str, str]] = set()  # of the tensors left on modules those that are set once and for all
        self.called: set[str | None] = set()  # modules
        self.is_second_run = False  # where a module that looks at values may do anything, and ends the run
        self._num_running = 0  # modules inside each other, the step's own one among them where it is called
        self.parameters = parameters_by_name(root)  # as modules have left them

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._is_nested:
            with self._noted_misuse():
                check_call(self._root, func, args, kwargs)
            if func in DIFFERENTIATING and self.users:
                # The inputs are the second argument of `grad`; to `backward` they come by name.
                self._check_gradient(*args[: 1 + (func is torch.autograd.grad)], **(kwargs or {}))
        if self.is_second_run and func in LOOKS and isinstance(args[0], FakeTensor) and not self._num_running:
            return look_unrecorded(func, args[0])
        if not self._is_nested and func in LOOKS and isinstance(args[0], FakeTensor) and self.users:
            if self._note_branch(func, args[0]):
                return super().__torch_function__(func, types, args, kwargs)
            self._note_look()
            self.before_call()
            self.note_use(args[0])
            self._count += 1
            with self.pause():
                return look_unrecorded(func, args[0], self._example(args[0]))
        number = self._count
        result = super().__torch_function__(func, types, args, kwargs)
        if not self._is_nested and func in LOOKS and not isinstance(result, SYMBOLIC_TYPES):
            self.answers[number] = result
        return result

    def call_module(self, original_call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Notes which modules are called."""
        self.called.add(self._module_paths.get(id(module)))
        self._num_running += 1
        try:
            return super().call_module(original_call, module, args, kwargs)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self.parameters = with_todays_memory(self._root, self.parameters)

    def check_shared_state(self) -> None:
        """Refuses a step that depends on what its modules leave. Raises :class:`RecordAgain` where more must be known."""
        step, lessons = self._whole.step, len(self.lessons)
        with self.pause():
            self.shared_state.check(self.attributes_read, [""], step.function, step_name(step))
        if self.lessons[lessons:]:
            raise RecordAgain(self.lessons[lessons:])

    def _note_look(self, why: str = _LOOKS) -> None:
        if self._first_look is None:
            self._first_look, self._why_it_ends = user_source() or "some code", why
        self._must_end = True

    def _note_branch(self, func: Callable[..., Any], tensor: Tensor) -> bool:
        """True for a branch on values that follow from the batch, by calls of the region only."""
        if not self.looks.may_branch(func) or not self._whole.may_branch or not self._follows_from_inputs(tensor):
            return False
        with self.pause():
            is_known = self._example(tensor) is not None and self._made_before.isdisjoint(cone(self._nodes[id(tensor)]))
        if is_known:
            self._first_look = self._first_look or user_source() or "some code"
        return is_known

    def note_end(self, error: BaseException, source: str | None) -> None:
        """The step has not come to its end."""
        reason = error.reason if isinstance(error, (RecordError, MustStayWhole)) else error_words(error)
        self._has_failed = reason.startswith(f"{type(error).__name__}:")
        self._end = f"{source or 'some code'} cannot run on tensors without data ({reason})"

    def ends_because(self) -> str:
        """Why no later calls are known that use parameters; empty where all of the step's calls are."""
        if self._first_look is None:
            return self._end or ""
        look = f"{self._first_look} {self._why_it_ends}"
        return f"{look}; {self._end}" if self._has_failed else look

    def _check_gradient(self, outputs: Any, inputs: Any = None, **options: Any) -> None:
        """Raises :class:`InputGradient` where a step differentiates the model by what it is called with, :class:`OwnGradient`
        where it goes through calls that use parameters for other gradients.
        """
        tensors, ends = Template.of(outputs).tensors, Template.of(inputs).tensors
        made = {tensor.grad_fn for key, tensor in self.tensors.items() if key.call in self.users} - {None}
        keys = [self.key_of(tensor) for tensor in ends if not isinstance(tensor, nn.Parameter)]
        is_by_inputs = any(key is not None and key.call < self.users[0] for key in keys)
        if any(function in made for function in functions_before(tensors, up_to=() if is_by_inputs else ends)):
            raise input_gradient() if is_by_inputs else own_gradient()

    @contextmanager
    def _noted_misuse(self) -> Iterator[None]:
        """Notes what the block raises: a step may catch it."""
        try:
            with self.pause():
                yield
        except ParameterMisuse as error:
            self.misuse = self.misuse or error
            raise

    def record(self, record: Callable[[], Any], execute: Callable[[], Any]) -> Any:
        """Calls that a graph cannot hold are made all the same: around the region they may stand."""
        try:
            return record()
        except HiddenTensor:
            raise
        except RecordError as error:
            if self.users:
                self._note_look(f"ends the pipelined region ({error.reason})")
            with self.pause():
                result = execute()
            for tensor in Template.of(result).tensors:
                self.add_input(f"{INPUT_PREFIX}made_{self._count}", tensor)
            return result

    def has_begun(self, number: int) -> bool:
        return bool(self.users)

    def after_call(self, number: int, nodes: Sequence[fx.Node]) -> None:
        call = self.calls[-1]
        user = math.inf if call.is_aside else number  # one that is left out of the region needs them from it
        self._uses += [(user, leaf) for leaf in call.arguments if isinstance(leaf, TensorKey)]
        for node in nodes:
            if node.op != "call_module":
                with self._noted_misuse():
                    check_changes(self._root, node.meta.get("mutated_storages", ()))
        if not self._must_end and any(self._uses_parameters(node) for node in nodes):
            if not self.users:
                made = (node for node in self.graph.nodes if node.op != "placeholder")
                self._made_before = frozenset(made).difference(nodes)
            self.has_branches |= self._first_look is not None
            self._first_look = None
            self.users.append(number)
            self._is_user_last, self._reachable = True, set()
            self.calls_model |= any(node.op == "call_module" for node in nodes)

    def _uses_parameters(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return holds_any(self._root.get_submodule(str(node.target)))
        return node.op == "get_attr" and str(node.target) in self._parameters

    def uses_all_parameters(self) -> bool:
        """True if the region's calls use each parameter that trains."""
        calls = [call for call in self.calls if call.number in self.users]
        modules = {id(p) for call in calls if call.is_module for p in self._root.get_submodule(call.name).parameters()}
        names = {leaf.name for call in calls for leaf in call.arguments if isinstance(leaf, TensorKey) and leaf.is_held}
        unused = (fqn for fqn, p in self._root.named_parameters() if p.requires_grad and id(p) not in modules)
        return names.issuperset(unused)

    def note_use(self, value: Any) -> None:
        """The tensors in ``value`` are used by code that needs their values, wherever it stands."""
        keys = [self.key_of(tensor) for tensor in Template.of(value).tensors]
        self._uses += [(math.inf, key) for key in keys if key is not None]

    def note_given(self, value: Any) -> None:
        """The step returns or logs ``value``. Raises :class:`HiddenTensor`."""
        for tensor in Template.of(value).tensors:
            self._check_not_hidden(tensor)
        self.note_use(value)
        with self.pause():
            self.shared_state.note_given(value)

    def describe(self, leaf: Any) -> Any:
        """An argument of a call of the step; see :class:`SpanRecorder`. Raises :class:`HiddenTensor`."""
        if isinstance(leaf, FakeTensor):
            self._check_not_hidden(leaf)
        return super().describe(leaf)

    def _check_not_hidden(self, tensor: Tensor) -> None:
        """Raises :class:`HiddenTensor` for what comes from inside of a call and is no result of it, as what a hook has kept."""
        if self.key_of(tensor) is None and (id(tensor) in self._nodes or self.state_reads.is_made_inside(tensor)):
            raise HiddenTensor("it uses a tensor that was computed inside a call and not returned by it")

    def leaves_something_behind(self) -> bool:
        """Returns True if a call that uses parameters leaves more than its result, and than what is set once and for all."""
        left = {(path, attribute) for call in self.calls if call.number in self.users for path, attribute, _ in call.sides}
        return not left <= self.caches

    def before_call(self) -> None:
        """After the last call that uses parameters, and before the next: the results have got their names."""
        if self._is_user_last:
            self._is_user_last = False
            with self.pause():
                values = [*locals_up_to(run_step.__code__), *map(attribute_tensors, self._root.modules())]
                self._reachable = {key for value in values for key in self._keys_in(value)}

    def _keys_in(self, value: Any) -> list[TensorKey]:
        if isinstance(value, nn.Module) or not isinstance(value, (Tensor, *_CONTAINERS)) and not hasattr(value, "__dict__"):
            return []
        try:
            tensors = Template.of(value).tensors
        except Exception:  # an object that cannot be taken apart
            _logger.debug("Tensors in a %s are not searched for", type(value).__name__, exc_info=True)
            return []
        return [key for key in map(self.key_of, tensors) if key is not None]

    def _used_after(self, number: int) -> set[TensorKey] | None:
        """Returns the tensors that code after a call uses, or could use for another batch; None if the step did not go on."""
        used = {key for other, key in self._uses if other > number}
        if self._end is not None:
            return None
        if self.is_fixed and self._first_look is None:
            return used
        return None if self._is_user_last else used | self._reachable

    def wanted_of_call(self, number: int) -> tuple[bool, ...] | None:
        """For each result of a call whether later code uses it; None where that is not known, or it uses none."""
        (call,) = (call for call in self.calls if call.number == number)
        if (used := self._used_after(number)) is None:
            return None
        wanted = tuple(key in used or key.call != number for key in call.keys)
        return wanted if any(wanted) else None

    def region(self) -> StepRegion:
        """From the first to the last call that uses parameters."""
        first, last, whole = self.users[0], self.users[-1], self._whole
        span = replace(whole.span, first=first, last=last, wanted=self.used_after(first, last), answers=self.answers)
        return StepRegion(
            step=whole.step,
            span=span,
            batch_size=whole.batch_size,
            batch_dim=whole.batch_dim,
            ends_because=self.ends_because(),
        )

    def used_after(self, first: int, last: int) -> tuple[TensorKey, ...]:
        """The tensors made within the span that later code uses; all of them where that is not known."""
        calls = [call for call in self.calls if first <= call.number <= last and not call.is_aside]
        sides = {call.number: [side for side in call.sides if side[:2] not in self.caches] for call in calls}
        made = [key for call in calls for key in (*call.keys, *(key for *_, key in sides[call.number])) if key.call >= first]
        if (used := self._used_after(last)) is None:
            return tuple(dict.fromkeys(made))
        # No other code would set them; and for others that are not wanted a tensor of the same size stands.
        used |= {key for call in calls for path, _, key in sides[call.number] if path == call.name}
        used |= {key for key in made if key in self.tensors and not has_known_size(self.tensors[key])}
        return tuple(dict.fromkeys(key for key in made if key in used))


@dataclass(frozen=True, kw_only=True)
class WholeStep(StepRegion):
    """A step that is looked at from its first call to its end.

    Attributes:
        root: The LightningModule.
        may_branch: Whether calls after a branch on values of the batch are counted to the region.
    """

    root: nn.Module
    span: Span = Span(first=0, last=-1, wanted=())
    may_branch: bool = True

    def make_recorder(self, settings: RecorderSettings) -> _Discovery:
        """A recorder for it."""
        return _Discovery(settings, self)
