"""Dataloaders that end on every rank together, or with an error on every rank.

A rank whose data ended before that of the others would go on to the next epoch or to validation while they wait for it in a
step: forever, or with the tensors of another step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fxpipe.agreement import check_agreement
from lightning_fxpipe.errors import BatchError

# Samplers that give as many samples as they say.
_EXACT = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


def in_step(loader: Any, group: dist.ProcessGroup | None) -> Any:
    """A copy of a dataloader that keeps step with those of the other ranks.

    Where torch's own samplers say how many batches there will be, the numbers are compared when an epoch begins; elsewhere the
    ranks vote before each batch, which costs a tenth of a millisecond.

    Args:
        loader: A dataloader, or anything else that is iterated for batches.
        group: A group for CPU tensors with all ranks of the pipeline.
    """
    if group is None or dist.get_world_size(group) == 1 or type(loader).__module__ == "builtins":
        return loader
    following = copy.copy(loader)  # the user's own stays as it is
    try:
        kind: Any = type(loader)
        following.__class__ = _in_step_kind(kind)
    except TypeError:
        return loader  # written in C
    following.in_step_with = group
    return following


@cache
def _in_step_kind(kind: Any) -> Any:
    """The kind of dataloader, whose iterators keep step."""

    def iterate(self: Any) -> Iterator[Any]:
        inner = kind.__iter__(self)
        if not _length_is_exact(self):
            return _Voting(inner, self.in_step_with)
        return _checked(inner, f"{len(self)} batches", self.in_step_with)

    return type(kind.__name__, (kind,), {"__iter__": iterate, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _length_is_exact(loader: Any) -> bool:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    sampler = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
    return type(sampler) in _EXACT and type(loader.batch_sampler) in (BatchSampler, type(None))


def _checked(inner: Iterator[Any], length: str, group: dist.ProcessGroup) -> Iterator[Any]:
    """``inner``; its first batch comes when the ranks have agreed. Lightning hides an error that making an iterator raises."""
    check_agreement(group, length, _disagreement())
    yield from inner


class _Voting:
    """An iterator that ends where those of all ranks end."""

    def __init__(self, inner: Iterator[Any], group: dist.ProcessGroup) -> None:
        self._inner, self._group = inner, group
        self._count = 0

    def __iter__(self) -> _Voting:
        return self

    def __next__(self) -> Any:
        batches = list(_at_most_one(self._inner))
        ended = torch.tensor([int(not batches)])
        dist.all_reduce(ended, group=self._group)
        if 0 < int(ended) < dist.get_world_size(self._group):
            check_agreement(self._group, f"{'at least ' * bool(batches)}{self._count + len(batches)} batches", _disagreement())
        if not batches:
            raise StopIteration
        self._count += 1
        return batches[0]


def _at_most_one(iterator: Iterator[Any]) -> Iterator[Any]:
    try:
        yield next(iterator)
    except StopIteration:
        return


def _disagreement() -> BatchError:
    return BatchError(
        "A dataloader ends at different batches on different ranks.",
        expected="the same batches in the same order on every rank of a pipeline",
        todo="Let the data depend on no rank: do not cut it up by RANK or by the world size, and call seed_everything before "
        "random data is made.",
    )
