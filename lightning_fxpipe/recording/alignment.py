"""By how much the clocks of ranks on several machines differ, found by messages to and fro.

The rank with the last stage asks each other one for its time, a few times. Of each round trip it takes the middle for the
moment of the answer, which is wrong by half of the trip at most, whatever the way there and the way back take; the shortest
trip counts. A difference that is not larger than that error is taken for none: processes of one machine share a clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed.distributed_c10d as dist

from lightning_fxpipe.distributed.topology import Topology

_NUM_TRIPS = 8
# Told apart by it from other messages between the same ranks.
_TAG = 2


@dataclass(frozen=True)
class ClockOffset:
    """A rank's clock.

    Attributes:
        seconds: By how much it is ahead of that of the last stage's rank.
        error_seconds: By how much this may be wrong.
    """

    seconds: float
    error_seconds: float


def clock_offsets(topology: Topology) -> list[ClockOffset]:
    """The ranks' clocks, by pipeline rank; on the last stage's rank, and an empty list elsewhere. Called by every rank."""
    if topology.is_last:
        return [_asked(topology, topology.global_rank(rank)) for rank in range(topology.num_ranks)]
    for _ in range(_NUM_TRIPS):
        dist.recv(torch.zeros(1), topology.last_rank, topology.control_group, _TAG)
        now = torch.tensor([time.perf_counter()], dtype=torch.float64)
        dist.send(now, topology.last_rank, topology.control_group, _TAG)
    return []


def shortest(trips: list[tuple[float, float, float]]) -> ClockOffset:
    """Returns the clock offset that the shortest of several round trips shows.

    Args:
        trips: Of each the time when it began, the other rank's answer, and the time when it ended.
    """
    start, answer, end = min(trips, key=lambda trip: trip[2] - trip[0])
    offset, error = answer - (start + end) / 2, (end - start) / 2
    return ClockOffset(offset if abs(offset) > error else 0.0, error)


def _asked(topology: Topology, rank: int) -> ClockOffset:
    if rank == topology.last_rank:
        return ClockOffset(0.0, 0.0)
    trips = []
    for _ in range(_NUM_TRIPS):
        answer = torch.zeros(1, dtype=torch.float64)
        start = time.perf_counter()
        dist.send(torch.zeros(1), rank, topology.control_group, _TAG)
        dist.recv(answer, rank, topology.control_group, _TAG)
        trips.append((start, float(answer), time.perf_counter()))
    return shortest(trips)
