"""The states of a module's metrics, on every rank.

Metrics count on the last stage (``metrics.metric_calls``); hooks and Lightning read them on every rank. So after
each batch the other ranks take over what has changed in them. A list state is sent by its new entries only. The ranks of a
pipeline are one replica: what torchmetrics itself would gather from them is P times the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_fxpipe._compat.torch import FakeTensor, patched_attributes, tree_leaves, tree_map, version_of
from lightning_fxpipe.distributed.replica_tensors import check_may_talk
from lightning_fxpipe.distributed.topology import Replicas
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.pytree.portable import on_host, require_picklable
from lightning_fxpipe.user_code.contents import same_mapping
from lightning_fxpipe.user_code.paths import Difference

# What a metric is, not what it has counted.
_NO_STATE = frozenset(vars(nn.Module())) - {"training", "_buffers"} | {"forward", "update", "compute", "reset", "increment"}


class MetricStates:
    """The states of metrics as they are now.

    Args:
        metrics: The metrics, by name.
    """

    def __init__(self, metrics: Mapping[str, nn.Module]) -> None:
        self._metrics = metrics
        self._before = {
            name: {attribute: _Remembered(value) for attribute, value in _state(metric).items()}
            for name, metric in metrics.items()
        }

    def changes(self) -> list[Difference]:
        """Lists the differences of now, each with the names of the metric and the attribute for a path, and tensors on the
        CPU.

        Raises:
            UnsupportedError: A new value cannot be sent to the other ranks.
        """
        found: list[tuple[tuple[str, str], int | None, Any]] = []
        for name, metric in self._metrics.items():
            before = self._before[name]
            for attribute, value in _state(metric).items():
                remembered = before.get(attribute)
                if remembered is not None and remembered.is_same(value):
                    continue
                start = remembered.num_kept(value) if remembered is not None else None
                found.append(((name, attribute), start, value if start is None else value[start:]))
        # Together: metrics of a collection share tensors; so do their copies.
        values = on_host([value for _, _, value in found])
        for ((name, attribute), _, _), value in zip(found, values, strict=True):
            require_picklable(value, partial(_not_sendable, name, attribute))
        return [Difference(path, start, value) for (path, start, _), value in zip(found, values, strict=True)]


def _not_sendable(metric: str, attribute: str, observed: str) -> UnsupportedError:
    return UnsupportedError(
        f"The state of the metric {metric} cannot be shared with the other ranks.",
        observed=f"{attribute} is {observed}",
        expected="tensors and plain values: the step calls its metrics on the last stage only",
        todo="Keep tensors or plain values in the metric's state.",
    )


def take_over_states(metrics: Mapping[str, nn.Module], changes: Iterable[Difference], device: torch.device) -> None:
    """Makes the same changes to this rank's metrics."""
    for change in changes:
        value = tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, change.value)
        metric, attribute = change.path
        attributes = vars(metrics[metric])
        if change.start is None:
            attributes[attribute] = value
        else:
            attributes[attribute][change.start :] = value


@contextmanager
def among_replicas(replicas: Replicas) -> Iterator[None]:
    """During the block metrics gather from other replicas only, if there are any, those too that are made in it."""
    original = Metric.sync

    @functools.wraps(original)
    def sync(
        self: Metric,
        dist_sync_fn: Any = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Any = None,
    ) -> None:
        if not replicas.are_several or any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(_state(self))):
            return  # as torchmetrics' own where nothing is distributed
        if should_sync:  # it does not where a call looks at its own batch, as by default
            check_may_talk()
        group = process_group or self.process_group or replicas.group
        original(self, dist_sync_fn, group, should_sync, distributed_available)

    with patched_attributes((Metric, "sync", sync)):
        yield


def belong_to_replicas(metrics: Iterable[nn.Module], replicas: Replicas) -> None:
    """Metrics gather nothing from ranks of their own pipeline, now and after the run: their states are those of all of it."""
    gather = _GatherFromReplicas(replicas)
    for metric in metrics:
        if isinstance(metric, Metric) and replicas.are_several:
            metric.dist_sync_fn = metric.dist_sync_fn or gather
        elif isinstance(metric, Metric):
            metric.distributed_available_fn = _never


class _GatherFromReplicas:
    """Function by which metrics gather their states. They are copied and pickled, which a process group cannot be.

    Args:
        replicas: The replicas.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def __call__(self, result: Tensor, group: Any = None) -> list[Tensor]:
        """The tensors of all replicas. Called by the ranks with the same stages."""
        return gather_all_tensors(result, self._replicas.group if group is None else group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatherFromReplicas:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _all_tensors, ()  # elsewhere there are other processes


def _all_tensors() -> Any:
    return gather_all_tensors


def _never() -> bool:
    return False


class _Remembered:
    """A value of an attribute at one moment."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._content: Any = value.copy() if isinstance(value, (list, dict, set)) else None
        self._versions = _versions(value)

    def is_same(self, now: Any) -> bool:
        """Returns True if the attribute still has it."""
        if now is not self._value:
            return type(now) is type(self._value) and isinstance(now, (int, float, str)) and bool(now == self._value)
        if isinstance(now, list):
            return len(now) == len(self._versions) and self._begins_so(now)
        if isinstance(now, dict) and not same_mapping(now, self._content):
            return False
        return (not isinstance(now, set) or now == self._content) and _versions(now) == self._versions

    def num_kept(self, now: Any) -> int | None:
        """How many entries a list has had before; None unless it is a list that has only grown."""
        if not isinstance(now, list) or not isinstance(self._content, list) or len(now) < len(self._content):
            return None
        return len(self._content) if self._content and self._begins_so(now) else None

    def _begins_so(self, now: list[Any]) -> bool:
        """Returns True if a list begins with the same entries. torchmetrics copies those of a state with each ``forward``."""
        before = self._content
        if all(a is b for a, b in zip(now, before, strict=False)):
            return _versions(now[: len(before)]) == self._versions
        pairs = list(zip(now, before, strict=False))
        if not all(isinstance(a, Tensor) and isinstance(b, Tensor) for a, b in pairs):
            return False
        if any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in pairs):
            return False
        # Comparing the ends tells a list that was copied from one that was emptied and filled anew.
        return torch.equal(now[0], before[0]) and torch.equal(now[len(before) - 1], before[-1])


def _versions(value: Any) -> list[int | None]:
    """Returns versions that show changes of tensors in place: of a tensor, or of each entry of a list or dict."""
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return [version_of(entry) if isinstance(entry, Tensor) and not entry.is_inference() else None for entry in entries]


def _state(metric: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(metric).items() if name not in _NO_STATE}
