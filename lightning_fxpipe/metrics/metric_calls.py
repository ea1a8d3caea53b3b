"""A step's torchmetrics: where a module holds them, and what their calls are to those who watch the step.

A call of a metric is one call of the step, whatever it does inside. In a dry run it counts nothing.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

from lightning_fxpipe._compat.modes import has_function_mode, unwatched_torch
from lightning_fxpipe._compat.torch import patched_attributes, tree_leaves
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.rng import isolated_rng
from lightning_fxpipe.user_code.frames import user_source
from lightning_fxpipe.user_code.members import Members

_logger = logging.getLogger("lightning_fxpipe")

METRICS = (Metric, MetricCollection, MetricTracker)

_METHODS = ("forward", "update", "compute", "reset", "increment")
_MAX_DEPTH = 4


def held_metrics(root: nn.Module, members: Members | None = None) -> dict[str, nn.Module]:
    """The metrics of a LightningModule, by where they are: its submodules, its lists and dicts, and those of its callbacks.

    Args:
        root: The LightningModule.
        members: Its members, where they have been listed.
    """
    submodules = (members or Members(root)).of_type(METRICS)
    found = {id(module): (name, module) for name, module in submodules.items()}
    trainer: Any = vars(root).get("_trainer")
    owners = [("", root), *((f"callbacks[{i}].", each) for i, each in enumerate(getattr(trainer, "callbacks", ())))]
    holders: list[tuple[str, nn.Module]] = []
    for prefix, owner in owners:
        for name, value in vars(owner).items():
            holders += _inside(value, f"{prefix}{name}", _MAX_DEPTH)
    for path, holder in holders:
        for below, module in holder.named_modules(prefix=path):
            if isinstance(module, METRICS):
                found.setdefault(id(module), (below, module))
    return dict(found.values())


def _inside(value: Any, path: str, depth: int) -> Iterator[tuple[str, nn.Module]]:
    """The metrics in a plain attribute."""
    if isinstance(value, nn.Module):  # asked first: the metrics' own classes take ten times as long to say no
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
            called.append(_inside_the_model(name, metric, method))
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


def _inside_the_model(name: str, metric: nn.Module, method: str) -> UnsupportedError:
    return UnsupportedError(
        f"The metric {name} is called between the first and the last call of the model.",
        where=user_source(),
        observed=f"{type(metric).__name__}.{method} in a part of the step that is split into stages",
        expected="metrics called in the step before or after the model",
        todo="Return the values from the model, and call the metric after the model's last call.",
    )


def as_one_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes a call so that who watches torch's functions sees one, and nothing of what happens inside."""
    if not has_function_mode():
        return function(*args, **kwargs)
    return handle_torch_function(function, tree_leaves((args, kwargs)), *args, **kwargs)


@contextmanager
def metrics_as_one_call(metrics: Iterable[nn.Module], *, count: bool) -> Iterator[None]:
    """In the block each call of a metric is one call for who watches torch's functions.

    Args:
        metrics: The metrics.
        count: Whether the calls count; in a dry run they give something like what they would give.
    """
    is_inside = False

    def around(metric: nn.Module, method: str) -> Callable[..., Any]:
        current = getattr(metric, method)
        original = getattr(current, "original", current)  # a dry run may be made inside another run

        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            is_inside = True
            try:
                return original(*args, **kwargs) if count else _call_uncounted(metric, method, original, args, kwargs)
            finally:
                is_inside = False

        def call(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if is_inside else as_one_call(called, args, kwargs)

        called.__name__ = f"{type(metric).__name__}_{method}"
        call.original = original  # type: ignore[attr-defined]
        return call

    patches = [(metric, method, around(metric, method)) for metric in metrics for method in _METHODS if hasattr(metric, method)]
    with patched_attributes(*patches):
        yield


def _call_uncounted(
    metric: nn.Module, method: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Returns the result of a call on tensors without data, or something like it if the call needs data."""
    with isolated_rng(), _state_kept(metric), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing has been counted yet
        try:
            return function(*args, **kwargs)
        except Exception:
            _logger.debug("%s.%s does not run on tensors without data", type(metric).__name__, method, exc_info=True)
            return torch.zeros(()) if method in ("forward", "compute") else None


@contextmanager
def _state_kept(metric: nn.Module) -> Iterator[None]:
    """After the block the metric is what it was."""
    before = [(module, dict(vars(module))) for module in metric.modules()]
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
