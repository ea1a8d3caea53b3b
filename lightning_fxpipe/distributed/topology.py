"""Which rank holds which stage.

The last stage lives on global rank 0, where Lightning has its progress bar, loggers and the results of ``predict``; so the
stages run against the ranks, unless they come back in a V, which ends where it began. A process group with that order makes the
pipeline's ranks those of the group (``sort_ranks=False``; a DeviceMesh would sort).
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed.distributed_c10d as dist

from lightning_fxpipe.distributed.groups import closed_with
from lightning_fxpipe.errors import UnsupportedError


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which pipeline rank has which stages.

    Attributes:
        num_ranks: Ranks of the pipeline, P.
        stages_per_rank: How many stages each has.
        is_v: Whether the second half of the stages comes back through the ranks: rank r has the stages r and 2 P - 1 - r
            (arXiv 2405.15362). Else they go round: it has r, r + P, r + 2 P and so on (arXiv 2104.04473).
    """

    num_ranks: int
    stages_per_rank: int = 1
    is_v: bool = False

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.num_ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that has a stage."""
        return min(stage, self.num_stages - 1 - stage) if self.is_v else stage % self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a pipeline rank has, in their order."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This rank's place in its pipeline.

    Attributes:
        group: Process group whose ranks are the pipeline's.
        control_group: Group with the same ranks for small messages between CPUs.
        rank: This process's pipeline rank.
        placement: Which rank has which stages.
        device: This rank's device.
        backward_group: Process group in which the stages are placed in the same way when they are numbered from the last one.
        timeout: How long a rank waits for another.
    """

    group: dist.ProcessGroup | None
    control_group: dist.ProcessGroup | None
    rank: int
    placement: Placement
    device: torch.device
    backward_group: dist.ProcessGroup | None = None
    timeout: timedelta | None = None
    _parts: dict[Any, dist.ProcessGroup] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Topology:
        """Itself: process groups belong to this process, and cannot be copied."""
        return self

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.placement.num_stages

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """This rank's stages, in their order."""
        return self.placement.stages_of(self.rank)

    @property
    def last_stage(self) -> int:
        """The stage where the model's result is."""
        return self.num_stages - 1

    @cached_property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.last_stage in self.stages

    @property
    def last_place(self) -> int:
        """Pipeline rank that holds the last stage."""
        return self.placement.rank_of(self.last_stage)

    @property
    def last_rank(self) -> int:
        """Global rank that holds the last stage."""
        return self.rank_of(self.last_stage)

    def rank_of(self, stage: int) -> int:
        """Global rank that holds a stage."""
        return self.global_rank(self.placement.rank_of(stage))

    def global_rank(self, rank: int) -> int:
        """Global rank of a pipeline rank."""
        return rank if self.placement.is_v else self.num_ranks - 1 - rank

    def ranks_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Global ranks that hold some stages, each once, in the stages' order."""
        return tuple(dict.fromkeys(map(self.rank_of, stages)))

    def holds_any(self, stages: Iterable[int]) -> bool:
        """Whether this rank has one of some stages."""
        return any(stage in self.stages for stage in stages)

    def group_of(self, ranks: Iterable[int], *, controls: bool = False) -> dist.ProcessGroup:
        """A group of some of the ranks, made once. Called by every rank, with the same ranks in the same order of calls.

        Args:
            ranks: Global ranks.
            controls: Whether it is for small messages between CPUs.
        """
        key = (*sorted(ranks),), controls and self.control_group is not self.group
        if key not in self._parts:
            members, needs_gloo = key
            self._parts[key] = dist.new_group(list(members), self.timeout, backend="gloo" if needs_gloo else None)
            if isinstance(self._parts[key], dist.ProcessGroup):  # else this rank is no member
                closed_with(self, [self._parts[key]])
        return self._parts[key]


# The process groups are the process's: runs one after the other have the same ones, whatever strategies they have.
_Key = tuple[torch.device, timedelta | None, Placement]
_in_use: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, tuple[list[int], Topology]]] = WeakKeyDictionary()


def shared_topology(device: torch.device, timeout: timedelta, placement: Placement, num_failed_runs: int) -> Topology:
    """The pipeline over all ranks, made once for all runs of the process. Called by every rank at the same time.

    Ranks that a failed run has left may have stopped at different places, with messages in between that nobody has taken. So
    the runs that follow have other process groups.

    Args:
        device: This rank's device.
        timeout: How long a rank waits for another.
        placement: Which rank has which stages.
        num_failed_runs: How many runs have failed on this rank.

    Raises:
        UnsupportedError: Ranks place the stages differently.
    """
    told = [(num_failed_runs, placement)] * dist.get_world_size()
    dist.all_gather_object(told, told[0])
    failed = [number for number, _ in told]
    if any(theirs != placement for _, theirs in told):
        raise UnsupportedError(
            "The ranks of the pipeline place the stages differently.",
            observed="; ".join(f"rank {rank}: {theirs}" for rank, (_, theirs) in enumerate(told)),
            expected="the same options on every rank, and the same plan and table of actions where they are files",
            todo="Give all processes the same options, and all machines the same files.",
        )
    assert dist.group.WORLD is not None
    known = _in_use.setdefault(dist.group.WORLD, {})
    key = device, timeout, placement
    if key in known and known[key][0] != failed:
        del known[key]
        gc.collect()  # what has failed holds its groups, and is a Trainer, which refers to itself
    if key not in known:
        known[key] = failed, make_topology(device, timeout, placement)
    return known[key][1]


def make_topology(device: torch.device, timeout: timedelta | None = None, placement: Placement | None = None) -> Topology:
    """One pipeline over all ranks. Called by every rank, with the default process group initialised.

    Args:
        device: This rank's device.
        timeout: How long a rank waits for another.
        placement: Which rank has which stages; None: each has one.
    """
    num_ranks = dist.get_world_size()
    placement = placement or Placement(num_ranks=num_ranks)
    # torch has no `sort_ranks` before 2.13, where one rank is all there may be (support.check_torch).
    against = num_ranks > 1 and not placement.is_v
    order: dict[str, Any] = {"ranks": list(reversed(range(num_ranks))), "sort_ranks": False} if against else {}
    group = dist.new_group(timeout=timeout, **order)
    control = group if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", timeout=timeout, **order)
    # Numbered from the last one, the stages run with the ranks; those of a V are where they were.
    backward = group if placement.is_v else dist.new_group(timeout=timeout)
    topology = Topology(
        group=group,
        backward_group=backward,
        control_group=control,
        rank=dist.get_rank(group),
        placement=placement,
        device=device,
        timeout=timeout,
    )
    closed_with(topology, [group, backward, control])
    return topology
