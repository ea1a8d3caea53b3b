"""Which rank holds which stage, of which replica.

The ranks are a mesh of two axes: D replicas of a pipeline of P ranks, replica d on the global ranks d P to (d + 1) P - 1. So
the ranks of a pipeline, which talk to each other for every microbatch, are neighbours, on one machine where that has as many;
the replicas, which talk once for each optimizer step, may be on several.

Within a pipeline the last stage lives on its first global rank: of the first replica that is rank 0, where Lightning has its
progress bar, loggers and the results of ``predict``. So the stages run against the ranks, unless they come back in a V, which
ends where it began. The *pipeline rank* counts with the stages, as the lines of a schedule table do; process groups have the
order of the global ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed.distributed_c10d as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_fxpipe.distributed.groups import closed_with
from lightning_fxpipe.errors import UnsupportedError

# The axes of the mesh that user code gets: as of Lightning's ModelParallelStrategy, with stages in place of parts of tensors.
MESH_AXES = ("data_parallel", "pipeline")


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

    def global_rank(self, rank: int, replica: int = 0) -> int:
        """Global rank of a pipeline rank of a replica."""
        return replica * self.num_ranks + (rank if self.is_v else self.num_ranks - 1 - rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a pipeline rank has, in their order."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    @property
    def by_rank(self) -> list[tuple[int, ...]]:
        """The stages of each global rank of the first replica."""
        places = sorted(range(self.num_ranks), key=self.global_rank)
        return [self.stages_of(place) for place in places]


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The axis of replicas: pipelines that train the same model on other batches.

    Attributes:
        count: How many there are, D.
        index: Which of them this rank is in.
        group: Group of the ranks that have this rank's stages, by replica; None where there is one replica.
        control_group: The same ranks, for small messages between CPUs.
        everyone: All ranks of all replicas, for small messages between CPUs; None where there is one replica.
    """

    count: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None
    everyone: dist.ProcessGroup | None = None

    @property
    def are_several(self) -> bool:
        """True if there are others."""
        return self.count > 1

    @property
    def is_first(self) -> bool:
        """True if this rank is in the replica that writes what is written once."""
        return self.index == 0


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This rank's place in its pipeline.

    Attributes:
        group: Process group with the pipeline's ranks; carries what stages send to a higher pipeline rank.
        control_group: Group with the same ranks for small messages between CPUs.
        rank: This process's pipeline rank.
        placement: Which rank has which stages.
        device: This rank's device.
        backward_group: Group with the same ranks; carries what stages send to a lower pipeline rank.
        timeout: How long a rank waits for another.
        replicas: The pipelines beside this one.
    """

    group: dist.ProcessGroup | None
    control_group: dist.ProcessGroup | None
    rank: int
    placement: Placement
    device: torch.device
    backward_group: dist.ProcessGroup | None = None
    timeout: timedelta | None = None
    replicas: Replicas = Replicas()
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
        """True if this rank holds the last stage."""
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

    @property
    def can_skip(self) -> bool:
        """True if stages may send past others. gloo tells messages apart by tags; NCCL does what two ranks exchange one after
        the other, so that a message to a far stage could hold up the one that this stage waits for.
        """
        return self.num_ranks == 1 or self.control_group is self.group

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """All ranks of all replicas, for small messages between CPUs."""
        return self.replicas.everyone if self.replicas.are_several else self.control_group

    @property
    def first_rank(self) -> int:
        """The least global rank of the pipeline."""
        return self.replicas.index * self.num_ranks

    def global_rank(self, rank: int) -> int:
        """Global rank of a pipeline rank."""
        return self.placement.global_rank(rank, self.replicas.index)

    @property
    def rank_to_users(self) -> int:
        """This rank's number where user code asks for it: the replica's on the rank that ends steps, as if that were the only
        one; the other ranks' numbers follow after these. With one replica it is the global rank.
        """
        return self.replicas.index + self.replicas.count * (self.global_rank(self.rank) - self.first_rank)

    def ranks_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Global ranks that hold some stages, each once, in the stages' order."""
        return tuple(dict.fromkeys(map(self.rank_of, stages)))

    def holds_any(self, stages: Iterable[int]) -> bool:
        """Returns True if this rank has one of some stages."""
        return any(stage in self.stages for stage in stages)

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The ranks, by replica and in the pipeline, where the first has the last stage. First asked for by every rank."""
        mesh = torch.arange(self.replicas.count * self.num_ranks).view(-1, self.num_ranks)
        group = self.replicas.group
        if group is None:  # there is one replica: a group of this rank alone, which all ranks make, or names would clash
            alone = [dist.new_group([rank], self.timeout) for rank in range(dist.get_world_size())]
            group = alone[dist.get_rank()]
            closed_with(self, [group])
        assert self.group is not None
        return DeviceMesh.from_group([group, self.group], self.device.type, mesh, mesh_dim_names=MESH_AXES)

    def group_of(self, ranks: Iterable[int], *, controls: bool = False) -> dist.ProcessGroup:
        """A group of some of the pipeline's ranks, made once. Called by every rank of every replica, with those of the same
        stages in the same order of calls.

        Args:
            ranks: Global ranks.
            controls: Whether it is for small messages between CPUs.
        """
        key = (*sorted(ranks),), controls and self.control_group is not self.group
        if key not in self._parts:
            members, needs_gloo = key
            backend = "gloo" if needs_gloo else None
            for replica in range(self.replicas.count):  # all ranks make the groups of all
                shift = replica * self.num_ranks - self.first_rank
                found = dist.new_group([rank + shift for rank in members], self.timeout, backend=backend)
                if not shift:
                    self._parts[key] = found
                if isinstance(found, dist.ProcessGroup):  # else this rank is no member
                    closed_with(self, [found])
        return self._parts[key]


# The process groups are the process's: runs one after the other have the same ones, whatever strategies they have.
_Key = tuple[torch.device, timedelta | None, Placement]
_in_use: WeakKeyDictionary[dist.ProcessGroup, dict[_Key, tuple[list[int], Topology]]] = WeakKeyDictionary()


def shared_topology(device: torch.device, timeout: timedelta, placement: Placement, num_failed_runs: int) -> Topology:
    """The pipelines over all ranks, made once for all runs of the process. Called by every rank at the same time.

    Ranks that a failed run has left may have stopped at different places, with messages in between that were not received. So
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
            "The ranks of the pipeline disagree on the placement of stages.",
            observed="; ".join(f"rank {rank}: {theirs}" for rank, (_, theirs) in enumerate(told)),
            expected="the same options, plan and schedule table on every rank",
            todo="Pass the same options in all processes, and copy the same files to all machines.",
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
    """Makes as many pipelines as there are ranks for. Called by every rank, with the default process group initialised.

    Args:
        device: This rank's device.
        timeout: How long a rank waits for another.
        placement: Which rank of a pipeline has which stages; None: there is one, and each rank has one.
    """
    world_size = dist.get_world_size()
    placement = placement or Placement(num_ranks=world_size)
    num_ranks = placement.num_ranks
    made: list[dist.ProcessGroup] = []

    def new_group(ranks: Sequence[int], *, controls: bool = False) -> dist.ProcessGroup | None:
        """This rank's group, if it is one of them."""
        found = dist.new_group([*ranks], timeout, backend="gloo" if controls else None)
        if not isinstance(found, dist.ProcessGroup):
            return None
        made.append(found)
        return found

    pipelines = [range(first, first + num_ranks) for first in range(0, world_size, num_ranks)]
    is_gloo = dist.get_backend() == "gloo"
    (group,) = filter(None, map(new_group, pipelines))
    control = backward = group
    if not is_gloo:
        # NCCL does one after the other what two ranks exchange in a group, in both directions.
        (backward,) = filter(None, map(new_group, pipelines))
        (control,) = filter(None, [new_group(ranks, controls=True) for ranks in pipelines])
    own = dist.get_rank() % num_ranks
    topology = Topology(
        group=group,
        backward_group=backward,
        control_group=control,
        rank=next(place for place in range(num_ranks) if placement.global_rank(place) == own),
        placement=placement,
        device=device,
        timeout=timeout,
        replicas=_replicas(pipelines, new_group, is_gloo=is_gloo) if len(pipelines) > 1 else Replicas(),
    )
    closed_with(topology, made)
    return topology


def _replicas(pipelines: Sequence[range], new_group: Callable[..., dist.ProcessGroup | None], *, is_gloo: bool) -> Replicas:
    """The axis of replicas. Called by every rank."""
    across = [*zip(*pipelines, strict=True)]
    (group,) = filter(None, [new_group(ranks) for ranks in across])
    control = group
    if not is_gloo:
        (control,) = filter(None, [new_group(ranks, controls=True) for ranks in across])
    return Replicas(
        count=len(pipelines),
        index=next(index for index, ranks in enumerate(pipelines) if dist.get_rank() in ranks),
        group=group,
        control_group=control,
        everyone=new_group(range(dist.get_world_size()), controls=True),
    )
