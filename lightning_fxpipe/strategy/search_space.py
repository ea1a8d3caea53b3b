"""Search space of ``balance="auto"``: all options that the user leaves open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch.distributed.distributed_c10d as dist
from torch import nn

from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.microbatch.split import count_samples
from lightning_fxpipe.planner.choice import Search, combinations, possible_counts
from lightning_fxpipe.schedules.by_name import SCHEDULES, ScheduleName
from lightning_fxpipe.simulation.by_name import SimulatedSchedule
from lightning_fxpipe.stages.memory import memory_for_rank

# Those that are fastest for some model: of the rest none is without needing more memory than one of these.
_WORTH_A_LOOK: tuple[SimulatedSchedule, ...] = (
    *("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv_zero_bubble", "v_half", "v_min"),
)
# Of the memory that is left: a simulation knows neither workspaces nor fragments.
_USABLE_SHARE = 0.9


def search_space(
    module: nn.Module,
    batch: Any,
    *,
    schedule: ScheduleName,
    splits: bool,
    stages_per_rank: int | Literal["auto"],
    num_microbatches: int | None,
    batch_dim: int,
    num_ranks: int,
    memory_bytes: tuple[int, ...],
    device_speeds: Sequence[float],
    optimizer_bytes_per_byte: float,
) -> Search:
    """Returns the options to choose from.

    Args:
        module: The LightningModule.
        batch: The first batch.
        splits: Whether gradients of weights may come later than those of inputs.
        schedule, stages_per_rank, num_microbatches, batch_dim: As the user says.
        num_ranks: Devices.
        memory_bytes: What each device has for its stages, by its rank; empty if unknown.
        device_speeds: How fast each is; empty where all are equal.
        optimizer_bytes_per_byte: What the optimizer keeps on a device for each byte of a parameter that trains.
    """
    num_samples = count_samples(batch, num_microbatches, batch_dim).num_samples
    return Search(
        num_ranks=num_ranks,
        num_samples=num_samples,
        combinations=combinations(
            [name for name in _WORTH_A_LOOK if splits or not SCHEDULES[name].splits] if schedule == "auto" else [schedule],
            possible_counts(module, num_samples, num_ranks, num_microbatches),
            None if stages_per_rank == "auto" else stages_per_rank,
            num_ranks,
        ),
        memory_bytes=memory_bytes,
        speeds=tuple(device_speeds),
        optimizer_bytes_per_byte=optimizer_bytes_per_byte,
    )


def memory_left(topology: Topology, num_processes: int) -> tuple[int, ...]:
    """Bytes that the stages of each rank may take on its device, by global rank in the first replica: the least of all
    replicas. Empty if unknown. Called by every rank.

    Args:
        topology: This rank's place.
        num_processes: Processes on this machine, of all replicas.
    """
    own = topology.placement.global_rank(topology.rank), memory_for_rank(topology.device, num_processes)
    told = [own] * topology.num_ranks * topology.replicas.count
    if len(told) > 1:
        dist.all_gather_object(told, own, group=topology.everyone)
    if any(free is None for _, free in told):
        return ()
    least = [min(free for at, free in told if at == rank and free is not None) for rank in range(topology.num_ranks)]
    return tuple(int(_USABLE_SHARE * free) for free in least)
