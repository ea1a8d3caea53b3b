"""What goes past places of a pass: directly from the place that has it to the one that uses it (``planner.skips``).

Schedules know neighbours only. So a skip is no part of them: what runs a microbatch takes what has come by skips to what comes
from the place before, and keeps from what it gives to the next place what leaves by skips. Where torch runs backward, too, the
tensors that have come are leaves of the place's graph, those that have left are among its results, and their gradients go the
same way back.

Nobody waits for a message before it is used. It has a number of its own, the *tag*, by which gloo tells messages between the
same two ranks apart, in whatever order they are sent and asked for. NCCL has none; there what crosses several cuts goes from
stage to stage (``Topology.can_skip``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor

from lightning_fxpipe.schedules.places import Place, RunMicrobatch, SkipEnd

_Key = tuple[int, int]  # number of a skip, and a microbatch

# Small messages have tags below, in the same group, and somebody may be waiting for one (`distributed.commands`).
_FIRST_TAG = 1 << 16


class SkipMessages:
    """Messages of the skips of a pass, in one direction, on one rank.

    Args:
        num_microbatches: Microbatches in one pass.
        device: Device of the received tensors.
        group: Process group whose ranks the ends name.
        num_kept: How many microbatches' messages may be under way from an end before the oldest of them is waited for; None:
            any number, until :meth:`finish`.
    """

    def __init__(
        self, *, num_microbatches: int, device: torch.device, group: dist.ProcessGroup | None, num_kept: int | None = None
    ) -> None:
        self._num_microbatches = num_microbatches
        self._device = device
        self._group = group
        self._num_kept = num_kept
        # A message between CPUs begins to arrive when somebody asks for it; see `OneWay`.
        self._asks_ahead = device.type == "cpu"
        self._here: dict[_Key, Tensor] = {}  # from a stage of this rank
        self._coming: dict[_Key, tuple[Tensor, dist.Work | None]] = {}
        self._asked: set[_Key] = set()  # in this pass
        self._sent: dict[int, deque[dist.Work | None]] = {}

    def ask(self, ends: Sequence[SkipEnd], index: int) -> None:
        """Lets a microbatch's messages come, if there is such a microbatch: once in a pass, in whatever order it takes
        microbatches. Whoever asks for a message that has been here takes it from the next pass."""
        for end in ends:
            key = end.number, index
            if end.rank is not None and index < self._num_microbatches and key not in self._asked:
                self._asked.add(key)
                buffer = torch.empty(end.spec.shape, dtype=end.spec.dtype, device=self._device)
                work = dist.irecv(buffer, group=self._group, group_src=end.rank, tag=self._tag(key))
                self._coming[key] = buffer, work

    def receive(self, ends: Sequence[SkipEnd], index: int) -> list[Tensor]:
        """What a microbatch's messages bring, when it is here."""
        self.ask(ends, index)
        if self._asks_ahead:
            self.ask(ends, index + 1)
        found = []
        for end in ends:
            key = end.number, index
            if end.rank is None:
                found.append(self._here.pop(key))
                continue
            buffer, work = self._coming.pop(key)
            if work is not None:
                work.wait()
            found.append(buffer)
        return found

    def send(self, ends: Sequence[SkipEnd], index: int, tensors: Sequence[Tensor]) -> None:
        """Sends what a microbatch has for each end."""
        for end, tensor in zip(ends, tensors, strict=True):
            key = end.number, index
            if end.rank is None:
                self._here[key] = tensor
                continue
            sent = self._sent.setdefault(end.number, deque())
            if self._num_kept is not None and len(sent) >= self._num_kept:
                _wait(sent.popleft())
            sent.append(dist.isend(tensor, group=self._group, group_dst=end.rank, tag=self._tag(key)))

    def finish(self) -> None:
        """Ends a pass. Waits until all that was sent is on its way: then its memory may be given back."""
        assert not self._coming
        assert not self._here
        self._asked.clear()
        for sent in self._sent.values():
            while sent:
                _wait(sent.popleft())

    def _tag(self, key: _Key) -> int:
        number, index = key
        return _FIRST_TAG + number * self._num_microbatches + index


def around(run: RunMicrobatch, places: Mapping[int, Place], messages: SkipMessages) -> RunMicrobatch:
    """Runs microbatches of a pass that goes one way, with what goes past places.

    Args:
        run: Computes one microbatch of a stage, from all that comes to it.
        places: The rank's places, by their stage.
        messages: Carries the skips.
    """

    def run_with_skips(stage: int, index: int, received: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        place = places[stage]
        outputs = run(stage, index, (*messages.receive(place.skips_in, index), *received))
        if not place.skips_out:
            return outputs
        assert isinstance(outputs, tuple)
        num_out = len(place.skips_out)
        messages.send(place.skips_out, index, outputs[:num_out])
        return outputs[num_out:]

    return run_with_skips


class SkipGradients:
    """The skips of one place where torch runs backward, too.

    Args:
        place: The place.
        onward: Messages forward.
        back: Messages backward.
    """

    def __init__(self, place: Place, onward: SkipMessages, back: SkipMessages) -> None:
        self._place = place
        self._onward = onward
        self._back = back
        self._trained_in = [end for end in place.skips_in if end.spec.requires_grad]
        self._trained_out = [end for end in place.skips_out if end.spec.requires_grad]
        self._leaves: dict[int, list[Tensor]] = {}  # by microbatch
        self._results: dict[int, list[Tensor]] = {}

    def receive(self, index: int) -> list[Tensor]:
        """What has come for a microbatch, as leaves of its graph."""
        ends = self._place.skips_in
        found = self._onward.receive(ends, index)
        # What another stage of this rank has is that stage's own.
        leaves = [t.detach().requires_grad_(end.spec.requires_grad) for t, end in zip(found, ends, strict=True)]
        self._leaves[index] = [leaf for leaf in leaves if leaf.requires_grad]
        return leaves

    def send(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Sends what a microbatch has computed for later places."""
        ends = self._place.skips_out
        self._onward.send(ends, index, [tensor.detach() for tensor in tensors])
        self._results[index] = [tensor for tensor, end in zip(tensors, ends, strict=True) if end.spec.requires_grad]

    def extended(self, index: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What torch is to differentiate, with the skips of a microbatch: results, their gradients, and inputs."""
        results, found = self._results.pop(index, []), dict(arguments)
        if results:
            found["stage_output"] = (*found["stage_output"], *results)
            found["output_grads"] = (*found["output_grads"], *self._back.receive(self._trained_out, index))
        found["input_values"] = [*found["input_values"], *self._leaves[index]]
        return found

    def send_back(self, index: int, gradients: Sequence[Tensor | None]) -> None:
        """Sends the gradients of what had come for a microbatch; zeros where it has none."""
        leaves = self._leaves.pop(index)
        found = [
            torch.zeros_like(leaf) if gradient is None else gradient.contiguous()
            for leaf, gradient in zip(leaves, gradients, strict=True)
        ]
        self._back.send(self._trained_in, index, found)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
