"""What the last stage's rank, which alone runs the whole step, tells the others to do."""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.distributed.distributed_c10d as dist

from lightning_fxpipe.distributed.topology import Topology


class Command(IntEnum):
    """What comes next."""

    DONE = 0
    BACKWARD = 1
    INSTALL = 2  # the gradients of a batch that has run forward and backward
    FORWARD = 3  # such a batch once more, for its results


class Commands:
    """A channel from the rank with the last stage to all others.

    Args:
        topology: This rank's place.
    """

    def __init__(self, topology: Topology) -> None:
        self._group = topology.control_group if topology.num_stages > 1 else None
        self._source = topology.last_rank

    def tell(self, command: Command, number: int = 0, option: float = 0) -> None:
        """Called on the last stage; every other rank calls :meth:`hear`."""
        if self._group is not None:
            dist.broadcast(torch.tensor([command, number, option], dtype=torch.float64), src=self._source, group=self._group)

    def hear(self) -> tuple[Command, int, float]:
        """The next command."""
        assert self._group is not None
        message = torch.zeros(3, dtype=torch.float64)
        dist.broadcast(message, src=self._source, group=self._group)
        command, number, option = message.tolist()
        return Command(int(command)), int(number), float(option)
