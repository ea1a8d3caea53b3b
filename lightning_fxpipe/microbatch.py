"""Splitting a batch into microbatches, and putting the results of microbatches together again.

The first dimension of every tensor with at least one is the batch; tensors without dimensions and everything that is not a
tensor go to every microbatch as they are. Microbatches have equal sizes, as ``torch.chunk`` makes them, and the last may be
smaller: it then runs as a pass of its own, because a pipeline schedule receives into buffers of one shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fxpipe._compat import tree_flatten_with_path, tree_leaves, tree_map
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


def batch_size(batch: Any) -> int:
    """The common first dimension of the batch's tensors.

    Raises:
        BatchError: No tensor has a first dimension, or two disagree on it.
    """
    named = [
        (path, tensor.shape[0])
        for path, leaf in tree_flatten_with_path(batch)[0]
        for tensor in Template.of(leaf).tensors  # of one, or of an object such as a BatchEncoding
        if tensor.dim() > 0
    ]
    sizes = {size for _, size in named}
    if not named:
        raise BatchError(
            "The batch cannot be split into microbatches.",
            observed=f"no tensor with a batch dimension in a batch of type {type(batch).__name__}",
            expected="at least one tensor whose first dimension is the batch",
            todo="Return tensors from the dataloader, in a dict, list or tuple.",
        )
    if len(sizes) > 1:
        listed = ", ".join(f"batch{''.join(str(key) for key in path)}: {size}" for path, size in named[:8])
        raise BatchError(
            "The batch cannot be split into microbatches.",
            observed=f"tensors of different batch size: {listed}",
            expected="one size for the first dimension of every tensor",
            todo="Give every tensor the batch as its first dimension, or make those that have none 0-dimensional.",
        )
    return int(sizes.pop())


def plan_passes(num_samples: int, num_microbatches: int) -> tuple[Pass, ...]:
    """Sizes of the microbatches, as ``torch.chunk``: ``num_microbatches`` or, where that does not divide, fewer.

    >>> plan_passes(16, 4)
    (Pass(first=0, count=4, size=4),)
    >>> plan_passes(7, 4)
    (Pass(first=0, count=3, size=2), Pass(first=3, count=1, size=1))
    """
    size = -(-num_samples // num_microbatches)
    full, rest = divmod(num_samples, size)
    passes = (Pass(first=0, count=full, size=size),)
    return (*passes, Pass(first=full, count=1, size=rest)) if rest else passes


def default_num_microbatches(num_samples: int, num_stages: int) -> int:
    """Four microbatches for each stage keep the bubble small (GPipe, section 3.2); fewer if they would not divide evenly."""
    wanted = max(1, min(num_samples, 4 * num_stages))
    dividing = next(count for count in range(wanted, 0, -1) if num_samples % count == 0)
    return dividing if dividing >= min(wanted, num_stages) else wanted


def split_batch(batch: Any, passes: Sequence[Pass]) -> list[Any]:
    """The microbatches, as views of the batch."""
    microbatches = []
    start = 0
    for part in passes:
        for _ in range(part.count):
            microbatches.append(_slice(batch, start, part.size))
            start += part.size
    return microbatches


def first_microbatch(batch: Any, num_microbatches: int) -> tuple[Any, int]:
    """The first microbatch and its size."""
    part = plan_passes(batch_size(batch), num_microbatches)[0]
    return _slice(batch, 0, part.size), part.size


def _slice(batch: Any, start: int, size: int) -> Any:
    def part(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return map_tensors(part, leaf) if Template.of(leaf).tensors else leaf
        if leaf.dim() == 0:
            return leaf
        # `.data` gives each microbatch its own version counter: a step that changes its batch in place would otherwise
        # invalidate what the microbatches before it saved for backward.
        return (leaf if leaf.requires_grad else leaf.data).narrow(0, start, size)

    return tree_map(part, batch)


def merge_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """What the step would have returned for the whole batch.

    Tensors with the batch as first dimension are concatenated, scalars averaged with the sizes as weights, lists with an entry
    for each sample joined; containers are merged entry by entry. Anything else is taken from the last microbatch.
    """
    first = outputs[0]
    if len(outputs) == 1 or first is None:
        return first
    if isinstance(first, Tensor):
        return _merge_tensors(outputs, sizes)
    if isinstance(first, Mapping) and all(isinstance(out, Mapping) and out.keys() == first.keys() for out in outputs):
        merged = {key: merge_outputs([out[key] for out in outputs], sizes) for key in first}
        return merged if type(first) is dict else type(first)(**merged)
    if isinstance(first, (list, tuple)) and all(type(out) is type(first) for out in outputs):
        return _merge_sequences(outputs, sizes)
    if isinstance(first, float):
        return sum(out * size for out, size in zip(outputs, sizes, strict=True)) / sum(sizes)
    return outputs[-1]


def _merge_tensors(outputs: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    detached = [out.detach() for out in outputs]
    if all(out.dim() == 0 for out in detached):
        if not detached[0].is_floating_point():
            return detached[-1]
        weights = torch.tensor(sizes, dtype=detached[0].dtype, device=detached[0].device)
        return (torch.stack(detached) * weights).sum() / weights.sum()
    return torch.cat(detached)


def _merge_sequences(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = outputs[0]
    is_record = hasattr(first, "_fields")  # a named tuple has fields, not samples
    per_sample = not is_record and all(len(out) == size for out, size in zip(outputs, sizes, strict=True))
    if per_sample and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(first)):
        return type(first)(item for out in outputs for item in out)
    if all(len(out) == len(first) for out in outputs):
        merged = [merge_outputs(list(items), sizes) for items in zip(*outputs, strict=True)]
        return type(first)(*merged) if is_record else type(first)(merged)
    return outputs[-1]
