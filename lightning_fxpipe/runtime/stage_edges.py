"""The tensors that the stages of a trace give each other, as edges of the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.schedules.program import Edge
from lightning_fxpipe.stages.build import TensorSpec, boundary_specs


def stage_edges(
    assignment: Assignment, last_stage: int, sizes: Mapping[Any, int], carried: tuple[TensorSpec, ...] = ()
) -> tuple[Edge, ...]:
    """Returns the edges, each stage's in the order of its ``boundary_in`` and ``boundary_out``.

    Args:
        assignment: All stages.
        last_stage: The stage whose results are joined.
        sizes: Values of the graph's symbols for one microbatch.
        carried: What goes from each stage to the next besides, after the rest.
    """
    skips = assignment.skips
    specs = boundary_specs(tuple(skip.node for skip in skips), sizes)
    edges = [Edge(source=skip.source, target=skip.destination, spec=spec) for skip, spec in zip(skips, specs, strict=True)]
    for stage in range(last_stage):
        onward = (*boundary_specs(assignment.boundary(stage), sizes), *carried)
        edges += [Edge(source=stage, target=stage + 1, spec=spec) for spec in onward]
    return tuple(edges)
