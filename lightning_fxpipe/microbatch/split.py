"""Splitting a batch into microbatches.

The first dimension of every tensor with at least one is the batch. Data for each sample may also be no tensor: a list or tuple
without tensors (strings, numbers, lists of words) or a numpy array is cut along where its length is the batch size; of nested
ones the outermost of that length. A list with one dict for each sample, as detectors get their targets, is cut in the same way,
and lists of images beside it. Everything else, such as tensors without dimensions, strings and None, goes to every
microbatch as it is. Batches may be dicts and other mappings, lists, tuples, named tuples, dataclasses, and pytrees.

One microbatch is the batch itself, whatever that is: a graph, images of different sizes, nothing but numbers.

Microbatches have equal sizes, as ``torch.chunk`` makes them, and the last may be smaller: it then runs as a pass of its own,
because a pipeline schedule receives into buffers of one shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from lightning_fxpipe.errors import BatchError
from lightning_fxpipe.pytree.containers import container_of, leaves_with_path
from lightning_fxpipe.pytree.structure import Template, map_tensors
from lightning_fxpipe.user_code.objects import keep_attributes


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


@dataclass(frozen=True, kw_only=True)
class Counted:
    """How many samples a batch has.

    Attributes:
        num_samples: So many; 1 where the batch is one piece.
        reason: Why it is one piece though the user has not said so; else None.
    """

    num_samples: int
    reason: str | None = None


def count_samples(batch: Any, num_microbatches: int | None, batch_dim: int = 0) -> Counted:
    """How many samples a batch has, of whatever kind it is.

    Args:
        batch: The batch.
        num_microbatches: How many microbatches the user wants; None leaves it to us.
        batch_dim: Dimension of the batch in its tensors.

    Raises:
        BatchError: The user wants several, and the batch cannot be split.
    """
    try:
        return Counted(num_samples=max(batch_size(batch, batch_dim), 1))
    except BatchError as error:
        if num_microbatches not in (None, 1):
            raise
        return Counted(num_samples=1, reason=error.observed if num_microbatches is None else None)


def batch_size(batch: Any, batch_dim: int = 0) -> int:
    """The common size of the batch's tensors in the dimension that is the batch.

    That is ``batch_dim``; for a tensor with fewer dimensions, such as labels beside sequences of shape (time, batch, features),
    the first. A tensor without dimensions has none, and goes whole to each microbatch. Where that gives no common size, and
    the batch has lists with one dict for each sample, it is their length.

    Raises:
        BatchError: No tensor has such a dimension, or two disagree on it.
    """
    named = _sizes(batch, batch_dim)
    sizes = {size for _, size in named}
    num_dicts = _num_dicts(batch, batch_dim) if len(sizes) != 1 else None
    if num_dicts is not None:
        return num_dicts
    if not named:
        raise _indivisible(
            f"no tensor with a batch dimension in a batch of type {type(batch).__name__}",
            f"at least one tensor whose dimension {batch_dim} is the batch",
        )
    if len(sizes) > 1:
        raise _indivisible(
            f"tensors with different batch sizes: {', '.join(f'batch{path}: {size}' for path, size in named[:8])}",
            f"the same size in dimension {batch_dim} of every tensor, or in the first dimension of tensors with fewer "
            "dimensions; or lists with one dict per sample",
        )
    return int(sizes.pop())


def _indivisible(observed: str, expected: str) -> BatchError:
    return BatchError(
        "The batch cannot be split into microbatches.",
        observed=observed,
        expected=expected,
        todo="Set FxPipeStrategy(num_microbatches=1) to run each batch unsplit, for example for graph data. Or make that "
        "dimension the batch in every tensor, or set batch_dim=... to another dimension. Store tensors without a batch "
        "dimension, such as class weights, in the module.",
    )


def _sizes(batch: Any, batch_dim: int, num_samples: int | None = None) -> list[tuple[str, int]]:
    """The sizes of the batch's tensors in the dimension that is the batch, with their paths; with ``num_samples`` without what
    is in lists that have an entry for each sample.
    """
    return [
        (path, tensor.shape[_dim_of(tensor, batch_dim)])
        for path, leaf in leaves_with_path(batch, is_left_out=lambda value: _has_samples(value, num_samples))
        for tensor in Template.of(leaf).tensors  # of one, or of an object that hides some
        if tensor.dim() > 0
    ]


def _num_dicts(batch: Any, batch_dim: int) -> int | None:
    """The length of the lists with one dict for each sample; None where there are none, or it is not that of the batch."""
    lengths = {len(entries) for entries in _lists_of_dicts(batch)}
    if len(lengths) != 1:
        return None
    (length,) = lengths
    return length if {size for _, size in _sizes(batch, batch_dim, length)} <= lengths else None


def _lists_of_dicts(value: Any) -> Iterator[Sequence[Any]]:
    """The outermost lists in a batch whose entries are dicts, or objects, with tensors."""
    if _is_list_of_dicts(value):
        yield value
        return
    container = container_of(value)
    for _, entry in container.entries if container is not None else ():
        yield from _lists_of_dicts(entry)


def _is_list_of_dicts(value: Any) -> bool:
    if type(value) not in (list, tuple) or not value:
        return False
    return not any(isinstance(entry, (Tensor, list, tuple, str)) or not Template.of(entry).tensors for entry in value)


def _has_samples(value: Any, num_samples: int | None) -> bool:
    """Returns True if a list beside lists of dicts has an entry for each sample, too: a dict or an image."""
    if type(value) not in (list, tuple) or len(value) != num_samples:
        return False
    return _is_list_of_dicts(value) or all(isinstance(entry, Tensor) for entry in value)


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


def default_num_microbatches(num_samples: int, num_ranks: int) -> int:
    """Four microbatches for each rank keep the bubble small (GPipe, section 3.2); fewer if they would have fewer than two
    samples, or would not divide evenly while as many as ranks do. One where a single rank has all stages: it never waits
    for another, and larger operations take less time.

    >>> default_num_microbatches(64, 4), default_num_microbatches(8, 4), default_num_microbatches(7, 2)
    (16, 4, 4)
    >>> default_num_microbatches(64, 1)
    1
    """
    if num_ranks == 1:
        return 1

    def preference(count: int) -> tuple[bool, bool, int, int]:
        first, *rest = plan_passes(num_samples, count)
        total = first.count + sum(part.count for part in rest)
        fills = total >= min(num_samples // 2, num_ranks) and first.size >= min(num_samples, 2)
        return fills, not rest, total, -count

    return max(range(1, min(num_samples, 4 * num_ranks) + 1), key=preference, default=1)


def without_single_samples(num_samples: int, count: int) -> int:
    """Returns the number of microbatches asked for, or fewer, so that none is a single sample, over which BatchNorm cannot
    normalise.

    >>> without_single_samples(7, 4), without_single_samples(4, 4), without_single_samples(1, 4)
    (4, 3, 1)
    """
    counts = range(min(num_samples, count), 1, -1)
    return next((one for one in counts if all(part.size > 1 for part in plan_passes(num_samples, one))), 1)


def split_batch(batch: Any, passes: Sequence[Pass], batch_dim: int = 0) -> list[Any]:
    """The microbatches, as views of the batch; a single one is the batch itself.

    Raises:
        BatchError: There are several, and an object in the batch hides tensors.
    """
    total = sum(part.count * part.size for part in passes)
    if len(passes) == 1 and passes[0].count == 1:
        return [batch]
    has_dicts = _num_dicts(batch, batch_dim) == total  # one for each sample, in lists

    def part_of(value: Any, start: int, size: int) -> Any:
        """The samples ``start`` to ``start + size`` of something in the batch."""
        if isinstance(value, Tensor):
            if value.dim() == 0:
                return value
            # `.data` gives each microbatch its own version counter: a step that changes its batch in place would otherwise
            # invalidate what the microbatches before it saved for backward.
            shared = value if value.requires_grad else value.data
            return keep_attributes(shared.narrow(_dim_of(value, batch_dim), start, size), value)
        if _is_per_sample(value, total) or (has_dicts and _has_samples(value, total)):
            return value[start : start + size]
        container = container_of(value)
        if container is None:
            return map_tensors(lambda tensor: part_of(tensor, start, size), value) if Template.of(value).tensors else value
        return container.rebuilt([part_of(entry, start, size) for _, entry in container.entries])

    sizes = [part.size for part in passes for _ in range(part.count)]
    return [part_of(batch, end - size, size) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def first_microbatch(batch: Any, num_microbatches: int | None, num_ranks: int, batch_dim: int = 0) -> tuple[Any, int]:
    """The first microbatch, of two samples or more where there are two, and its size; arguments as :func:`count_samples`.

    Raises:
        BatchError: The user wants several, and the batch cannot be split.
    """
    total = count_samples(batch, num_microbatches, batch_dim).num_samples
    count = num_microbatches or default_num_microbatches(total, num_ranks)
    passes = plan_passes(total, without_single_samples(total, count))
    return split_batch(batch, passes, batch_dim)[0], passes[0].size


def _is_per_sample(value: Any, total: int) -> bool:
    """Returns True if the value has an entry for each sample that is not a tensor."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and len(value) == total
    # A named tuple has fields, and a torch.Size dimensions, not samples.
    if type(value) not in (list, tuple) or len(value) != total:
        return False
    return not any(isinstance(leaf, Tensor) for _, leaf in leaves_with_path(value))
