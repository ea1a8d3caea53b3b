"""Commands of the last stage's rank, which alone runs the whole step, to the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor

from lightning_fxpipe._compat.torch import unprofiled

# Numbers that travel with a command.
MAX_NUMBERS = 63
_WORD_BITS = 48  # of the 53 that a number has
# Messages are told apart by it from those of the stages, which have 0.
_TAG = 1


class Command(IntEnum):
    """Kinds of commands."""

    DONE = 0  # with the backward pass; a number is the factor of the gradients that an interleaved batch has parked
    BACKWARD = 1  # through the stages; a number says whether what they saved is kept for one more, others which results count
    FORWARD = 2  # once more with an interleaved batch, for its results
    RESULT = 3  # of a step


class Commands:
    """A channel from the rank with the last stage to all others. Made by every rank of the pipeline.

    The last stage does not wait until the others have heard, and a command arrives while they do something else, if they expect
    it. So these are messages from rank to rank: of gloo's collectives neither is true.

    Args:
        group: A group for CPU tensors with all ranks of the pipeline; None without a process group.
        source: Global rank of the last stage.
        waiting: In its context a rank waits for a command.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        source: int,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._waiting = waiting
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.source = source
        self._under_way: list[tuple[Tensor, dist.Work | None]] = []  # memory must stay until it has arrived
        self._next: tuple[Command, list[float]] | None = None  # heard, and not yet taken

    @property
    def is_source(self) -> bool:
        """True if this rank tells, and the others hear."""
        return self.group is None or dist.get_rank() == self.source

    def tell(self, command: Command, *numbers: float) -> None:
        """Called on the last stage, with at most ``MAX_NUMBERS``; every other rank calls :meth:`hear`."""
        if self.group is None:
            return
        self._wait()
        message = _blank()
        message[: 2 + len(numbers)] = torch.tensor([command, len(numbers), *numbers], dtype=torch.float64)
        others = [rank for rank in dist.get_process_group_ranks(self.group) if rank != self.source]
        with unprofiled():  # it ends with the next command
            self._under_way = [(message, dist.isend(message, rank, self.group, _TAG)) for rank in others]

    def expect(self) -> None:
        """Called before other work by a rank that will hear: the next command arrives meanwhile."""
        if self.group is not None and not self.is_source and not self._under_way and self._next is None:
            message = _blank()
            with unprofiled():  # it ends when the last stage has something to tell
                self._under_way = [(message, dist.irecv(message, self.source, self.group, _TAG))]

    def hear(self) -> tuple[Command, list[float]]:
        """The next command, with its numbers."""
        found, self._next = self._next or self._receive(), None
        return found

    def hears_of(self, command: Command) -> bool:
        """Returns True if the next command is this one, which is heard then; another is left to :meth:`hear`."""
        self._next = self._next or self._receive()
        if self._next[0] is not command:
            return False
        self._next = None
        return True

    def settle(self) -> None:
        """Called on the last stage before the ranks part: what it has told is on its way no more."""
        if self.is_source:
            self._wait()

    def _receive(self) -> tuple[Command, list[float]]:
        self.expect()
        with self._waiting():
            command, count, *numbers = self._wait()[0].tolist()
        return Command(int(command)), numbers[: int(count)]

    def _wait(self) -> list[Tensor]:
        """Waits for the messages that are under way, and returns them."""
        under_way, self._under_way = self._under_way, []
        for _, work in under_way:
            if work is not None:
                work.wait()
        return [message for message, _ in under_way]


def as_bits(numbers: Collection[int]) -> list[int]:
    """A set of numbers as bits of a few integers that floats represent exactly."""
    num_words = max(numbers, default=0) // _WORD_BITS + 1
    return [sum(1 << number % _WORD_BITS for number in numbers if number // _WORD_BITS == word) for word in range(num_words)]


def from_bits(words: Sequence[float]) -> frozenset[int]:
    """The set that :func:`as_bits` has written."""
    return frozenset(
        word * _WORD_BITS + bit for word, bits in enumerate(words) for bit in range(_WORD_BITS) if int(bits) >> bit & 1
    )


def _blank() -> Tensor:
    return torch.zeros(2 + MAX_NUMBERS, dtype=torch.float64)
