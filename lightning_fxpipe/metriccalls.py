"""A step's torchmetrics: called by each microbatch, they count once for the batch.

A metric need not be a sum over samples: it may count its updates, keep the largest batch loss, compare batches. So what the
step of a microbatch asks of it (``self.f1(preds, y)``, ``update``, ``compute``, ``reset``) is noted; the step gets the value of
the microbatch, and the metric keeps its state. After the last microbatch the metric is called as often as on one device, with
the arguments of all microbatches joined (:mod:`lightning_fxpipe.joining`), and its results take the place of the microbatches'
in what the step has logged, returned and kept (:mod:`lightning_fxpipe.batchvalues`).

Only what runs on the last stage counts: it runs the whole step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

from lightning_fxpipe._compat import FakeTensor, has_function_mode, patched_attributes, tree_leaves, tree_map, unwatched_torch
from lightning_fxpipe._compat_lightning import set_forward_cache
from lightning_fxpipe.batchvalues import BatchValue, Source, unmarked
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.frames import user_source
from lightning_fxpipe.joining import Arguments, BatchLoss, joined
from lightning_fxpipe.rng import isolated_rng

METRICS = (Metric, MetricCollection, MetricTracker)

_METHODS = ("forward", "update", "compute", "reset", "increment")
_MAX_DEPTH = 4


def held_metrics(root: nn.Module) -> dict[str, nn.Module]:
    """The metrics of a LightningModule, by where they are: its submodules, its lists and dicts, and those of its callbacks."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for path, module in root.named_modules():
        if isinstance(module, METRICS):
            found.setdefault(id(module), (path, module))
    trainer: Any = vars(root).get("_trainer")
    owners = [("", root), *((f"callbacks[{i}].", each) for i, each in enumerate(getattr(trainer, "callbacks", ())))]
    for prefix, owner in owners:
        for name, value in vars(owner).items():
            for path, metric in _inside(value, f"{prefix}{name}", _MAX_DEPTH):
                for below, module in metric.named_modules(prefix=path):
                    if isinstance(module, METRICS):
                        found.setdefault(id(module), (below, module))
    return dict(found.values())


def _inside(value: Any, path: str, depth: int) -> Iterator[tuple[str, nn.Module]]:
    """The metrics in a plain attribute."""
    if isinstance(value, METRICS):
        yield path, value
    elif depth and isinstance(value, (list, tuple, dict)) and not path.startswith("_"):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _inside(entry, f"{path}[{key!r}]", depth - 1)


@contextmanager
def no_metrics_inside(root: nn.Module) -> Iterator[None]:
    """Raises :class:`UnsupportedError` where the block, which runs what is cut into stages, calls a metric."""
    called: list[UnsupportedError] = []

    def noting(name: str, metric: nn.Module, method: str) -> Callable[..., Any]:
        original = getattr(metric, method)

        def note(*args: Any, **kwargs: Any) -> Any:
            called.append(_inside_the_model(name, metric, method, user_source()))
            return original(*args, **kwargs)

        note.original = original  # type: ignore[attr-defined]  # a step that runs in the block looks after its own calls
        return note

    held = held_metrics(root).items()
    patches = [(metric, method, noting(name, metric, method)) for name, metric in held for method in ("forward", "update")]
    try:
        with patched_attributes(*patches):
            yield
    except BaseException:
        if not called:
            raise
    if called:
        raise called[0]


def _inside_the_model(name: str, metric: nn.Module, method: str, source: str | None) -> UnsupportedError:
    return UnsupportedError(
        f"The metric {name} is called between the first and the last call of the model.",
        where=source,
        observed=f"{type(metric).__name__}.{method} in a part of the step that is cut into stages",
        expected="metrics that are called by the step before the model or after it",
        todo="Return the values from the model, and call the metric after the model's last call.",
    )


def as_one_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes a call so that who watches torch's functions sees one, and nothing of what happens inside."""
    if not has_function_mode():
        return function(*args, **kwargs)
    return handle_torch_function(function, tree_leaves((args, kwargs)), *args, **kwargs)


@dataclass(kw_only=True)
class _Call:
    """One call of a metric that the step makes, over the microbatches."""

    metric: nn.Module
    function: Callable[..., Any]
    method: str
    arguments: list[Arguments] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    results: list[Any] | None = None

    def result(self, position: int) -> Tensor:
        """A tensor in what the call gave for the batch."""
        assert self.results is not None, "asked for before the batch has ended"
        value: Tensor = self.results[position]
        return value


