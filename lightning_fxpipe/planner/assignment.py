"""A chain cut into stages: what each computes, and what comes to it and leaves it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from torch import fx

from lightning_fxpipe.planner.cost import Chain, Unit
from lightning_fxpipe.planner.skips import Skip, find_skips


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A chain cut into stages.

    Attributes:
        chain: The chain.
        cuts: Position of the last unit of each stage but the last; equal neighbours mean a stage that computes nothing.
        skips: What goes past stages that do not use it; without them it goes from stage to stage.
    """

    chain: Chain
    cuts: tuple[int, ...]
    skips: tuple[Skip, ...] = ()

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.cuts) + 1

    def stage_of(self, position: int) -> int:
        """Stage of the unit at ``position``."""
        return bisect_left(self.cuts, position)

    def units(self, stage: int) -> list[Unit]:
        """The units that run in this stage alone."""
        start = self.cuts[stage - 1] + 1 if stage else 0
        end = self.cuts[stage] + 1 if stage < len(self.cuts) else None
        return [unit for unit in self.chain.units[start:end] if not unit.is_recomputed]

    def nodes(self, stage: int) -> list[fx.Node]:
        """The stage's calls in graph order, those of the recomputed values that it needs included."""
        own = {node for unit in self.units(stage) for node in unit.nodes}
        again = self.chain.recomputation.calls_for(self.uses(stage), own.union(self.received(stage)))
        return [node for node in self.chain.traced.graph.nodes if node in own or node in again]

    def uses(self, stage: int) -> set[fx.Node]:
        """Operands of the stage's own units; in the last stage the region's results, too."""
        operands = {operand for unit in self.units(stage) for node in unit.nodes for operand in node.all_input_nodes}
        return operands.union(self.chain.traced.output_node.all_input_nodes if stage == self.num_stages - 1 else ())

    def fqns(self, stage: int) -> frozenset[str]:
        """Canonical FQNs of the parameters and buffers that the stage must have."""
        used = frozenset(fqn for unit in self.units(stage) for fqn in unit.tensor_fqns)
        return used | self.chain.output_fqns if stage == self.num_stages - 1 else used

    def boundary(self, stage: int) -> tuple[fx.Node, ...]:
        """Returns the values that ``stage`` sends to the next one."""
        crossing = self.chain.site(self.cuts[stage]).crossing
        past = {skip.node for skip in self.skips if skip.passes(stage)}
        return tuple(node for node in crossing if node not in past) if past else crossing

    def received(self, stage: int) -> tuple[fx.Node, ...]:
        """Returns the values that a stage receives: by skips, then from the one before."""
        skips = tuple(skip.node for skip in self.skips if skip.destination == stage)
        return skips + (self.boundary(stage - 1) if stage else ())

    def sent(self, stage: int) -> tuple[fx.Node, ...]:
        """Returns the values that a stage, unless it is the last, sends: by skips, then to the next one."""
        return tuple(skip.node for skip in self.skips if skip.source == stage) + self.boundary(stage)

    def with_skips(self, last_stage: int | None = None) -> Assignment:
        """Returns the same stages; values that cross several cuts are sent past stages that do not use them.

        Args:
            last_stage: The stage behind which there is only what runs on its rank; by default the last one.
        """
        last = self.num_stages - 1 if last_stage is None else last_stage
        crossing = [self.chain.site(cut).crossing for cut in self.cuts]
        uses = used_nodes(replace(self, skips=()))
        uses[last].update(*crossing[last:])
        return replace(self, skips=find_skips(crossing[:last], uses[: last + 1], lambda node: node.meta["val"].requires_grad))


def used_nodes(assignment: Assignment) -> list[set[fx.Node]]:
    """Operands and results that each stage uses, for recomputed values too."""
    unread = assignment.chain.recomputation.unread
    return [
        assignment.uses(stage).union(*({*node.all_input_nodes} - unread.get(node, set()) for node in assignment.nodes(stage)))
        for stage in range(assignment.num_stages)
    ]
