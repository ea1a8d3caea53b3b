"""A clock for each rank while an order is made action by action: the heuristics look at it, and decide."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.reporting.table import human_bytes
from lightning_fxpipe.simulation.actions import FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action, ActionTable
from lightning_fxpipe.simulation.costs import StageCosts


class Walk:
    """Progress of the ranks so far.

    Args:
        costs: Of each stage, for one microbatch.
        rank_of_stage: The rank of each stage.
        latency_seconds: What a transfer to another rank takes.

    Attributes:
        ends: When each action that is done ends.
        free: When each rank has done what it has to do so far.
        kept_bytes: What each rank keeps for its backward actions.
        waited: How long each rank has waited between its actions.
    """

    def __init__(self, costs: Sequence[StageCosts], rank_of_stage: Sequence[int], latency_seconds: float) -> None:
        num_ranks = 1 + max(rank_of_stage)
        self.ends: dict[Action, float] = {}
        self.free = [0.0] * num_ranks
        self.kept_bytes = [0.0] * num_ranks
        self.waited = [0.0] * num_ranks
        self._costs, self._rank_of_stage, self._latency = costs, rank_of_stage, latency_seconds
        self._orders: list[list[Action]] = [[] for _ in range(num_ranks)]
        self._weights: list[deque[Action]] = [deque() for _ in range(num_ranks)]  # that can be made, oldest first

    def table(self) -> ActionTable:
        """The order, when all is done."""
        for rank in range(len(self.free)):
            while self.has_weights_left(rank):
                self.do_weights(rank)
        return ActionTable.of(self._orders)

    def arrival(self, action: Action) -> float | None:
        """When what an action needs from another rank is there; None where it needs nothing, or that is not made."""
        beside = Action(action.stage - 1 if action.kind is FORWARD else action.stage + 1, action.kind, action.microbatch)
        if action.kind is WEIGHT_BACKWARD or beside not in self.ends:
            return None
        is_here = self._rank_of_stage[beside.stage] == self._rank_of_stage[action.stage]
        return None if is_here else self.ends[beside] + self._latency

    def can_run(self, action: Action, limit_bytes: float) -> bool:
        """Returns True if all that an action needs is made, and its rank keeps no more than a limit after it and all
        gradients of weights that it can make before.
        """
        stage, microbatch = action.stage, action.microbatch
        if action.kind is FORWARD:
            is_made = not stage or Action(stage - 1, FORWARD, microbatch) in self.ends
        else:
            is_last = stage == len(self._costs) - 1
            is_made = Action(stage, FORWARD, microbatch) in self.ends
            is_made &= is_last or Action(stage + 1, INPUT_BACKWARD, microbatch) in self.ends
        rank = self._rank_of_stage[stage]
        freed = sum(self._costs[weights.stage].weight_bytes for weights in self._weights[rank])
        return is_made and self.fits(action, limit_bytes + freed)

    def fits(self, action: Action, limit_bytes: float) -> bool:
        """Returns True if a rank keeps no more than a limit after an action."""
        rank = self._rank_of_stage[action.stage]
        return self.kept_bytes[rank] + self._costs[action.stage].kept_bytes(action.kind) <= limit_bytes

    def do(self, action: Action) -> None:
        """Puts an action at the end of its rank's order."""
        rank, cost = self._rank_of_stage[action.stage], self._costs[action.stage]
        start = max(self.free[rank], self.arrival(action) or 0.0)
        if self._orders[rank]:
            self.waited[rank] += start - self.free[rank]
        self.free[rank] = self.ends[action] = start + cost.seconds(action.kind)
        self.kept_bytes[rank] += cost.kept_bytes(action.kind)
        self._orders[rank].append(action)
        if action.kind is INPUT_BACKWARD:
            self._weights[rank].append(Action(action.stage, WEIGHT_BACKWARD, action.microbatch))

    # ------------------------------------------------------------------ gradients of weights

    def has_weights_left(self, rank: int) -> bool:
        """Returns True if there are gradients of weights that a rank can make."""
        return bool(self._weights[rank])

    def do_weights(self, rank: int) -> None:
        """A rank makes the oldest of these."""
        self.do(self._weights[rank].popleft())

    def make_room(self, action: Action, limit_bytes: float) -> None:
        """Makes gradients of weights until an action fits into the memory of its rank.

        Raises:
            ScheduleError: It does not fit after all of them.
        """
        rank = self._rank_of_stage[action.stage]
        while not self.fits(action, limit_bytes):
            if not self.has_weights_left(rank):
                raise ScheduleError(
                    "A rank does not have enough memory for this order.",
                    where=f"stage {action.stage}, {action}",
                    observed=f"{human_bytes(limit_bytes)} for activations, {human_bytes(self.kept_bytes[rank])} of it in use",
                    expected=f"{human_bytes(self._costs[action.stage].kept_bytes(action.kind))} more",
                    todo="Use more and smaller microbatches, more ranks, or activation checkpointing.",
                )
            self.do_weights(rank)

    def seconds_of_making_room(self, action: Action, limit_bytes: float) -> float:
        """How long that takes."""
        rank = self._rank_of_stage[action.stage]
        excess = self.kept_bytes[rank] + self._costs[action.stage].kept_bytes(action.kind) - limit_bytes
        seconds = 0.0
        for weights in self._weights[rank]:
            if excess <= 0:
                break
            cost = self._costs[weights.stage]
            excess, seconds = excess - cost.weight_bytes, seconds + cost.weight_backward_seconds
        return seconds

    def fill(self, action: Action) -> float:
        """Makes gradients of weights until what an action needs is there; returns how long is left then, if there are more."""
        rank, arrival = self._rank_of_stage[action.stage], self.arrival(action)
        if arrival is None:
            return 0.0
        while self._weights[rank]:
            weights = self._weights[rank][0]
            if self.free[rank] + self._costs[weights.stage].weight_backward_seconds > arrival:
                return max(arrival - self.free[rank], 0.0)
            self.do_weights(rank)
        return 0.0
