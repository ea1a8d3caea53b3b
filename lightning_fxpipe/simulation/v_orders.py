"""Orders for two stages a rank in a V, by the number of ranks and microbatches alone: ZB-V and DualPipeV.

Rank r of P has stage r, which microbatches meet on their way down the ranks, and stage 2 P - 1 - r, which they meet on their
way up. Each order is a row of turns, such as "forward of the first stage"; the n-th turn of a kind takes the n-th microbatch.
The tables are those of ``ScheduleZBVZeroBubble`` and ``ScheduleDualPipeV`` of ``torch.distributed.pipelining``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.simulation.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action, ActionTable, Kind

_Turn = tuple[int, Kind]  # a stage, and the kind of action


def zbv(num_ranks: int, num_microbatches: int) -> ActionTable:
    """ZB-V (arXiv 2401.10241, section 6): no bubble if forward, input backward and weight backward take the same time."""
    # The steady state takes 2 P - 1 microbatches; with fewer, the turns of those that are missing are left out.
    count = max(2 * num_ranks - 1, num_microbatches)

    def turns(rank: int) -> Iterator[_Turn]:
        down, up = rank, 2 * num_ranks - 1 - rank
        first, last = (down, FORWARD), (up, FORWARD)
        back_down = [(down, INPUT_BACKWARD), (down, WEIGHT_BACKWARD)]
        back_up = [(up, INPUT_BACKWARD), (up, WEIGHT_BACKWARD)]
        num_left = num_ranks - rank
        yield from (2 * num_left - 1) * [first]
        yield from rank * [last, first]
        yield from num_left * [last, *back_up]
        num_first_left = count - (2 * num_left - 1 + rank)
        for index in range(count - num_ranks):
            yield from [first] if index < num_first_left else []
            yield from [*back_down, last, *back_up]
        yield from rank * [(down, INPUT_BACKWARD), (up, INPUT_BACKWARD)]
        yield from num_left * back_down
        yield from rank * [(up, WEIGHT_BACKWARD)]
        yield from rank * [(down, WEIGHT_BACKWARD)]

    rows = (_numbered(turns(rank)) for rank in range(num_ranks))
    return ActionTable.of([action for action in row if action.microbatch < num_microbatches] for row in rows)


def dual_pipe_v(num_ranks: int, num_microbatches: int) -> ActionTable:
    """DualPipe of DeepSeek-V3 (arXiv 2412.19437), cut in half, so that no rank has a stage twice.

    Raises:
        ScheduleError: There are fewer microbatches than stages.
    """
    if num_microbatches < 2 * num_ranks:
        raise ScheduleError(
            "DualPipeV requires at least as many microbatches as stages.",
            observed=f"{num_microbatches} microbatches and {2 * num_ranks} stages",
            todo="Use more microbatches, or another schedule.",
        )

    def turns(rank: int) -> Iterator[_Turn]:
        down, up = rank, 2 * num_ranks - 1 - rank
        first, last, back_down, back_up = (down, FORWARD), (up, FORWARD), (down, BACKWARD), (up, BACKWARD)
        weights: deque[_Turn] = deque()

        def inputs_of(stage: int) -> _Turn:
            weights.append((stage, WEIGHT_BACKWARD))
            return stage, INPUT_BACKWARD

        num_after = num_ranks - rank - 1
        yield from 2 * num_after * [first]
        yield from (rank + 1) * [first, last]
        for _ in range(num_after):
            yield from (inputs_of(up), weights.popleft(), last)
        yield from (num_microbatches - 2 * num_ranks + rank + 1) * [first, back_up, last, back_down]
        yield from num_after * [back_up, last, back_down]
        # From the middle on, gradients of weights come later.
        middle = (rank + 1) // 2
        for index in range(rank + 1):
            yield inputs_of(up) if index > middle or (index == middle and rank % 2) else back_up
            yield inputs_of(down) if index >= middle else back_down
        for _ in range(num_after):
            yield from [weights.popleft()] if weights else []
            yield inputs_of(down)
        yield from weights

    return ActionTable.of(_numbered(turns(rank)) for rank in range(num_ranks))


def _numbered(turns: Iterable[_Turn]) -> Iterator[Action]:
    """The turns of one rank as actions: each takes the microbatch after that of the turn of its kind before."""
    num_done: Counter[_Turn] = Counter()
    for stage, kind in turns:
        index = num_done[stage, INPUT_BACKWARD if kind is BACKWARD else kind]
        yield Action(stage, kind, index)
        for each in (INPUT_BACKWARD, WEIGHT_BACKWARD) if kind is BACKWARD else (kind,):
            num_done[stage, each] += 1
