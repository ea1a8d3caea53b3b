"""Seconds and bytes of a stage's actions, and what a transfer between ranks takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_fxpipe.simulation.actions import Kind


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Costs of one stage for one microbatch.

    Attributes:
        forward_seconds: Of its forward.
        input_backward_seconds, weight_backward_seconds: Of its two backward parts; a whole backward takes both.
        activation_bytes: What its forward keeps until its backward.
        weight_bytes: Of that, what is kept from the backward of the inputs to that of the weights.
        output_bytes: What it sends to the next stage, and gets back as gradients.
        skips: What it sends past the next stage, and gets back: pairs of the stage that it goes to, and bytes.
        state_bytes: Its parameters, their gradients and what the optimizer keeps of them, which stay.
        gradient_bytes: Of that, the gradients, which replicas average.
    """

    forward_seconds: float
    input_backward_seconds: float
    weight_backward_seconds: float = 0.0
    activation_bytes: float = 0.0
    weight_bytes: float = 0.0
    output_bytes: float = 0.0
    skips: tuple[tuple[int, float], ...] = ()
    state_bytes: float = 0.0
    gradient_bytes: float = 0.0

    def seconds(self, kind: Kind) -> float:
        """Seconds of an action of a kind."""
        if kind is Kind.FORWARD:
            return self.forward_seconds
        if kind is Kind.INPUT_BACKWARD:
            return self.input_backward_seconds
        if kind is Kind.WEIGHT_BACKWARD:
            return self.weight_backward_seconds
        return self.input_backward_seconds + self.weight_backward_seconds

    def kept_bytes(self, kind: Kind) -> float:
        """How much more is kept after an action of a kind than before it."""
        if kind is Kind.FORWARD:
            return self.activation_bytes
        if kind is Kind.INPUT_BACKWARD:
            return self.weight_bytes - self.activation_bytes
        if kind is Kind.WEIGHT_BACKWARD:
            return -self.weight_bytes
        return -self.activation_bytes


# Share of a forward's activations that is kept until the gradients of weights: about half (arXiv 2401.10241, table 1).
_KEPT_FOR_WEIGHTS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWork:
    """Work of one stage for one microbatch relative to the others, from which a schedule makes its order of actions.

    Attributes:
        forward, input_backward, weight_backward: Of its forward, of the gradients of its inputs, and of those of its weights. 1
            is the mean over stages of all three together.
        kept_bytes: Bytes that its forward keeps until its backward.
    """

    forward: float
    input_backward: float
    weight_backward: float
    kept_bytes: int

    @property
    def is_possible(self) -> bool:
        """True if no part is negative or infinite."""
        return all(0 <= part < math.inf for part in (self.forward, self.input_backward, self.weight_backward))

    @property
    def costs(self) -> StageCosts:
        """Costs of the stage, in a unit of time of unknown length."""
        return StageCosts(
            forward_seconds=self.forward,
            input_backward_seconds=self.input_backward,
            weight_backward_seconds=self.weight_backward,
            activation_bytes=self.kept_bytes,
            weight_bytes=_KEPT_FOR_WEIGHTS * self.kept_bytes,
        )


def even(costs: Sequence[StageCosts]) -> list[StageCosts]:
    """Returns stages with equal costs, the averages of these; the bytes that they keep stay as they are."""
    total = sum(cost.forward_seconds + cost.input_backward_seconds + cost.weight_backward_seconds for cost in costs)
    # A power of two: sums of it are exact, so that whoever compares moments finds those equal that are.
    each = 2.0 ** round(math.log2(total / (3 * len(costs)))) if total else 1.0
    return [replace(cost, forward_seconds=each, input_backward_seconds=each, weight_backward_seconds=each) for cost in costs]


@dataclass(frozen=True, kw_only=True)
class Link:
    """Costs of a message to another rank; within a rank messages are free.

    Attributes:
        latency_seconds: Until the first byte is there.
        bytes_per_second: How fast the others follow; one transfer after the other in one direction between two ranks.
        overlaps: Whether a rank computes while it receives. Where it does not, a transfer begins when the receiver is free.
    """

    latency_seconds: float = 0.0
    bytes_per_second: float = float("inf")
    overlaps: bool = True

    def reduce_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Until each of some ranks has the mean of what all have: in a ring, in which each part of it passes all ranks twice
        (Patarasuk and Yuan, 2009).
        """
        num_hops = 2 * (num_ranks - 1)
        return num_hops * (self.latency_seconds + num_bytes / num_ranks / self.bytes_per_second)


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Time that is no computation.

    Attributes:
        action_seconds: Of each action: kernels that are started, Python.
        step_seconds: Of each step besides: the loss, the optimizer, hooks, the loader.
    """

    action_seconds: float = 0.0
    step_seconds: float = 0.0