class MetricCalls:
    """Notes what a batch's microbatches ask of metrics.

    Args:
        metrics: The metrics, by name.

    Attributes:
        metrics: The metrics.
        names: Their names, by id.
        taken: Python numbers that the microbatch has taken out of what metrics gave.
    """

    def __init__(self, metrics: Mapping[str, nn.Module]) -> None:
        self.names = {id(metric): name for name, metric in metrics.items()}
        self.taken: dict[float, Source] = {}
        self.metrics = metrics
        self._calls: dict[tuple[int, str, int], _Call] = {}
        self._repeats: dict[tuple[int, str], int] = {}
        self._size = 0
        self._is_open = False  # whether calls go through to the metrics
        self._is_in_stage = False

    def begin_microbatch(self, size: int) -> None:
        """Later calls belong to a microbatch of ``size`` samples; of zero: to a trace, and count for nothing."""
        self._size = size
        self._repeats = {}
        self.taken.clear()

    @contextmanager
    def in_stage(self) -> Iterator[None]:
        """During the block a stage runs, in which no metric may be."""
        self._is_in_stage = True
        try:
            yield
        finally:
            self._is_in_stage = False

    @contextmanager
    def capture(self) -> Iterator[None]:
        """During the block the metrics note their calls."""
        patches = [
            (metric, method, self._noting(metric, method))
            for metric in self.metrics.values()
            for method in _METHODS
            if hasattr(metric, method)
        ]
        with patched_attributes(*patches):
            yield

    def _noting(self, metric: nn.Module, method: str) -> Callable[..., Any]:
        current = getattr(metric, method)
        original = getattr(current, "original", current)  # a batch may be noted while another is

        def called(*args: Any, **kwargs: Any) -> Any:
            return self._note(metric, method, original, args, kwargs)

        def note(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if self._is_open else as_one_call(called, *unmarked((args, kwargs)))

        called.__name__ = f"{type(metric).__name__}_{method}"

        note.original = original  # type: ignore[attr-defined]
        return note

    @contextmanager
    def _open(self) -> Iterator[None]:
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def _note(
        self, metric: nn.Module, method: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._size:
            return self._traced(metric, method, function, args, kwargs)
        if self._is_in_stage or any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            raise _inside_the_model(self.names[id(metric)], metric, method, user_source())
        repeat = self._repeats.get((id(metric), method), 0)
        self._repeats[id(metric), method] = repeat + 1
        call = self._calls.setdefault((id(metric), method, repeat), _Call(metric=metric, function=function, method=method))
        call.arguments.append(tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (args, kwargs)))
        call.sizes.append(self._size)
        if method not in ("forward", "compute"):
            return None
        with self._open(), isolated_rng(), _state_kept(self.metrics.values() if method == "compute" else [metric]):
            if method == "compute":
                self._run_so_far(call)
            else:
                _forget_lists(metric)
            return self._marked(function(*args, **kwargs), call)

    def _traced(
        self, metric: nn.Module, method: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a call gives on tensors without data, or something like it where it must know the data."""
        with self._open(), isolated_rng(), _state_kept([metric]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing has been counted yet
            try:
                return function(*args, **kwargs)
            except Exception:
                return torch.zeros(()) if method in ("forward", "compute") else None

    def _run_so_far(self, until: _Call) -> None:
        """Makes the calls of the batch up to one, as if the batch ended with this microbatch."""
        for call in self._calls.values():
            if call is until:
                return
            _run(call, BatchLoss())

    def _marked(self, value: Any, call: _Call) -> Any:
        positions = iter(range(len(tree_leaves(value))))

        def mark(leaf: Any) -> Any:
            position = next(positions)
            return BatchValue.of(leaf, lambda: call.result(position), self.taken) if isinstance(leaf, Tensor) else leaf

        return tree_map(mark, value)

    def run(self, loss: BatchLoss) -> None:
        """Makes the calls for the batch. Called on the last stage when all microbatches have run.

        Args:
            loss: The losses of the microbatches.
        """
        for call in self._calls.values():
            call.results = tree_leaves(_run(call, loss))


def _run(call: _Call, loss: BatchLoss) -> Any:
    """Makes a call of the batch: once, or once for each microbatch where its arguments cannot be joined."""
    whole = BatchLoss() if len(call.sizes) != len(loss.values) else loss
    calls = joined(call.arguments, call.sizes, whole)
    with torch.no_grad():
        if len(calls) == 1 or call.method != "forward":
            return [call.function(*args, **kwargs) for args, kwargs in calls][-1]
        metric: Any = call.metric[-1] if isinstance(call.metric, MetricTracker) else call.metric
        with _state_kept([metric]):
            metric.reset()
            for args, kwargs in calls:
                metric.update(*args, **kwargs)
            value = metric.compute()
            values = [member.compute() for member in _members(metric)]
        for args, kwargs in calls:
            metric.update(*args, **kwargs)
        for member, result in zip(_members(metric), values, strict=True):
            set_forward_cache(member, result)
        return value


def _members(metric: nn.Module) -> list[Metric]:
    return [metric] if isinstance(metric, Metric) else [m for m in metric.children() if isinstance(m, Metric)]


@contextmanager
def _state_kept(metrics: Iterable[nn.Module]) -> Iterator[None]:
    """After the block the metrics are what they were."""
    modules = {id(module): module for metric in metrics for module in metric.modules()}
    before = [(module, dict(vars(module))) for module in modules.values()]
    with unwatched_torch():
        for module, attributes in before:
            for name, value in attributes.items():
                # What changes in place is changed in a copy.
                if isinstance(value, Tensor):
                    vars(module)[name] = value.clone()
                elif isinstance(value, (list, dict, set)):
                    vars(module)[name] = value.copy()
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def _forget_lists(metric: nn.Module) -> None:
    """Empties the lists in a metric's state: torchmetrics would copy all that is in them for each microbatch."""
    for module in metric.modules():
        if isinstance(module, Metric):
            for name, value in module.metric_state.items():
                if isinstance(value, list):
                    vars(module)[name] = []
