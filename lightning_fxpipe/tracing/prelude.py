"""Dependencies of the arguments that the model is called with.

Shapes and constants of the model's arguments usually follow from those of the batch, so that a trace found for one batch
serves all batches like it. The *prelude*, the step's code before the model's call, may bring in more: an attribute that a
callback changes (``x[:, : self.length]``), a number that Python draws (a crop), a value of the batch (``lengths.max()``).
Such attributes are noted in a dry run of the prelude, and looked up before each batch. For the rest there is only one way:
a dry run for every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_fxpipe._compat.lightning import own_replaced, silenced_loggers
from lightning_fxpipe._compat.modes import function_mode_removed, unwatched_torch
from lightning_fxpipe._compat.torch import patched_attributes, tree_leaves, tree_map, version_of
from lightning_fxpipe.metrics.metric_calls import held_metrics, metrics_as_one_call
from lightning_fxpipe.pytree.structure import NotFillable, Template
from lightning_fxpipe.rng import python_rng
from lightning_fxpipe.tracing.code_guards import code_guards
from lightning_fxpipe.tracing.guards import GuardKey, noted_guards
from lightning_fxpipe.tracing.torch_calls import LOOKS
from lightning_fxpipe.user_code.objects import is_value, keep_attributes, lasting_objects
from lightning_fxpipe.user_code.placement import Placement
from lightning_fxpipe.user_code.silence import silencing
from lightning_fxpipe.user_code.snapshot import Snapshot
from lightning_fxpipe.user_code.step_code import reads_run_state, uses_arguments_after_batch
from lightning_fxpipe.user_code.undo import Undone, undo_after


@dataclass(frozen=True, kw_only=True)
class PreludeFacts:
    """Dependencies of the model's arguments, besides the batch's shapes and constants.

    Attributes:
        guards: Plain values that modules and the Trainer have.
        is_fixed: Whether on these only.
        needs_values: Whether on values of tensors, or whether the prelude leaves tensors for the model's code.
    """

    guards: tuple[GuardKey, ...]
    is_fixed: bool
    needs_values: bool


@dataclass
class DryRun:
    """A run of a step of which the user knows nothing, and which leaves nothing behind.

    Attributes:
        args, kwargs: Copies of the step's arguments, which it may change.
        state: What the step can change, as it was before.
        has_changed_any: Whether it has changed anything, when it is over.
        has_spoken: Whether it has printed anything, or used a logger.
        facts: What it has shown of the prelude, when it is over; see :func:`dry_run_of_prelude`.
        is_aside: True during the blocks of :meth:`aside`.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Snapshot
    has_changed_any: bool = False
    has_spoken: bool = False
    facts: PreludeFacts | None = None
    is_aside: bool = False
    watch: TorchFunctionMode | None = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Excludes the block from :attr:`facts`: it is not the step's code."""
        self.is_aside = True
        try:
            with nullcontext() if self.watch is None else function_mode_removed(self.watch):
                yield
        finally:
            self.is_aside = False


@contextmanager
def dry_run(
    root: nn.Module,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Any,
    device: torch.device | None = None,
    *,
    undoing: AbstractContextManager[Undone] | None = None,
    logging: AbstractContextManager[None] | None = None,
) -> Iterator[DryRun]:
    """Around a run of the step ``function``, to its end or to an exception, of which the user is to know nothing.

    What the step changes is put back afterwards, by ``undoing`` or as in ``user_code.undo``; what it logs is dropped, or
    ``logging`` takes it. With ``device`` the module, wherever it is, is as if it were there.
    """
    # On copies, because a step may change its batch in place; one for a tensor that the batch has twice.
    copies: dict[int, Tensor] = {}
    args, kwargs = _copied(root, (args, dict(kwargs)), copies)
    with silencing() as said:
        with undoing or undo_after(root, function) as found:
            run = DryRun(args, kwargs, found.before)

            def note_logger() -> None:
                run.has_spoken = True

            said_before = said.tell()
            with (
                logging or logs_to(say_nothing, root, "log"),  # to which Lightning's log_dict comes
                silenced_loggers(root, note_logger),
                Placement(root, device).pretending() if device is not None else nullcontext(),
            ):
                try:
                    yield run
                finally:
                    run.has_spoken |= said.tell() > said_before
        run.has_changed_any = found.has_changed_any


