"""The tensors that the stages of a trace give each other, as edges of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import fx

from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.schedules.program import Edge
from lightning_fxpipe.stages.build import TensorSpec, boundary_specs
from lightning_fxpipe.tracing.gradient_flow import GradientSources


class StageGradients:
    """Which of the last stage's results have gradients that stages send each other.

    Args:
        assignment: All stages.
        last_stage: The stage whose results are joined.
    """

    def __init__(self, assignment: Assignment, last_stage: int) -> None:
        self._sources = GradientSources(assignment.boundary(last_stage))
        units = enumerate(assignment.chain.units)
        self._stages = {node: assignment.stage_of(position) for position, unit in units for node in unit.nodes}

    def into(self, stage: int) -> Callable[[fx.Node], frozenset[int]]:
        """Gives for each tensor the numbers of the results that bring it a gradient from a stage or later ones."""
        # What is in no stage is a tensor between two others that no call uses by itself.
        last = len(self._stages)
        return partial(self._sources.of, counts=lambda call: self._stages.get(call, last) >= stage)


def stage_edges(
    assignment: Assignment,
    last_stage: int,
    sizes: Mapping[Any, int],
    carried: tuple[TensorSpec, ...] = (),
    gradients: StageGradients | None = None,
) -> tuple[Edge, ...]:
    """Returns the edges, each stage's in the order of its ``boundary_in`` and ``boundary_out``.

    Args:
        assignment: All stages.
        last_stage: The stage whose results are joined.
        sizes: Values of the graph's symbols for one microbatch.
        carried: What goes from each stage to the next besides, after the rest.
        gradients: Which gradients come back; by default those of all tensors that train.
    """

    def specs(nodes: tuple[fx.Node, ...], source: int) -> tuple[TensorSpec, ...]:
        return boundary_specs(nodes, sizes, None if gradients is None else gradients.into(source + 1))

    edges = [
        Edge(source=skip.source, target=skip.destination, spec=spec)
        for skip in assignment.skips
        for spec in specs((skip.node,), skip.source)
    ]
    for stage in range(last_stage):
        onward = (*specs(assignment.boundary(stage), stage), *carried)
        edges += [Edge(source=stage, target=stage + 1, spec=spec) for spec in onward]
    return tuple(edges)
