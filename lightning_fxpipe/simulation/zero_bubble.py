"""Orders that fill the waiting of 1F1B with the gradients of weights, for given costs and a limit of memory.

The heuristic of Zero Bubble Pipeline Parallelism (arXiv 2401.10241, section 3.1; the authors' is ``zb.py`` of
github.com/sail-sg/zero-bubble-pipeline-parallelism). What a backward gives to the stage before it is urgent, what it gives to
the weights can be made at any time after it. So an order is made by walking through the microbatches with a clock for each
rank (``walk``):

1. Until a rank's first backward it takes as many forwards as fit into the time and the memory.
2. Then each round takes one forward and one backward on every rank. Before each of them, gradients of weights fill the time
   until its input arrives, or are made because there is no memory left.
3. What is left of the gradients of weights comes last.

Three choices are open in it. All eight combinations are tried, and the order whose longest rank takes least is the one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.reporting.table import human_bytes
from lightning_fxpipe.simulation.actions import FORWARD, INPUT_BACKWARD, Action, ActionTable, Kind
from lightning_fxpipe.simulation.costs import Link, StageCosts
from lightning_fxpipe.simulation.simulator import run_table
from lightning_fxpipe.simulation.walk import Walk

_NO_LINK = Link()


def zero_bubble(
    costs: Sequence[StageCosts], num_microbatches: int, *, memory_bytes: Sequence[float] | None = None, link: Link = _NO_LINK
) -> ActionTable:
    """The best order found, one stage a rank.

    Args:
        costs: Of each stage, for one microbatch.
        num_microbatches: How many there are.
        memory_bytes: For each rank, what its activations may take; what 1F1B takes on the first rank is called ZB-1p in the
            paper, twice that ZB-2p. None for no limit.
        link: Its latency counts.

    Raises:
        ScheduleError: A rank has not enough memory for the activations of one microbatch.
    """
    limits = [float("inf")] * len(costs) if memory_bytes is None else list(memory_bytes)
    for rank, (cost, limit) in enumerate(zip(costs, limits, strict=True)):
        if cost.activation_bytes > limit:
            raise ScheduleError(
                "A rank does not have enough memory for one microbatch.",
                where=f"stage {rank}",
                observed=f"{human_bytes(limit)} for activations",
                expected=f"at least {human_bytes(cost.activation_bytes)}",
                todo="Use more and smaller microbatches, more ranks, or activation checkpointing.",
            )
    choices = [_Choices(*each) for each in product((True, False), repeat=3)]
    tables = [_Heuristic(costs, num_microbatches, limits, link.latency_seconds, each).table() for each in choices]
    return min(tables, key=lambda table: run_table(table, costs, link=link).longest_rank_seconds)


@dataclass(frozen=True)
class _Choices:
    """Free choices of the heuristic.

    Attributes:
        may_wait_for_first: Whether the forwards before the first backward end before it can begin.
        prefers_backward: Whether a forward is left out of a round where the next rank could not use it yet.
        fills_always: Whether waiting is filled that does not make the longest rank longer.
    """

    may_wait_for_first: bool
    prefers_backward: bool
    fills_always: bool


class _Heuristic:
    """Makes one order."""

    def __init__(
        self, costs: Sequence[StageCosts], num_microbatches: int, limits: Sequence[float], latency: float, choices: _Choices
    ) -> None:
        self._costs, self._count, self._limits, self._latency = costs, num_microbatches, limits, latency
        self._choices = choices
        self._walk = Walk(costs, range(len(costs)), latency)
        self._num_done = [{FORWARD: 0, INPUT_BACKWARD: 0} for _ in costs]

    def table(self) -> ActionTable:
        """The order."""
        ranks = range(len(self._costs))
        for rank in ranks:
            self._do(rank, FORWARD)
        self._fill_until_first_backward()
        for rank in reversed(ranks):
            self._do(rank, INPUT_BACKWARD)
        for _ in range(1, self._count):
            self._round_of_forwards()
            for rank in reversed(ranks):
                self._backward(rank)
        return self._walk.table()

    # ------------------------------------------------------------------ step 1

    def _fill_until_first_backward(self) -> None:
        wanted = self._forwards_that_fit()
        for rank in range(1, len(wanted)):
            # One fewer than the rank before it, which a message takes time from; no more than that one at the end.
            wanted[rank] = min(wanted[rank], wanted[rank - 1])
            while 0 < wanted[rank] >= wanted[rank - 1] and self._num_done[rank][FORWARD] + wanted[rank] < self._count:
                wanted[rank] -= 1
        for rank, count in enumerate(wanted):
            for _ in range(count):
                self._do(rank, FORWARD)

    def _forwards_that_fit(self) -> list[int]:
        """For each rank, the forwards that fit into the time until the next rank's first backward, and into its memory."""
        last = len(self._costs) - 1
        wanted = [0] * (last + 1)
        backward_ends = self._walk.free[last] + self._costs[last].input_backward_seconds
        for rank in range(last - 1, -1, -1):
            cost, arrival = self._costs[rank], backward_ends + self._latency
            kept, end = self._walk.kept_bytes[rank], self._walk.free[rank]
            while 1 + wanted[rank] < self._count and kept + cost.activation_bytes <= self._limits[rank]:
                is_late = end >= arrival if not self._choices.may_wait_for_first else end + cost.forward_seconds > arrival
                if is_late:
                    break
                kept, end = kept + cost.activation_bytes, end + cost.forward_seconds
                wanted[rank] += 1
            backward_ends = max(end, arrival) + cost.input_backward_seconds
        return wanted

    # ------------------------------------------------------------------ step 2

    def _round_of_forwards(self) -> None:
        takes = [self._takes_forward(rank) for rank in range(len(self._costs))]
        for rank in range(len(takes) - 2, -1, -1):
            takes[rank] &= takes[rank + 1]
        for rank, is_taken in enumerate(takes):
            if is_taken:
                self._do_filled(rank, FORWARD)

    def _takes_forward(self, rank: int) -> bool:
        mine = self._num_done[rank][FORWARD]
        if mine >= self._count:
            return False
        is_needed = mine == self._num_done[rank][INPUT_BACKWARD]  # for the backward of this round
        if is_needed or rank + 1 == len(self._costs) or not self._choices.prefers_backward:
            return True
        if mine < self._num_done[rank + 1][FORWARD] + 2:
            return True
        # When the next rank's backward of this round will be here, at the earliest.
        following, cost, end = self._costs[rank + 1], self._costs[rank], self._walk.free[rank]
        arrival = self._walk.free[rank + 1] + following.forward_seconds + following.input_backward_seconds + self._latency
        if end >= arrival:
            return False
        room = self._walk.seconds_of_making_room(Action(rank, FORWARD, mine), self._limits[rank])
        if end + cost.forward_seconds + room <= arrival:
            return True
        return arrival - end > max(self._walk.waited) - self._walk.waited[rank]

    def _backward(self, rank: int) -> None:
        if rank == 0 and self._num_done[rank][FORWARD] == self._count:
            while self._walk.has_weights_left(rank):  # no rank waits for the first one
                self._walk.do_weights(rank)
        self._do_filled(rank, INPUT_BACKWARD)

    def _do_filled(self, rank: int, kind: Kind) -> None:
        """An action, after as many gradients of weights as its memory needs and as fit into the time until it can begin."""
        action = Action(rank, kind, self._num_done[rank][kind])
        self._walk.make_room(action, self._limits[rank])
        left = self._walk.fill(action)
        if left > 0:
            # One more would end later than that. It does no harm to wait where another rank has waited for longer.
            is_harmless = left <= max(self._walk.waited) - self._walk.waited[rank]
            if not is_harmless or self._choices.fills_always:
                self._walk.do_weights(rank)
        self._do(rank, kind)

    def _do(self, rank: int, kind: Kind) -> None:
        self._walk.do(Action(rank, kind, self._num_done[rank][kind]))
        self._num_done[rank][kind] += 1
