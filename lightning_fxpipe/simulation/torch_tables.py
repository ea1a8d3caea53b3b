"""The tables of torch's own schedules, as its runtime executes them."""

from __future__ import annotations

from torch.distributed.pipelining import ScheduleDualPipeV, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

from lightning_fxpipe._compat.pipelining import rows_of_class
from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.simulation.actions import Action, ActionTable

_CLASSES = {
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,  # arXiv 2401.10241, with several stages a rank
    "zbv_zero_bubble": ScheduleZBVZeroBubble,  # arXiv 2405.15362
    "dualpipev": ScheduleDualPipeV,  # DeepSeek-V3's DualPipe, cut in half (sail.sea.com/blog/articles/63)
}


def torch_table(schedule: str, num_ranks: int, num_microbatches: int, *, stages_per_rank: int) -> ActionTable:
    """The table of one of torch's schedules.

    Args:
        schedule: Its name.
        num_ranks, num_microbatches: How many there are.
        stages_per_rank: Stages of each rank, which go round, or come back in a V in the last two.

    Raises:
        ScheduleError: torch has none for so many microbatches.
    """
    try:
        rows = rows_of_class(_CLASSES[schedule], num_ranks, stages_per_rank, num_microbatches)
    except ValueError as error:
        raise ScheduleError(
            "torch's schedule does not support this number of microbatches.",
            observed=f"{num_microbatches} microbatches on {num_ranks} ranks: {error}",
            todo="Use a multiple of the number of ranks that is at least the number of stages, or another schedule.",
        ) from error
    return ActionTable.of(map(Action.parse, row) for row in rows)
