"""Puts the arguments of a call that each microbatch makes together to those of one call for the whole batch.

Data with an entry for each sample is joined. A number has no batch dimension, so what it is over samples follows from its
kind: a float is a mean and is averaged, as ``self.log`` does, an int is a count and is summed. Several numbers, or a count
beside data, belong to their microbatch (a sum and its number, a mean and its weight), as does whatever else differs: then the
calls stay as many as there are microbatches.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fxpipe.containers import opened
from lightning_fxpipe.weighting import weighted_sum


@dataclass(frozen=True, kw_only=True)
class BatchLoss:
    """The loss of each microbatch, and their factors in the batch's loss; empty where nothing is trained.

    Attributes:
        values: The losses, as float64 on the CPU.
        weights: Their factors.
    """

    values: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    weights: Sequence[float] = ()

    @classmethod
    def of(cls, losses: Sequence[Tensor], weights: Sequence[float]) -> BatchLoss:
        """From the losses as the step returned them."""
        return cls(values=torch.stack(list(losses)).to("cpu", torch.float64), weights=weights) if losses else cls()

    def total(self, values: Tensor) -> float | None:
        """The batch's loss, if the values are those of the microbatches' losses; else None."""
        if values.shape != self.values.shape or not torch.equal(values.nan_to_num(), self.values.nan_to_num()):
            return None
        return weighted_sum(self.values.tolist(), self.weights)


class _Separate(Exception):
    """The arguments do not make one call."""


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def joined(calls: Sequence[Arguments], sizes: Sequence[int], loss: BatchLoss) -> list[Arguments]:
    """The arguments for the whole batch: of one call, or of those of the microbatches where they cannot be joined.

    Args:
        calls: Positional arguments and keywords for each microbatch.
        sizes: Samples in each microbatch.
        loss: The losses; a number that is one becomes the batch's.
    """
    first, keywords = calls[0]
    if len(calls) == 1 or any(len(args) != len(first) or list(kwargs) != list(keywords) for args, kwargs in calls):
        return list(calls)
    join = _Join(sizes, loss)
    try:
        args = tuple(join.of([args[i] for args, _ in calls]) for i in range(len(first)))
        kwargs = {name: join.of([kwargs[name] for _, kwargs in calls]) for name in keywords}
    except _Separate:
        return list(calls)
    return list(calls) if join.must_stay_apart else [(args, kwargs)]


def joined_log(calls: Sequence[Arguments], sizes: Sequence[int], loss: BatchLoss) -> Arguments:
    """The arguments of a call that writes to a log once for the batch.

    Numbers are averaged, but for those that are equal, such as the step; of what cannot be joined, such as a picture, the first
    microbatch's is taken.
    """
    first, keywords = calls[0]
    if len(calls) == 1 or any(len(args) != len(first) or list(kwargs) != list(keywords) for args, kwargs in calls):
        return calls[0]
    columns = [[args[i] for args, _ in calls] for i in range(len(first))]
    named = {name: [kwargs[name] for _, kwargs in calls] for name in keywords}

    def one(values: Sequence[Any]) -> Any:
        try:
            return _LogJoin(sizes, loss).of(values)
        except _Separate:
            return values[0]

    return tuple(map(one, columns)), {name: one(values) for name, values in named.items()}


class _Join:
    """One joining of values; remembers which kinds of numbers there were."""

    def __init__(self, sizes: Sequence[int], loss: BatchLoss) -> None:
        self._sizes = sizes
        self._loss = loss
        self._num_joined = self._num_means = self._num_counts = 0

    @property
    def must_stay_apart(self) -> bool:
        """Whether there are numbers that belong to their microbatch."""
        if self._num_counts:
            return self._num_joined > 0 or self._num_counts + self._num_means > 1
        return self._num_means > 1 and not self._num_joined

    def of(self, values: Sequence[Any]) -> Any:
        """The values as one."""
        first = values[0]
        if all(value is first for value in values) and not isinstance(first, (int, np.integer)):
            return first
        if isinstance(first, (Tensor, np.ndarray)):
            return self._array(values)
        if isinstance(first, numbers.Real):
            return self._number(values)
        if self._is_per_sample(values):
            self._num_joined += 1
            return type(first)(entry for value in values for entry in value)
        return self._container(values)

    def _array(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if any(type(value) is not type(first) or value.ndim != first.ndim or value.dtype != first.dtype for value in values):
            raise _Separate
        if first.ndim == 0:
            return self._number(values)
        lengths = [value.shape[0] for value in values]
        proportional = all(a * self._sizes[0] == lengths[0] * b for a, b in zip(lengths, self._sizes, strict=True))
        is_batch = proportional and lengths[0] % self._sizes[0] == 0
        # Selected samples or tokens are another number each time.
        if not is_batch and len(set(lengths)) == 1 and sum(lengths):
            return self._equal(values)
        if any(value.shape[1:] != first.shape[1:] for value in values):
            raise _Separate
        self._num_joined += 1
        return torch.cat(list(values)) if isinstance(first, Tensor) else np.concatenate(list(values))

    def _number(self, values: Sequence[Any]) -> Any:
        first = values[0]
        sizes = torch.tensor(list(self._sizes), dtype=torch.float64)
        found = torch.tensor([float(value) for value in values], dtype=torch.float64)
        is_equal = bool((found == found[0]).all())
        if _is_flag(first):
            if not is_equal:
                raise _Separate
            return first
        if _is_float(first):
            if is_equal:
                return first
            self._num_means += 1
            total = self._loss.total(found)
            return _like(first, float((found * sizes).sum() / sizes.sum()) if total is None else total)
        self._num_counts += 1
        return _like(first, int(found.sum()))

    def _is_per_sample(self, values: Sequence[Any]) -> bool:
        """Whether the values are lists with an entry for each sample: texts, boxes of an image."""
        if not all(type(v) in (list, tuple) and len(v) == size for v, size in zip(values, self._sizes, strict=True)):
            return False
        # As many tensors of a batch as it has samples are layers, not samples.
        return not all(
            isinstance(entry, Tensor) and entry.dim() and entry.shape[0] == size
            for value, size in zip(values, self._sizes, strict=True)
            for entry in value
        )

    def _container(self, values: Sequence[Any]) -> Any:
        containers = [container for container in map(opened, values) if container is not None]
        if len(containers) < len(values):
            return self._equal(values)
        names = [[name for name, _ in container.entries] for container in containers]
        if any(other != names[0] for other in names):
            raise _Separate
        columns = zip(*([entry for _, entry in container.entries] for container in containers), strict=True)
        return containers[0].rebuilt([self.of(column) for column in columns])

    def _equal(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Tensor):
            same = all(torch.equal(value, first) for value in values)
        elif isinstance(first, np.ndarray):
            same = all(np.array_equal(value, first) for value in values)
        else:
            same = all(type(value) is type(first) and bool(value == first) for value in values)
        if not same:
            raise _Separate
        return first


class _LogJoin(_Join):
    """One joining of what is written to a log."""

    def _number(self, values: Sequence[Any]) -> Any:
        if all(value == values[0] for value in values) or _is_float(values[0]):
            return super()._number(values) if _is_float(values[0]) else values[0]
        return super()._number([float(value) for value in values])


def _is_flag(number: Any) -> bool:
    return isinstance(number, bool) or getattr(number, "dtype", None) in (torch.bool, np.dtype(bool))


def _is_float(number: Any) -> bool:
    if isinstance(number, Tensor):
        return number.is_floating_point()
    return number.dtype.kind == "f" if isinstance(number, np.ndarray) else not isinstance(number, numbers.Integral)


def _like(example: Any, number: float) -> Any:
    """A number of the same kind."""
    if isinstance(example, Tensor):
        return torch.tensor(number, dtype=example.dtype, device=example.device)
    return np.asarray(number, dtype=example.dtype) if isinstance(example, np.ndarray) else type(example)(number)
