"""Dataloaders that end on every rank together, or with an error on every rank.

A rank whose data ended before that of the others would go on to the next epoch or to validation while they wait for it in a
step: forever, or with the tensors of another step. Replicas have other batches, and in training as many of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fxpipe._compat.torch import end_workers
from lightning_fxpipe.data.skip_loading import Sparing
from lightning_fxpipe.distributed.agreement import check_agreement, digest
from lightning_fxpipe.errors import BatchError
from lightning_fxpipe.user_code.step import StepKind

# The batches of an epoch after which ranks may be spared: their steps, or the one before, have shown what the stages need.
_CONSIDERED = (2, 3)
_DISAGREEMENT = BatchError(
    "A dataloader has a different number of batches on different ranks.",
    expected="the same batches in the same order on every rank of a pipeline, and in training the same number of batches in "
    "each replica",
    todo="Load the same data on every rank: do not split it by RANK or world size, and call seed_everything before generating "
    "random data. With several replicas, drop the samples that do not divide evenly among them.",
)
DIFFERENT_BATCHES = BatchError(
    "The ranks of the pipeline loaded different batches.",
    expected="the same batch on every rank: the first stage takes its inputs, the last stage its targets",
    todo="Load the same data in every process: call seed_everything before generating or splitting random data, and change "
    "batches only in the step and in hooks.",
)
_COMPARED_EVERY = 32  # batches of an epoch, the first included: it takes some tenths of a millisecond
# Samplers that give as many samples as they say.
_EXACT = (DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


def in_step(loader: Any, sparing: Sparing, as_replica: Callable[[], AbstractContextManager[None]] = nullcontext) -> Any:
    """A dataloader with the same state that keeps step with those of the other ranks; the user's own keeps its class.

    Where torch's own samplers say how many batches there will be, the numbers are compared when an epoch begins; elsewhere the
    ranks vote before each batch, which costs a tenth of a millisecond.

    Args:
        loader: A dataloader, or anything else that is iterated for batches.
        sparing: Knows the ranks that do not load.
        as_replica: In its block user code that loads is the same on every rank of a pipeline, which it may ask for.
    """
    group = sparing.everyone
    if group is None or dist.get_world_size(group) == 1 or type(loader).__module__ == "builtins":
        return loader
    kind: Any = type(loader)

    def iterate(self: Any) -> Iterator[Any]:
        length = f"{len(self)} batches" if _length_is_exact(self) else None
        return _InStep(lambda: kind.__iter__(loader), partial(end_workers, loader), sparing, as_replica, length)

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        return in_step(copy.deepcopy(loader, memo), copy.deepcopy(sparing, memo), copy.deepcopy(as_replica, memo))

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    try:
        following: Any = object.__new__(type(kind.__name__, (kind,), {**names, "__iter__": iterate, "__deepcopy__": copied}))
        following.__dict__ = vars(loader)  # one state: what has been read of either has been read
    except TypeError:
        return loader  # written in C
    return following


def _length_is_exact(loader: Any) -> bool:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    sampler = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
    return type(sampler) in _EXACT and type(loader.batch_sampler) in (BatchSampler, type(None))


class _InStep:
    """An iterator that ends where those of all ranks end.

    Args:
        begin: Makes the loader's own iterator.
        give_up: Ends what the loader keeps running for its iterators.
        sparing: Knows the ranks that do not load.
        as_replica: In its block user code that loads is the same on every rank.
        length: How many batches there will be, where that is known.
    """

    def __init__(
        self,
        begin: Callable[[], Iterator[Any]],
        give_up: Callable[[], None],
        sparing: Sparing,
        as_replica: Callable[[], AbstractContextManager[None]],
        length: str | None,
    ) -> None:
        self._give_up = give_up
        self._sparing = sparing
        self._as_replica = as_replica
        self._length = length
        self._count = 0

        def begin_as_replica() -> Iterator[Any]:
            with as_replica():  # workers that are forked here stay so
                return begin()

        self._inner = sparing.begin(self._kind, begin_as_replica)

    @property
    def _kind(self) -> StepKind | None:  # it may have been made before the run
        return self._sparing.running_step()

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self._sparing.everyone if self._kind is StepKind.TRAIN else self._sparing.group

    def __iter__(self) -> _InStep:
        return self

    def __next__(self) -> Any:
        # Not in the constructor: Lightning hides an error that making an iterator raises.
        if self._length is not None and self._count == 0:
            check_agreement(self._group, self._length, _DISAGREEMENT)
        loaded = self._load()
        if not loaded:
            raise StopIteration
        self._count += 1
        if self._kind is not None and self._count % _COMPARED_EVERY == 1 and not self._sparing.ranks(self._kind):
            check_agreement(self._sparing.group, f"batch with digest {digest(loaded[0])}", DIFFERENT_BATCHES)
        if self._count in _CONSIDERED:
            self._sparing.consider(self._kind, loaded[0])
        return loaded[0]

    def _load(self) -> list[Any]:
        """The next batch; an empty list at the end."""
        if self._sparing.is_spared(self._kind) and self._inner is not None:
            self._inner = None
            self._give_up()
        loaded = self._sparing.load(self._kind, self._load_here)
        if self._length is None:
            self._vote(bool(loaded))
        return loaded

    def _load_here(self) -> list[Any]:
        assert self._inner is not None
        with self._as_replica():
            try:
                return [next(self._inner)]
            except StopIteration:
                return []

    def _vote(self, has_batch: bool) -> None:
        group = self._group
        ended = torch.tensor([int(not has_batch)])
        dist.all_reduce(ended, group=group)
        if 0 < int(ended) < dist.get_world_size(group):
            count = f"{'at least ' * has_batch}{self._count + has_batch} batches"
            check_agreement(group, count, _DISAGREEMENT)
