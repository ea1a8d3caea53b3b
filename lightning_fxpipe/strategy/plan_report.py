"""Logs a new plan, and how a run goes with it."""

from __future__ import annotations

from torch import nn

from lightning_fxpipe.distributed.topology import Placement, Topology
from lightning_fxpipe.microbatch.split import default_num_microbatches
from lightning_fxpipe.pictures.replica_grid import ReplicaGrid, gradient_bytes
from lightning_fxpipe.planner.plan import PartitionPlan, run_words
from lightning_fxpipe.reporting.messages import inform
from lightning_fxpipe.schedules.by_name import Schedule
from lightning_fxpipe.strategy.support import report_batch_norm


def report_plan(
    plan: PartitionPlan,
    module: nn.Module,
    *,
    schedule: Schedule,
    num_microbatches: int | None,
    num_samples: int | None,
    placement: Placement,
    ranks_per_machine: int,
    topology: Topology,
) -> None:
    """Logs a new plan, which rank holds which stage, and what else the user should know about it.

    Args:
        plan: The plan.
        module: The module that it is for.
        schedule: Of the run.
        num_microbatches: Of a batch; None where the batch decides.
        num_samples: Of the batch that the plan was made from; None where it comes from elsewhere.
        placement: Which rank will have which stages.
        ranks_per_machine: Processes on each machine.
        topology: This rank's place so far; of it, how many ranks there are and how they talk.
    """
    name, count, chosen = schedule.name, num_microbatches, plan.chosen
    if name == "auto":
        name = chosen.schedule if chosen else "gpipe (1f1b if memory is short)"
    if count is None and num_samples is not None:
        count = chosen.num_microbatches if chosen else default_num_microbatches(num_samples, placement.num_ranks)
    if is_whole := num_samples is not None and plan.microbatch_size >= num_samples:  # part of a batch cannot be traced
        count = 1
    inform(f"{plan}\n{run_words(plan, name, count, placement.by_rank)}")
    if any(stage.skipping_bytes for stage in plan.stages) and not topology.can_skip:
        inform("On these devices, tensors sent past stages are forwarded by the stages in between.")
    num_replicas = topology.num_ranks * topology.replicas.count // placement.num_ranks
    if num_replicas > 1:
        held = gradient_bytes(plan, module, placement)
        grid = ReplicaGrid(
            num_replicas=num_replicas, placement=placement, ranks_per_machine=ranks_per_machine, gradient_bytes=held
        )
        inform(str(grid))
    # The default for a single rank is one, the batch as it is.
    report_batch_norm(module, 1 if is_whole else num_microbatches or (1 if placement.num_ranks == 1 else None))
