"""Where a rank's stages are in a pass of microbatches through all ranks, and how what they do there is noted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_fxpipe.recording.recorder import Recorder
from lightning_fxpipe.simulation.actions import FORWARD, Action, Kind
from lightning_fxpipe.stages.build import TensorSpec

_NOTHING = nullcontext()

# Computes one microbatch of a stage, from the stage, the microbatch's index and what was received, which is its own. Returns
# what is sent; of the last place a scalar.
RunMicrobatch = Callable[[int, int, tuple[Tensor, ...]], "Tensor | tuple[Tensor, ...]"]


@dataclass(frozen=True, kw_only=True)
class Noting:
    """How the actions of a pass are noted.

    Attributes:
        recorder: Notes them, while a step is recorded.
        first: Number in the batch of the first of the pass's microbatches.
        kind: What a pass that goes one way does; None for one that goes both.
    """

    recorder: Recorder
    first: int
    kind: Kind | None

    def action(self, stage: int, computes: str, index: int) -> AbstractContextManager[None]:
        """In the block a stage computes something, as torch writes it, for a microbatch of the pass."""
        if self.kind is not None and computes != FORWARD.value:
            return _NOTHING  # of a table of actions forward and back, half of which do nothing
        return self.recorder.undivided(Action(stage, self.kind or Kind(computes), self.first + index))


@dataclass(frozen=True, kw_only=True)
class SkipEnd:
    """An end of a skip: a place that a tensor comes to, or leaves from, past those in between.

    Attributes:
        number: Of the skip in the pass; the same at both ends.
        rank: Rank in the group at the other end; None for this one.
        spec: Of the tensor.
    """

    number: int
    rank: int | None
    spec: TensorSpec


@dataclass(frozen=True, kw_only=True)
class Place:
    """One of a rank's stages in a pass.

    Attributes:
        stage: The stage.
        index: Its number on the way of the pass.
        received: Specs of the tensors received from the place before; empty for the first.
        sent: Specs of the tensors sent to the next place; None for the last.
        parameters: Those whose gradients the stage computes, where they may come later than those of its inputs; else None.
        skips_in: What comes past the place before, besides; the stage gets it first.
        skips_out: What goes past the next place, besides; the stage gives it first.
    """

    stage: int
    index: int
    received: tuple[TensorSpec, ...]
    sent: tuple[TensorSpec, ...] | None
    parameters: tuple[nn.Parameter, ...] | None = None
    skips_in: tuple[SkipEnd, ...] = ()
    skips_out: tuple[SkipEnd, ...] = ()
