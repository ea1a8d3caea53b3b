"""Which rank holds which stage.

The last stage lives on global rank 0, where Lightning has its progress bar, loggers and the results of ``predict``; so the
stages run against the ranks. A process group with that order makes stage and rank in it the same number
(``sort_ranks=False``; a DeviceMesh would sort).
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed.distributed_c10d as dist

from lightning_fxpipe.distributed.groups import closed_with


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This rank's place in its pipeline.

    Attributes:
        group: Process group in which rank i holds stage i.
        control_group: Group with the same ranks for small messages between CPUs.
        stage_index: This rank's stage.
        num_stages: Stages of the pipeline.
        device: This rank's device.
        backward_group: Process group with the ranks of ``group`` in the reverse order.
        timeout: How long a rank waits for another.
    """

    group: dist.ProcessGroup | None
    control_group: dist.ProcessGroup | None
    stage_index: int
    num_stages: int
    device: torch.device
    backward_group: dist.ProcessGroup | None = None
    timeout: timedelta | None = None
    _parts: dict[Any, dist.ProcessGroup] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Topology:
        """Itself: process groups belong to this process, and cannot be copied."""
        return self

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.stage_index == self.last_stage

    @property
    def last_stage(self) -> int:
        """The stage where the model's result is."""
        return self.num_stages - 1

    @property
    def last_rank(self) -> int:
        """Global rank that holds the last stage."""
        return self.rank_of(self.last_stage)

    def rank_of(self, stage: int) -> int:
        """Global rank that holds a stage."""
        return self.last_stage - stage

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
_Key = tuple[torch.device, timedelta | None]
_in_use: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, tuple[list[int], Topology]]] = WeakKeyDictionary()


def shared_topology(device: torch.device, timeout: timedelta, num_failed_runs: int) -> Topology:
    """The pipeline over all ranks, made once for all runs of the process. Called by every rank at the same time.

    Ranks that a failed run has left may have stopped at different places, with messages in between that nobody has taken. So
    the runs that follow have other process groups.

    Args:
        device: This rank's device.
        timeout: How long a rank waits for another.
        num_failed_runs: How many runs have failed on this rank.
    """
    failed = [num_failed_runs] * dist.get_world_size()
    dist.all_gather_object(failed, num_failed_runs)
    assert dist.group.WORLD is not None
    known = _in_use.setdefault(dist.group.WORLD, {})
    if (device, timeout) in known and known[device, timeout][0] != failed:
        del known[device, timeout]
        gc.collect()  # what has failed holds its groups, and is a Trainer, which refers to itself
    if (device, timeout) not in known:
        known[device, timeout] = failed, make_topology(device, timeout)
    return known[device, timeout][1]


def make_topology(device: torch.device, timeout: timedelta | None = None) -> Topology:
    """One pipeline over all ranks. Called by every rank, with the default process group initialised."""
    num_stages = dist.get_world_size()
    # torch has no `sort_ranks` before 2.13, where one rank is all there may be (support.check_torch).
    order: dict[str, Any] = {"ranks": list(reversed(range(num_stages))), "sort_ranks": False} if num_stages > 1 else {}
    group = dist.new_group(timeout=timeout, **order)
    control = group if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", timeout=timeout, **order)
    backward = dist.new_group(timeout=timeout)  # in the order of the ranks, against which the stages run
    topology = Topology(
        group=group,
        backward_group=backward,
        control_group=control,
        stage_index=dist.get_rank(group),
        num_stages=num_stages,
        device=device,
        timeout=timeout,
    )
    closed_with(topology, [group, backward, control])
    return topology
