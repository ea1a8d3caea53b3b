"""Values that a step logs on the last stage, logged on every rank.

Every rank repeats the last stage's calls of ``self.log``. So Lightning's own machinery
(epoch means, progress bar, ``callback_metrics``, checkpoints that monitor a metric, plateau schedulers, early stopping) works
and decides alike everywhere. The price is one broadcast of a few numbers per step. A torchmetrics object is logged as an object
on every rank; its states travel beside (``metrics.metric_states``).
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_fxpipe._compat.lightning import lightning_class, own_replaced
from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe._compat.torch import patched_attributes
from lightning_fxpipe.distributed.commands import MAX_NUMBERS, Command, Commands
from lightning_fxpipe.distributed.values import broadcast_object
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.metrics.metric_calls import metrics_as_one_call
from lightning_fxpipe.pytree.portable import require_picklable
from lightning_fxpipe.pytree.sizes import held_number, plain_numbers
from lightning_fxpipe.user_code.frames import user_source

# Values that travel with the first message, beside whether there is more; more need a second one.
_INLINE_VALUES = MAX_NUMBERS - 2
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """One call of ``self.log`` for a whole batch.

    Attributes:
        name: The logged name.
        value: The batch's value; of a metric that was logged itself, zero.
        options: The call's other arguments, without those about synchronisation over ranks.
        num_samples: The weight in epoch means, where the step has named one with ``batch_size``; None leaves it to Lightning,
            which takes the batch's.
        metric: Where a torchmetrics object was logged, the metric's name.
        is_double: Whether the value was a float64 tensor, or Lightning makes one of it.
        sums_double: Whether that is the default type in the step, with which Lightning adds values up.
    """

    name: str
    value: float
    options: tuple[tuple[str, Any], ...]
    num_samples: int | None
    metric: str | None = None
    is_double: bool = False
    sums_double: bool = False


class StepLog:
    """Collects the calls of ``self.log`` made during one step.

    Args:
        metrics: The module's metrics, by name.

    Attributes:
        values: What the calls have logged, to be read together with other numbers (``pytree.sizes.plain_numbers``).
    """

    def __init__(self, metrics: Mapping[str, nn.Module]) -> None:
        self.values: list[float | Tensor] = []
        self._calls: list[LogEntry] = []
        self._metrics = metrics
        self._names = {id(metric): name for name, metric in metrics.items()}
        self._collects: StepLog = self

    @property
    def entries(self) -> list[LogEntry]:
        """The calls, in order."""
        return self.entries_with(*plain_numbers(self.values))

    def entries_with(self, numbers: Sequence[float]) -> list[LogEntry]:
        """The calls, in order, where what they have logged has been read."""
        return [replace(call, value=number) for call, number in zip(self._calls, numbers, strict=True)]

    @contextmanager
    def capture(self, module: nn.Module) -> Iterator[None]:
        """During the block ``module.log`` collects instead of logging, and ``log_dict`` calls it.

        What a module overrides ``log`` with runs, and collects where it calls Lightning's.
        """
        owner = lightning_class(module)
        # Of Lightning's own method: what a dry run has put in its place holds the module, and with it the Trainer.
        signature = _signature_of(inspect.unwrap(owner.log)) if owner is not None else inspect.Signature()
        options = signature.parameters.keys() - {"self", "name", "value"}

        def log(*args: Any, **kwargs: Any) -> None:
            if len(args) == 2 and kwargs.keys() <= options:  # as nearly all calls are: to bind them takes a while
                name, value = args
            else:
                kwargs = signature.bind(module, *args, **kwargs).arguments
                kwargs.pop("self")
                name, value = kwargs.pop("name"), kwargs.pop("value")
            with unwatched_torch():  # what we do with the value is no part of the step
                self._collects._add(name, value, kwargs)

        with patched_attributes(*own_replaced(module, log, "log")), metrics_as_one_call(self._metrics.values(), count=True):
            yield

    def redirected(self, to: StepLog) -> AbstractContextManager[None]:
        """During the block, within :meth:`capture`, another log collects."""
        return patched_attributes((self, "_collects", to))

    def like(self) -> StepLog:
        """An empty one with the same metrics."""
        return StepLog(self._metrics)

    def _add(self, name: str, value: Any, options: dict[str, Any]) -> None:
        # Every rank of a pipeline logs the same values; `sync_dist` is about other replicas.
        for about_ranks in ("sync_dist_group", "enable_graph"):
            options.pop(about_ranks, None)
        explicit = options.pop("batch_size", None)
        for option, given in options.items():  # which the other ranks must be told of
            if not isinstance(given, _PLAIN):
                require_picklable(given, partial(_unsendable_option, name, option, given))
        metric = self._name_of_metric(name, value) if isinstance(value, Metric) else None
        self.values.append(0.0 if metric is not None else _check_number(name, value))
        default = torch.get_default_dtype()
        # Lightning makes its default type of all but these two.
        is_kept = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64)
        self._calls.append(
            LogEntry(
                name=name,
                value=0.0,
                options=tuple(options.items()),
                num_samples=None if explicit is None else int(explicit),
                metric=metric,
                is_double=(value.dtype if is_kept else default) == torch.float64,
                sums_double=default == torch.float64,
            )
        )

    def _name_of_metric(self, name: str, metric: Metric) -> str:
        found = self._names.get(id(metric))
        if found is None:
            raise UnsupportedError(
                f"self.log({name!r}, ...) received a metric that the other ranks cannot identify.",
                observed=f"a {type(metric).__name__} that is not an attribute of the LightningModule",
                expected="a metric that is an attribute of the LightningModule, or an entry of a list or dict attribute",
                todo="Set the metric as an attribute of the LightningModule in its __init__.",
            )
        return found


def _unsendable_option(name: str, option: str, value: Any, observed: str) -> UnsupportedError:
    return UnsupportedError(
        f"self.log({name!r}, ...) received an option that cannot be sent to the other ranks.",
        where=user_source(),
        observed=f"{option}={value!r}, {observed}",
        expected="options that are plain values or module-level functions",
        todo="Pass the option as a string such as 'mean', or as a function defined at module level.",
    )


def _check_number(name: str, value: Any) -> float | Tensor:
    """The number that is logged, to be read later."""
    if not isinstance(value, (Tensor, numbers.Real)) or (isinstance(value, Tensor) and value.numel() != 1):
        raise UnsupportedError(
            f"self.log({name!r}, ...) received a value that is not a number.",
            observed=f"a {type(value).__name__}",
            expected="a number, a tensor with one element, or a torchmetrics Metric",
            todo="Log a number or a metric.",
        )
    if isinstance(value, Tensor) and value.is_meta:
        raise UnsupportedError(
            f"self.log({name!r}, ...) received a value that the last stage cannot compute.",
            observed="a tensor on the meta device, computed from parameters of another stage",
            expected="a value computed from the model's result, the batch and the last stage's parameters",
            todo="Log it in a hook in which each stage has its parameters, such as on_before_optimizer_step.",
        )
    return held_number(value)


@cache
def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


class ResultChannel:
    """Gives every rank of a pipeline the loss and the log entries of the last stage.

    A message is a number of floats: the names and options travel only when they change.

    Args:
        commands: From the last stage to the others.
    """

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._layout: tuple[Any, ...] | None = None

    def share(
        self, loss: float | None, entries: Sequence[LogEntry], news: Any = None
    ) -> tuple[float | None, list[LogEntry], Any]:
        """Returns the last stage's arguments on every rank. Called by every rank of the pipeline.

        Args:
            loss: The batch's loss, if there is one.
            entries: What the step logged.
            news: Anything else that the ranks must know now and then; None costs nothing.
        """
        if self._commands.group is None:
            return loss, list(entries), news
        channel: dict[str, Any] = {"src": self._commands.source, "group": self._commands.group}
        layout = (loss is not None, [replace(entry, value=0.0) for entry in entries])
        values = [*([] if loss is None else [loss]), *(entry.value for entry in entries)]
        is_source = self._commands.is_source
        if is_source:
            has_changed = layout != self._layout or news is not None
            message = [float(has_changed), float(len(values)), *values[:_INLINE_VALUES]]
            self._commands.tell(Command.RESULT, *message)
        else:
            command, message = self._commands.hear()
            assert command is Command.RESULT
        must_describe, count, *received = message
        if must_describe:
            self._layout, news = broadcast_object((layout, news), self._commands.source, self._commands.group)
        if num_missing := int(count) - len(received):
            rest = torch.tensor(values[_INLINE_VALUES:] if is_source else [0.0] * num_missing, dtype=torch.float64)
            dist.broadcast(rest, **channel)
            received += rest.tolist()
        assert self._layout is not None
        has_loss, described = self._layout
        shared_loss = received.pop(0) if has_loss else None
        return shared_loss, [replace(entry, value=value) for entry, value in zip(described, received, strict=True)], news


def replay(module: Any, entries: Sequence[LogEntry], metrics: Mapping[str, nn.Module], device: torch.device) -> None:
    """Logs the entries with Lightning's ``log``: what the module overrides it with has run in the step.

    Args:
        module: The LightningModule.
        entries: What the last stage has logged.
        metrics: This rank's metrics, by name.
        device: This rank's device.
    """
    for entry in entries:
        dtype = torch.float64 if entry.is_double else torch.float32
        value: Any = torch.full((), entry.value, dtype=dtype, device=device)  # unlike torch.tensor(), it waits for no copy
        if entry.metric is not None:
            value = metrics[entry.metric]
        with _default_dtype(torch.float64 if entry.sums_double else torch.float32):
            lightning_class(module).log(module, entry.name, value, batch_size=entry.num_samples, **dict(entry.options))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """In the block torch makes tensors of this type by default, as the precision of the run has it in steps only."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
