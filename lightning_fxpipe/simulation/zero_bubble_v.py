"""Orders without waiting in the memory of 1F1B, for two stages a rank that lie in a V and given costs.

ZB-V of Zero Bubble Pipeline Parallelism (arXiv 2401.10241, section 6; the authors' is ``zbv.py`` of
github.com/sail-sg/zero-bubble-pipeline-parallelism). Rank r of P has stages r and 2 P - 1 - r: a microbatch goes down the
ranks, up, down again with its gradients and up again, and the first rank, which waits longest, has the last stage, too. An
order is made by walking with a clock for each rank (``walk``):

1. The first microbatch goes down and up; the ranks that wait for it take forwards of others.
2. Forwards on the later ranks, of their two stages in turn, until each has done as many as the rank before it.
3. Then on each rank one backward and one forward in turn, of the stage whose input is there. Gradients of weights fill the time
   until it is, or are made because there is no memory left.

Whether one more of them may end later than that is open. All answers are tried, each a second time with what the ranks have
waited at the first, and the order whose longest rank takes least is the one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import product

from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.reporting.table import human_bytes
from lightning_fxpipe.simulation.actions import FORWARD, INPUT_BACKWARD, Action, ActionTable
from lightning_fxpipe.simulation.costs import Link, StageCosts
from lightning_fxpipe.simulation.simulator import run_table
from lightning_fxpipe.simulation.walk import Walk

_NO_LINK = Link()
# A microbatch's ways through the ranks.
_DOWN, _UP, _BACK_DOWN, _BACK_UP = range(4)


def zero_bubble_v(
    costs: Sequence[StageCosts], num_microbatches: int, *, memory_bytes: Sequence[float] | None = None, link: Link = _NO_LINK
) -> ActionTable:
    """The best order found.

    Args:
        costs: Of each stage, for one microbatch; two for each rank.
        num_microbatches: How many there are, at least as many as twice the ranks.
        memory_bytes: For each rank, what its activations may take; None for what P microbatches take on it, as with 1F1B on the
            first rank.
        link: Its latency counts.

    Raises:
        ScheduleError: There are too few microbatches, a rank has not enough memory, or not two stages.
    """
    num_ranks, rest = divmod(len(costs), 2)
    if rest or num_microbatches < 2 * num_ranks:
        raise ScheduleError(
            "There are too few microbatches or stages for a V-shaped schedule.",
            observed=f"{len(costs)} stages, {num_microbatches} microbatches",
            expected="two stages per rank, and at least twice as many microbatches as ranks",
            todo='Use more microbatches, or schedule="v_half" or "zero_bubble".',
        )
    ranks = range(num_ranks)
    limits = memory_bytes or [num_ranks * (costs[r].activation_bytes + costs[-1 - r].activation_bytes) for r in ranks]
    tables: list[ActionTable] = []
    for fills_down, fills_up in product((True, False), repeat=2):
        make = partial(_Heuristic, costs, num_microbatches, limits, link.latency_seconds, fills_down, fills_up)
        first = make(None)
        with suppress(_Stuck):
            tables.append(first.table())
            tables.append(make(first.waited).table())
    if not tables:
        least = [costs[rank].activation_bytes + costs[-1 - rank].activation_bytes for rank in ranks]
        raise ScheduleError(
            "No V-shaped schedule fits in this memory.",
            observed=f"{', '.join(human_bytes(limit) for limit in limits)} for the ranks' activations",
            expected=f"more than {', '.join(human_bytes(num_bytes) for num_bytes in least)}",
            todo='Allow more memory, or use schedule="zero_bubble".',
        )
    return min(tables, key=lambda table: run_table(table, costs, link=link).longest_rank_seconds)


class _Stuck(Exception):
    """No rank can go on in its memory."""


class _Heuristic:
    """Makes one order."""

    def __init__(
        self,
        costs: Sequence[StageCosts],
        num_microbatches: int,
        limits: Sequence[float],
        latency: float,
        fills_backward: bool,
        fills_forward: bool,
        waited_before: Sequence[float] | None,
    ) -> None:
        self._num_ranks, self._count, self._limits = len(costs) // 2, num_microbatches, limits
        self._fills_backward, self._fills_forward = fills_backward, fills_forward
        self._waited_before = waited_before
        self._costs = costs
        placement = [min(stage, len(costs) - 1 - stage) for stage in range(len(costs))]
        self._walk = Walk(costs, placement, latency)
        self._num_done = [[0, 0, 0, 0] for _ in range(self._num_ranks)]  # by way

    @property
    def waited(self) -> list[float]:
        """How long each rank has waited."""
        return self._walk.waited

    def table(self) -> ActionTable:
        """The order."""
        self._first_microbatch()
        self._until_ranks_are_even()
        while any(done[_BACK_UP] < self._count for done in self._num_done):
            before = len(self._walk.ends)
            for rank, way in self._next_backwards():
                self._do_filled(rank, way, self._fills_backward or way == _BACK_UP)
            for rank in range(self._num_ranks):
                following = self._next_forward(rank)
                if following is not None:
                    self._do_filled(rank, following, self._fills_forward)
            if len(self._walk.ends) == before:
                raise _Stuck
        return self._walk.table()

    # ------------------------------------------------------------------ before the first backward

    def _first_microbatch(self) -> None:
        ranks = range(self._num_ranks)
        for rank in ranks:
            self._do(rank, _DOWN)
        for rank in reversed(ranks):
            arrival = self._walk.arrival(self._next(rank, _UP))
            while arrival is not None and self._has_time_for_another(rank, arrival):
                if not all(self._do_if_possible(other, _DOWN) for other in range(rank + 1)):
                    break
            if not self._do_if_possible(rank, _UP):
                raise _Stuck

    def _has_time_for_another(self, rank: int, arrival: float) -> bool:
        """Returns True if a rank can take another forward until then, and keep the memory that those on their way will need."""
        cost = self._costs[rank]
        kept = self._walk.kept_bytes[rank] + cost.activation_bytes * (2 + 2 * rank)
        is_early = self._walk.free[rank] + cost.forward_seconds <= arrival
        return kept <= self._limits[rank] and is_early and self._num_done[rank][_DOWN] < self._count

    def _until_ranks_are_even(self) -> None:
        way, num_idle = _DOWN, 0
        for rank in range(1, self._num_ranks):
            while self._is_behind(rank) and num_idle < 2:  # both ways without anything that could be done
                others = [other for other in range(rank, self._num_ranks) if self._num_done[other][way] < self._count]
                has_done = [self._do_if_possible(other, way) for other in reversed(others)]
                num_idle = 0 if any(has_done) else num_idle + 1
                way = _UP if way == _DOWN else _DOWN

    def _is_behind(self, rank: int) -> bool:
        mine, before = self._num_done[rank], self._num_done[rank - 1]
        if mine[_DOWN] + mine[_UP] < before[_DOWN] + before[_UP]:
            return True
        return mine[_UP] <= before[_UP] < self._count

    # ------------------------------------------------------------------ one backward, one forward

    def _next_backwards(self) -> list[tuple[int, int]]:
        """Which backward each rank takes next: first those that go up, from the last rank on, then those that go down."""
        up = [rank for rank in range(self._num_ranks) if self._goes_up(rank)]
        down = [rank for rank in range(self._num_ranks) if rank not in up]
        return [*((rank, _BACK_UP) for rank in reversed(up)), *((rank, _BACK_DOWN) for rank in down)]

    def _goes_up(self, rank: int) -> bool:
        done = self._num_done[rank]
        if done[_BACK_UP] >= done[_BACK_DOWN]:
            return False
        is_last = rank == self._num_ranks - 1
        return is_last or done[_BACK_DOWN] >= self._count or self._has_arrived(rank, _BACK_UP)

    def _next_forward(self, rank: int) -> int | None:
        done = self._num_done[rank]
        if done[_UP] >= self._count:
            return None
        if done[_UP] >= done[_DOWN]:
            return _DOWN
        if rank == self._num_ranks - 1 or self._has_arrived(rank, _UP):
            return _UP
        can_go_down = done[_DOWN] < self._count and (rank == 0 or self._has_arrived(rank, _DOWN))
        return _DOWN if can_go_down else None

    def _has_arrived(self, rank: int, way: int) -> bool:
        return self._walk.arrival(self._next(rank, way)) is not None

    def _do_filled(self, rank: int, way: int, fills: bool) -> None:
        action = self._next(rank, way)
        if action.microbatch == self._count or not self._walk.can_run(action, self._limits[rank]):
            return  # in the next round
        self._walk.make_room(action, self._limits[rank])
        left = self._walk.fill(action)
        if fills and left > self._longest_wait(rank) - self._walk.waited[rank] and self._walk.has_weights_left(rank):
            self._walk.do_weights(rank)
        self._do(rank, way)

    def _longest_wait(self, rank: int) -> float:
        before = self._waited_before
        earlier = 0.0 if before is None else max(before) - before[rank]
        return max(*self._walk.waited, earlier)

    # ------------------------------------------------------------------ actions

    def _next(self, rank: int, way: int) -> Action:
        stage = rank if way in (_DOWN, _BACK_UP) else 2 * self._num_ranks - 1 - rank
        return Action(stage, FORWARD if way in (_DOWN, _UP) else INPUT_BACKWARD, self._num_done[rank][way])

    def _do_if_possible(self, rank: int, way: int) -> bool:
        is_possible = self._walk.can_run(self._next(rank, way), self._limits[rank])
        if is_possible:
            self._do(rank, way)
        return is_possible

    def _do(self, rank: int, way: int) -> None:
        self._walk.do(self._next(rank, way))
        self._num_done[rank][way] += 1
