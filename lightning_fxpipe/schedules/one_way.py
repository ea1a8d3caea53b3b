"""A pass that goes one way, with one stage on each rank: every microbatch is received, computed and sent on.

torch's schedule for it (GPipe, without backward) does the same for each microbatch, and besides makes notes for a profiler,
flattens arguments, words messages for a log that is off, and goes through a backward pass that does nothing. On CPUs that is
a tenth of a millisecond of each microbatch, on every rank that the others wait for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor

from lightning_fxpipe.schedules.places import Noting, Place, RunMicrobatch
from lightning_fxpipe.simulation.actions import FORWARD

# What may be asked for between CPUs before its turn, besides the next microbatch. A sender holds a message back until told that
# somebody waits, which takes longer than a small microbatch on busy cores. More than that would only be memory.
AHEAD_BYTES = 1024 * 1024


class OneWay:
    """One rank's part.

    Args:
        place: The rank's stage in the pass; the places beside it are those of the ranks beside it in the group.
        num_microbatches: Microbatches in one call of :meth:`step`.
        device: Device of the received tensors.
        group: Process group whose ranks are the places, in their order.
        noting: How its actions are noted; None: they are not.
    """

    def __init__(
        self,
        place: Place,
        *,
        num_microbatches: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        noting: Noting | None,
    ) -> None:
        self._place = place
        self._num_microbatches = num_microbatches
        self._device = device
        self._group = group
        self._noting = noting
        # A message between CPUs begins to arrive when somebody waits for it: the next one while this one is computed. Those
        # between GPUs follow one another, and one that is sent would wait for the one that is to come.
        num_bytes = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in place.received)
        self._num_ahead = max(1, AHEAD_BYTES // max(1, num_bytes)) if device.type == "cpu" else 0

    def step(self, run: RunMicrobatch) -> None:
        """Runs all microbatches. Called by every rank of the group.

        Args:
            run: Computes one microbatch of a stage.
        """
        noting = self._noting if self._noting is not None and self._noting.recorder.is_in_step else None
        with nullcontext() if noting is None else noting.recorder.waiting():
            self._run(run, noting)

    def _run(self, run: RunMicrobatch, noting: Noting | None) -> None:
        place, count = self._place, self._num_microbatches
        coming: deque[_Messages] = deque()
        sent: list[_Messages] = []
        num_asked = 0
        for index in range(count):
            while num_asked < min(index + 1 + self._num_ahead, count):
                coming.append(self._receive())
                num_asked += 1
            received = coming.popleft().wait()
            if noting is None:
                outputs = run(place.stage, index, received)
            else:
                with noting.action(place.stage, FORWARD.value, index):
                    outputs = run(place.stage, index, received)
            del received
            if place.sent is not None:
                sent.append(self._send((outputs,) if isinstance(outputs, Tensor) else outputs))
            del outputs
        for messages in sent:
            messages.wait()

    def _receive(self) -> _Messages:
        place = self._place
        buffers = [torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in place.received]
        return _Messages(buffers, [dist.irecv(buffer, group=self._group, group_src=place.index - 1) for buffer in buffers])

    def _send(self, tensors: Sequence[Tensor]) -> _Messages:
        after = self._place.index + 1
        return _Messages((), [dist.isend(tensor, group=self._group, group_dst=after) for tensor in tensors])


class _Messages:
    """Messages of one microbatch that are under way.

    Args:
        tensors: What they bring.
        works: Their ends.
    """

    def __init__(self, tensors: Sequence[Tensor], works: Sequence[dist.Work | None]) -> None:
        self._tensors = tensors
        self._works = works

    def wait(self) -> tuple[Tensor, ...]:
        """What they have brought, when it is here."""
        for work in self._works:
            if work is not None:
                work.wait()
        return tuple(self._tensors)
