"""Which rank has which stages of which replica, and what ranks with the same stages average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from lightning_fxpipe.distributed.topology import Placement
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.reporting.table import human_bytes, render_table

_MOST_NAMED = 8  # ranks of a row


@dataclass(frozen=True, kw_only=True)
class ReplicaGrid:
    """Several pipelines, place by place.

    Attributes:
        num_replicas: Pipelines, D.
        placement: Which rank of a pipeline has which stages.
        ranks_per_machine: How many ranks are on each machine, one after the other; None if unknown.
        gradient_bytes: What the ranks at each place average; empty if unknown.
    """

    num_replicas: int
    placement: Placement
    ranks_per_machine: int | None = None
    gradient_bytes: tuple[float, ...] = ()

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Global ranks, by replica and by place in the pipeline."""
        places = range(self.placement.num_ranks)
        return tuple(
            tuple(self.placement.global_rank(place, replica) for place in places) for replica in range(self.num_replicas)
        )

    @cached_property
    def machines(self) -> tuple[tuple[int, ...], ...]:
        """The machines of each replica, by their number; empty if unknown, or if all ranks are on one."""
        each = self.ranks_per_machine
        if each is None or each >= self.num_replicas * self.placement.num_ranks:
            return ()
        return tuple(tuple(sorted({rank // each for rank in ranks})) for ranks in self.ranks)

    def __str__(self) -> str:
        headers = ("Stages", "Global ranks, one per replica", *(["Gradients"] if self.gradient_bytes else []))
        rows = []
        for place in range(self.placement.num_ranks):
            ranks = [of_replica[place] for of_replica in self.ranks]
            gradients = [human_bytes(round(self.gradient_bytes[place]))] if self.gradient_bytes else []
            rows.append((", ".join(map(str, self.placement.stages_of(place))), _listed(ranks), *gradients))
        return render_table(
            f"{self.num_replicas} replicas of this pipeline",
            headers,
            rows,
            right_aligned=headers[2:],
            caption="\n".join(self._caption()),
        )

    def _caption(self) -> list[str]:
        lines = ["Replicas train on different batches; the ranks of a row average their gradients once per optimizer step."]
        if self.machines:
            are_whole = all(len(machines) == 1 for machines in self.machines)
            lines.append(
                f"Each machine has {self.ranks_per_machine} ranks; "
                f"{'no replica spans several machines' if are_whole else 'some replicas span several machines'}."
            )
        return lines


def gradient_bytes(plan: PartitionPlan, module: nn.Module, placement: Placement) -> tuple[float, ...]:
    """Bytes of the gradients that each rank of a pipeline averages, of all its parameters that train.

    Args:
        plan: Which stage holds what.
        module: The module, whole.
        placement: Which rank has which stages.
    """
    found = [0.0] * placement.num_ranks
    for fqn, parameter in module.named_parameters():
        if parameter.requires_grad:
            for place in {placement.rank_of(stage) for stage in plan.stages_of(fqn)}:
                found[place] += parameter.numel() * parameter.element_size()
    return tuple(found)


def _listed(ranks: Sequence[int]) -> str:
    names = [*map(str, ranks)]
    return ", ".join(names if len(names) <= _MOST_NAMED else [*names[: _MOST_NAMED - 2], "...", names[-1]])
