r"""Runs the program of one rank: starts receives, computes, and sends.

What an action computes is not known here: the caller gives a function that takes what has come for the action, and returns what
goes on from there. So one loop runs forward passes, backward passes, and both at once.

Two stages on two ranks and two microbatches, with 1F1B. Each line is a call; time goes down, and arrows are messages.

    rank 0 (stage 0)                            rank 1 (stage 1)

                                                _start(0F0's results)
    compute(0F0, ())                            _finish                 waits
    _send  ------------------------------->     compute(1F0, (x,))
    _start(1B0's gradients)                     _start(0F1's results)
    compute(0F1, ())                            compute(1B0, ())
    _send  ---------------------------.   .---  _send
    _finish  <-------------------------\\--'
    _start(1B1's gradients)             \\
    _complete(0F0's results)             '-->   _finish
    compute(0B0, (gradient,))                   compute(1F1, (x,))
                                                compute(1B1, ())
    _finish  <--------------------------------  _send
    compute(0B1, (gradient,))                   _complete, at the end
    _complete, at the end
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.pytree.sizes import as_bytes
from lightning_fxpipe.recording.recorder import Recorder
from lightning_fxpipe.schedules.program import Message, Program, Value
from lightning_fxpipe.simulation.actions import WEIGHT_BACKWARD, Action
from lightning_fxpipe.stages.build import TensorSpec

# Computes an action from what has arrived for it, which it may keep: in a forward the tensors of the edges into the stage, in a
# backward the gradients of those out of it. Returns the tensors of the edges out of the stage, or the gradients of those into
# it, without a graph of autograd. Edges that do not train have no gradients.
Compute = Callable[[Action, tuple[Tensor, ...]], Sequence[Tensor]]
_UnderWay = tuple[Sequence[Tensor], list["dist.Work | None"]]


class Channels:
    """The process groups that carry messages between the ranks of a pipeline. Made by every rank.

    NCCL runs the messages of two ranks in one group one after the other. So each direction has a group of its own. NCCL also
    connects two ranks at their first message, and both wait for that. So ranks are connected before the first pass: a receive
    that starts early would wait for a rank that cannot send yet.

    Args:
        onward: To a higher rank; None for a single rank without a process group.
        back: To a lower rank.
        global_ranks: Of each rank of the pipeline the global one.
    """

    def __init__(
        self, *, onward: dist.ProcessGroup | None, back: dist.ProcessGroup | None, global_ranks: Sequence[int]
    ) -> None:
        self._onward = onward
        self._back = back
        self._global_ranks = global_ranks
        self._connected: set[tuple[int, int]] = set()

    def connect(self, pairs: Sequence[tuple[int, int]], rank: int, device: torch.device) -> None:
        """Connects this rank to others, once. Called by all of these.

        Args:
            pairs: The sending and the receiving rank of each connection, in an order that all ranks have.
            rank: This one.
            device: Of what is sent.
        """
        for pair in pairs:
            if pair not in self._connected:
                source, target = pair
                greeting = torch.zeros(1, device=device)
                _wait([self.send(greeting, source, target) if rank == source else self.receive(greeting, source, target)])
                self._connected.add(pair)

    def send(self, tensor: Tensor, source: int, target: int) -> dist.Work | None:
        """Starts to send a contiguous tensor."""
        return dist.isend(tensor, self._global_ranks[target], self._group(source, target))

    def receive(self, buffer: Tensor, source: int, target: int) -> dist.Work | None:
        """Starts to receive into a contiguous tensor."""
        return dist.irecv(buffer, self._global_ranks[source], self._group(source, target))

    def _group(self, source: int, target: int) -> dist.ProcessGroup | None:
        return self._onward if source < target else self._back


@dataclass(frozen=True, kw_only=True)
class PassRecording:
    """Records the actions of a pass.

    Attributes:
        recorder: This rank's.
        first: Number in the batch of the first of the pass's microbatches.
    """

    recorder: Recorder
    first: int

    def running(self, action: Action) -> AbstractContextManager[None]:
        """In the block an action of the pass runs."""
        return self.recorder.undivided(replace(action, microbatch=self.first + action.microbatch))


class Executor:
    """One rank's part of a pass of microbatches through all ranks.

    Args:
        program: What the rank does.
        device: Device of the received tensors.
        channels: Carry the messages.
        recording: Records the actions, while a step is recorded; None: nothing does.
    """

    def __init__(
        self, program: Program, *, device: torch.device, channels: Channels, recording: PassRecording | None = None
    ) -> None:
        self._program = program
        self._device = device
        self._channels = channels
        self._recording = recording
        self._has_failed = False
        self._values: dict[Value, Tensor] = {}
        self._coming: dict[Message, _UnderWay] = {}
        self._going: dict[Message, _UnderWay] = {}

    @property
    def splits_backward(self) -> bool:
        """True if gradients of weights are computed by actions of their own."""
        return any(step.action.kind is WEIGHT_BACKWARD for step in self._program.steps)

    def step(self, compute: Compute) -> None:
        """Runs all microbatches. Called by every rank of the pipeline.

        Args:
            compute: Computes an action.

        Raises:
            UnsupportedError: A step before has failed: messages of it may be under way.
            Exception: What ``compute`` raises, as it is.
        """
        if self._has_failed:
            raise UnsupportedError(
                "The pipeline cannot continue after a failed step.",
                todo="Create a new Trainer and module, and resume from a checkpoint.",
            )
        self._has_failed = True
        self._channels.connect(self._program.pairs, self._program.rank, self._device)
        recording = self._recording if self._recording is not None and self._recording.recorder.is_in_step else None
        with nullcontext() if recording is None else recording.recorder.waiting():
            self._run(compute if recording is None else _recorded(compute, recording))
        assert not (self._values or self._coming or self._going)
        self._has_failed = False

    def _run(self, compute: Compute) -> None:
        values = self._values
        for step in self._program.steps:
            for message in step.starts:
                self._start(message)
            for message in step.receives:
                self._finish(message)
            for message in step.completes:
                self._complete(message)
            outputs = compute(step.action, tuple([values.pop(value) for value in step.inputs]))
            values.update(zip(step.outputs, outputs, strict=True))
            del outputs
            for message in step.sends:
                self._send(message)
        for message in self._program.leftover:
            self._complete(message)

    def _start(self, message: Message) -> None:
        """Starts to receive a message."""
        specs = self._specs(message)
        buffers = [spec.empty(self._device) for spec in specs]
        memory = [self._sendable(spec.packed(buffer)) for spec, buffer in zip(specs, buffers, strict=True)]
        receive, ends = self._channels.receive, (message.source, message.target)
        self._coming[message] = buffers, [receive(tensor, *ends) for tensor in memory]

    def _finish(self, message: Message) -> None:
        """Waits until a message is here."""
        buffers, works = self._coming.pop(message)
        _wait(works)
        self._values.update(zip(message.values, buffers, strict=True))

    def _send(self, message: Message) -> None:
        """Starts to send a message."""
        values = zip(self._specs(message), message.values, strict=True)
        tensors = [self._sendable(spec.packed(self._values.pop(value))) for spec, value in values]
        send, ends = self._channels.send, (message.source, message.target)
        self._going[message] = tensors, [send(tensor, *ends) for tensor in tensors]

    def _complete(self, message: Message) -> None:
        """Gives the memory of a sent message back."""
        _wait(self._going.pop(message)[1])

    def _specs(self, message: Message) -> list[TensorSpec]:
        return [self._program.edges[value.edge].spec for value in message.values]

    def _sendable(self, tensor: Tensor) -> Tensor:
        """Returns the same memory with a dtype that the transport knows: NCCL lacks many."""
        return as_bytes(tensor) if self._device.type != "cpu" else tensor


def _recorded(compute: Compute, recording: PassRecording) -> Compute:
    def recorded(action: Action, received: tuple[Tensor, ...]) -> Sequence[Tensor]:
        with recording.running(action):
            return compute(action, received)

    return recorded


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
