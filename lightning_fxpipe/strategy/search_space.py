"""What ``balance="auto"`` chooses from: whatever the user leaves open."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from lightning_fxpipe.microbatch.batch_norms import batch_norms
from lightning_fxpipe.microbatch.split import count_samples, default_num_microbatches
from lightning_fxpipe.planner.choice import Search, combinations, microbatch_counts
from lightning_fxpipe.schedules.by_name import SCHEDULES, ScheduleName
from lightning_fxpipe.simulation.by_name import SimulatedSchedule
from lightning_fxpipe.stages.memory import memory_for_rank

# Those that are fastest for some model: of the rest none is without needing more memory than one of these.
_WORTH_A_LOOK: tuple[SimulatedSchedule, ...] = (
    *("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv_zero_bubble", "v_half", "v_min"),
)
# Of the memory that is left: a simulation knows neither workspaces nor fragments.
_USABLE_SHARE = 0.9


def search_space(
    module: nn.Module,
    batch: Any,
    *,
    schedule: ScheduleName,
    splits: bool,
    stages_per_rank: int | Literal["auto"],
    num_microbatches: int | None,
    batch_dim: int,
    num_ranks: int,
    device: torch.device,
) -> Search:
    """What there is to choose from.

    Args:
        module: The LightningModule. BatchNorm normalises over a microbatch, so where there is one their number is not chosen.
        batch: The first batch.
        splits: Whether gradients of weights may come later than those of inputs.
        schedule, stages_per_rank, num_microbatches, batch_dim: As the user says.
        num_ranks: Devices.
        device: This rank's.
    """
    num_samples = count_samples(batch, num_microbatches, batch_dim).num_samples
    default = num_microbatches or default_num_microbatches(num_samples, num_ranks)
    is_open = num_microbatches is None and next(iter(batch_norms(module)), None) is None
    return Search(
        num_ranks=num_ranks,
        num_samples=num_samples,
        combinations=combinations(
            [name for name in _WORTH_A_LOOK if splits or not SCHEDULES[name].splits] if schedule == "auto" else [schedule],
            microbatch_counts(num_samples, num_ranks, default) if is_open else (default,),
            None if stages_per_rank == "auto" else stages_per_rank,
            num_ranks,
        ),
        memory_bytes=usable_memory(device, num_ranks),
    )


def usable_memory(device: torch.device, num_ranks: int) -> int | None:
    """Bytes that a rank's stages may take on its device; None where nobody knows."""
    free = memory_for_rank(device, num_ranks)
    return None if free is None else int(_USABLE_SHARE * free)
