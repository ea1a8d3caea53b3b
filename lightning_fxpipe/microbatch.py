"""Splitting a batch into microbatches.

The first dimension of every tensor with at least one is the batch. Data for each sample may also be no tensor: a list or tuple
without tensors (strings, numbers, lists of words) or a numpy array is cut along where its length is the batch size; of nested
ones the outermost of that length. Everything else, such as tensors without dimensions, strings and None, goes to every
microbatch as it is. Batches may be dicts and other mappings, lists, tuples, named tuples, dataclasses, and pytrees.

Microbatches have equal sizes, as ``torch.chunk`` makes them, and the last may be smaller: it then runs as a pass of its own,
because a pipeline schedule receives into buffers of one shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from lightning_fxpipe.containers import leaves_with_path, opened
from lightning_fxpipe.errors import BatchError
from lightning_fxpipe.structure import Template, map_tensors


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Microbatches of one size, which go through the schedule together.

    Attributes:
        first: Index of the first of them among all microbatches of the batch.
        count: How many there are.
        size: Samples in each.
    """

    first: int
    count: int
    size: int


def batch_size(batch: Any, batch_dim: int = 0) -> int:
    """The common size of the batch's tensors in the dimension that is the batch.

    That is ``batch_dim``; for a tensor with fewer dimensions, such as labels beside sequences of shape (time, batch, features),
    the first. A tensor without dimensions has none, and goes whole to each microbatch.

    Raises:
        BatchError: No tensor has such a dimension, or two disagree on it.
    """
    named = [
        (path, tensor.shape[_dim_of(tensor, batch_dim)])
        for path, leaf in leaves_with_path(batch)
        for tensor in Template.of(leaf).tensors  # of one, or of an object that hides some
        if tensor.dim() > 0
    ]
    sizes = {size for _, size in named}
    if not named:
        raise BatchError(
            "The batch cannot be split into microbatches.",
            observed=f"no tensor with a batch dimension in a batch of type {type(batch).__name__}",
            expected=f"at least one tensor with the batch as dimension {batch_dim}",
            todo="Return tensors from the dataloader, in a dict, list or tuple.",
        )
    if len(sizes) > 1:
        listed = ", ".join(f"batch{path}: {size}" for path, size in named[:8])
        raise BatchError(
            "The batch cannot be split into microbatches.",
            observed=f"tensors of different batch size: {listed}",
            expected=f"one size for dimension {batch_dim} of every tensor, and for the first of those that have fewer",
            todo="Give every tensor the batch as that dimension, or name another with FxPipeStrategy(batch_dim=...). What has "
            "none, such as class weights, belongs into the module, or into a tensor without dimensions.",
        )
    return int(sizes.pop())


def tensors_without_batch(batch: Any) -> tuple[str, ...]:
    """The tensors in a batch that go whole to each microbatch, as they would be written: ``batch['temperature']``."""
    return tuple(
        f"batch{path}" for path, leaf in leaves_with_path(batch) for tensor in Template.of(leaf).tensors if tensor.dim() == 0
    )


def _dim_of(tensor: Tensor, batch_dim: int) -> int:
    return batch_dim if tensor.dim() > batch_dim else 0


def plan_passes(num_samples: int, num_microbatches: int) -> tuple[Pass, ...]:
    """Sizes of the microbatches, as ``torch.chunk``: ``num_microbatches`` or, where that does not divide, fewer.

    A single sample that is left over joins the microbatch before it: batch norms refuse one.

    >>> plan_passes(16, 4)
    (Pass(first=0, count=4, size=4),)
    >>> plan_passes(8, 3)
    (Pass(first=0, count=2, size=3), Pass(first=2, count=1, size=2))
    >>> plan_passes(7, 4)
    (Pass(first=0, count=2, size=2), Pass(first=2, count=1, size=3))
    """
    size = -(-num_samples // num_microbatches)
    full, rest = divmod(num_samples, size)
    if rest == 1 and size > 1:
        full, rest = full - 1, size + 1
    passes = (Pass(first=0, count=full, size=size),) if full else ()
    return (*passes, Pass(first=full, count=1, size=rest)) if rest else passes


def default_num_microbatches(num_samples: int, num_stages: int) -> int:
    """Four microbatches for each stage keep the bubble small (GPipe, section 3.2); fewer if they would have fewer than two
    samples, or would not divide evenly while as many as stages do.

    >>> default_num_microbatches(64, 4), default_num_microbatches(8, 4), default_num_microbatches(7, 2)
    (16, 4, 4)
    """

    def preference(count: int) -> tuple[bool, bool, int, int]:
        first, *rest = plan_passes(num_samples, count)
        total = first.count + sum(part.count for part in rest)
        fills = total >= min(num_samples // 2, num_stages) and first.size >= min(num_samples, 2)
        return fills, not rest, total, -count

    return max(range(1, min(num_samples, 4 * num_stages) + 1), key=preference, default=1)


def split_batch(batch: Any, passes: Sequence[Pass], batch_dim: int = 0) -> list[Any]:
    """The microbatches, as views of the batch.

    Raises:
        BatchError: There are several, and an object in the batch hides tensors.
    """
    total = sum(part.count * part.size for part in passes)
    microbatches = []
    start = 0
    for part in passes:
        for _ in range(part.count):
            microbatches.append(_part(batch, _Samples(start=start, size=part.size, total=total, dim=batch_dim)))
            start += part.size
    return microbatches


def first_microbatch(batch: Any, num_microbatches: int, batch_dim: int = 0) -> tuple[Any, int]:
    """The first microbatch and its size."""
    total = batch_size(batch, batch_dim)
    size = plan_passes(total, num_microbatches)[0].size
    return _part(batch, _Samples(start=0, size=size, total=total, dim=batch_dim)), size


@dataclass(frozen=True, kw_only=True)
class _Samples:
    """The samples ``start`` to ``start + size`` of a batch of ``total``, whose tensors have them in dimension ``dim``."""

    start: int
    size: int
    total: int
    dim: int


def _part(value: Any, samples: _Samples) -> Any:
    """These samples of something in a batch."""
    if isinstance(value, Tensor):
        # `.data` gives each microbatch its own version counter: a step that changes its batch in place would otherwise
        # invalidate what the microbatches before it saved for backward.
        if value.dim() == 0:
            return value
        shared = value if value.requires_grad else value.data
        return shared.narrow(_dim_of(value, samples.dim), samples.start, samples.size)
    if _is_per_sample(value, samples.total):
        return value[samples.start : samples.start + samples.size]
    container = opened(value)
    if container is None:
        return map_tensors(lambda tensor: _part(tensor, samples), value) if Template.of(value).tensors else value
    return container.rebuilt([_part(entry, samples) for _, entry in container.entries])


def _is_per_sample(value: Any, total: int) -> bool:
    """Whether the value has an entry for each sample that is not a tensor."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and len(value) == total
    # A named tuple has fields, and a torch.Size dimensions, not samples.
    if type(value) not in (list, tuple) or len(value) != total:
        return False
    return not any(isinstance(leaf, Tensor) for _, leaf in leaves_with_path(value))
