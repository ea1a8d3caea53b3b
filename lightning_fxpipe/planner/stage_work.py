"""What the stages of a plan take beside each other, from which a schedule's order of actions is made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWork:
    """What a stage takes for one microbatch.

    Attributes:
        forward, input_backward, weight_backward: For its forward, the gradients of its inputs, and those of its weights. 1 is
            what a stage takes for all three, on average.
        kept_bytes: What its forward keeps until its backward.
    """

    forward: float
    input_backward: float
    weight_backward: float
    kept_bytes: int

    @property
    def is_possible(self) -> bool:
        """Whether it takes no less than nothing, and ends."""
        return all(0 <= part < float("inf") for part in (self.forward, self.input_backward, self.weight_backward))