@contextmanager
def logs_to(log: Callable[..., None], root: nn.Module, *names: str) -> Iterator[None]:
    """In the block, what a module logs by methods of these ``names`` goes to ``log``; its metrics count nothing."""
    muted = own_replaced(root, log, *names)
    with patched_attributes(*muted), metrics_as_one_call(held_metrics(root).values(), count=False):
        yield


@contextmanager
def dry_run_of_prelude(
    root: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, device: torch.device | None = None
) -> Iterator[DryRun]:
    """A dry run that tells, when it is over, what the step's arguments for the model depend on."""
    generators = python_rng()
    buffers = [(buffer, version_of(buffer)) for buffer in root.buffers() if not buffer.is_inference()]
    left_at: TracebackType | None = None
    with (
        dry_run(root, function, args, kwargs, device) as run,
        noted_guards(root, lambda: not run.is_aside) as guards,
        _Looks() as looks,
    ):
        run.watch = looks
        try:
            yield run
        except BaseException as error:
            left_at = error.__traceback__
            raise
        finally:
            has_drawn = python_rng() != generators or run.state.is_drawn_from()
            depends = uses_arguments_after_batch(function, left_at) or reads_run_state(root, function)
            left_at = None  # it has this frame, too, and would keep all of them
            is_fixed = not (looks.happened or has_drawn or depends)
            read = (*guards, *code_guards(root, (), functions=(function,)))
            needs_values = looks.happened or _leaves_tensors(run.state, buffers)
            run.facts = PreludeFacts(guards=read, is_fixed=is_fixed, needs_values=needs_values)


def _leaves_tensors(before: Snapshot, buffers: Iterable[tuple[Tensor, int]]) -> bool:
    """True if code has set tensors, or written to some, since a moment, at which ``buffers`` had these versions."""
    with unwatched_torch():
        if any(version_of(buffer) != version for buffer, version in buffers):
            return True
        found = (*before.differences(), *before.written_tensors())
        return any(isinstance(leaf, Tensor) for each in found for leaf in tree_leaves(each.value))


def _copied(root: nn.Module, value: Any, copies: dict[int, Tensor]) -> Any:
    """A copy of arguments: of the tensors, and of what holds them. This runs for each microbatch; a tree's map takes longer."""
    if type(value) in (tuple, list):
        return type(value)([_copied(root, entry, copies) for entry in value])
    if type(value) is dict:
        return {key: _copied(root, entry, copies) for key, entry in value.items()}
    if isinstance(value, Tensor) or is_value(value):
        return _copy(root, value, copies)
    return tree_map(lambda leaf: _copy(root, leaf, copies), value)


def _copy(root: nn.Module, leaf: Any, copies: dict[int, Tensor]) -> Any:
    """A copy of a tensor, or of an object such as a graph with its tensors, which a step may write to, too."""

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = keep_attributes(tensor.clone(), tensor)
        return copies[id(tensor)]

    if isinstance(leaf, Tensor):
        return copied(leaf)
    if is_value(leaf):
        return leaf
    try:
        template = Template.of(leaf, shared=lasting_objects(root))
    except NotFillable:
        return leaf
    return template.fill([copied(tensor) for tensor in template.tensors])


class _Looks(TorchFunctionMode):
    """Notes whether code looks at the values of a tensor."""

    happened = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.happened |= func in LOOKS or _selects(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


_SELECTING = frozenset(
    getattr(owner, name)
    for name in ("nonzero", "masked_select", "unique", "unique_consecutive", "bincount", "argwhere")
    for owner in (torch, Tensor)
)


def _selects(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True if the shape of a call's result depends on values."""
    if func is Tensor.__getitem__:
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)
    if func in (torch.repeat_interleave, Tensor.repeat_interleave):
        return "output_size" not in kwargs and not any(isinstance(part, int) for part in (*args, kwargs.get("repeats")))
    if func is nn.functional.one_hot:
        return bool((args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) < 0)
    return func in _SELECTING or (func is torch.where and len(args) + len(kwargs) == 1)


def say_nothing(*args: Any, **kwargs: Any) -> None:
    """In place of ``self.log`` where a step runs once more than the user knows of."""
