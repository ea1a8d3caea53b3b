"""The orders that go by the number of stages and microbatches alone."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.simulation.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action, ActionTable, Kind


def gpipe(num_ranks: int, num_microbatches: int) -> ActionTable:
    """All forwards, then all backwards, the last microbatch's first or not makes no difference (GPipe, arXiv 1811.06965)."""
    return looped_breadth_first(num_ranks, num_microbatches, stages_per_rank=1)


def looped_breadth_first(num_ranks: int, num_microbatches: int, *, stages_per_rank: int) -> ActionTable:
    """Each of a rank's stages takes all microbatches before the next does (arXiv 2211.05953).

    Rank r has stages r, r + P, r + 2 P and so on.
    """

    def of_rank(rank: int) -> Iterator[Action]:
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        yield from (Action(stage, FORWARD, index) for stage in stages for index in range(num_microbatches))
        yield from (Action(stage, BACKWARD, index) for stage in reversed(stages) for index in range(num_microbatches))

    return ActionTable.of(map(of_rank, range(num_ranks)))


def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> ActionTable:
    """Runs as many forwards as the way to the last stage and back takes, then one forward for each backward.

    PipeDream-Flush, arXiv 2006.09503.
    """

    def of_rank(rank: int) -> Iterator[Action]:
        num_first = min(num_microbatches, num_ranks - rank)
        yield from (Action(rank, FORWARD, index) for index in range(num_first))
        for index in range(num_microbatches):
            yield Action(rank, BACKWARD, index)
            if num_first + index < num_microbatches:
                yield Action(rank, FORWARD, num_first + index)

    return ActionTable.of(map(of_rank, range(num_ranks)))


def interleaved(num_ranks: int, num_microbatches: int, *, stages_per_rank: int, delays_weights: bool = False) -> ActionTable:
    """1F1B with several stages a rank, each of which takes P microbatches at a time, or a few more.

    Rank r has stages r, r + P, r + 2 P and so on (Megatron-LM, arXiv 2104.04473, section 2.2). Rounds of more than P
    microbatches are those of torch's ``ScheduleInterleaved1F1B``, whose table this is.

    Args:
        num_ranks, num_microbatches, stages_per_rank: How many there are.
        delays_weights: Whether gradients of weights come as much later as a rank comes after the first one, after half as many
            forwards ahead: ZB-1P (arXiv 2401.10241, section 2), as in torch's ``ScheduleInterleavedZeroBubble``.

    Raises:
        ScheduleError: The microbatches cannot go in as many rounds as there are times P of them.
    """
    num_rounds = max(1, num_microbatches // num_ranks)
    per_round = num_microbatches // num_rounds
    if num_microbatches % num_rounds:
        raise ScheduleError(
            "An interleaved schedule runs microbatches in equal rounds of at least one per rank.",
            observed=f"{num_microbatches} microbatches on {num_ranks} ranks",
            expected=f"a multiple of {num_rounds}, the number of rounds",
            todo=f'Use a multiple of {num_ranks}, or schedule="1f1b".',
        )
    total = num_microbatches * stages_per_rank

    def of_rank(rank: int) -> Iterator[Action]:
        def action(step: int, kind: Kind) -> Action:
            rounds, inside = divmod(step, per_round * stages_per_rank)
            chunk, index = divmod(inside, per_round)
            stage = (chunk if kind is FORWARD else stages_per_rank - 1 - chunk) * num_ranks + rank
            return Action(stage, kind, rounds * per_round + index)

        num_ahead = (num_ranks - rank - 1) * (1 if delays_weights else 2)
        num_first = min(total, (stages_per_rank - 1) * per_round + num_ahead)
        yield from (action(step, FORWARD) for step in range(num_first))
        for step in range(total + rank * delays_weights):
            if num_first + step < total:
                yield action(num_first + step, FORWARD)
            if step < total:
                yield action(step, INPUT_BACKWARD if delays_weights else BACKWARD)
            if delays_weights and step >= rank:
                yield action(step - rank, WEIGHT_BACKWARD)

    return ActionTable.of(map(of_rank, range(num_ranks)))


def hand_made_zero_bubble(num_ranks: int, num_microbatches: int, *, times_memory: int = 1) -> ActionTable:
    """1F1B in which gradients of weights come as much later as a rank comes after the first one.

    Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2: ZB-H1 keeps on each rank what 1F1B keeps on the first one
    (``times_memory`` 1), ZB-H2 nearly twice that (2).
    """

    def of_rank(rank: int) -> Iterator[Action]:
        num_first = min(num_microbatches, times_memory * (num_ranks - rank - 1) + 1)
        delay = times_memory * rank
        yield from (Action(rank, FORWARD, index) for index in range(num_first))
        for index in range(num_microbatches + delay):
            if index < num_microbatches:
                yield Action(rank, INPUT_BACKWARD, index)
            if 0 <= index - delay < num_microbatches:
                yield Action(rank, WEIGHT_BACKWARD, index - delay)
            if num_first + index < num_microbatches:
                yield Action(rank, FORWARD, num_first + index)

    return ActionTable.of(map(of_rank, range(num_ranks)))
