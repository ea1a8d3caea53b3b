"""Ranks that have recorded a step have recorded the same graph: across each cut go the same tensors."""

from __future__ import annotations

from lightning_fxpipe.distributed.agreement import check_agreement
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.errors import TraceError
from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.pytree.shapes import DimGroups
from lightning_fxpipe.runtime.stage_edges import StageGradients
from lightning_fxpipe.tracing.signals import CannotFollow


def check_same_cuts(
    assignment: Assignment,
    topology: Topology,
    symbolic: DimGroups | None = None,
    ends_because: str = "",
    *,
    may_run_whole: bool = False,
) -> None:
    """Raises ``TraceError`` if the ranks have recorded different graphs. Called by every rank.

    Code that looks at its buffers, as to see how far they are filled, sees those that its rank's stage has filled.

    Args:
        assignment: This rank's graph, cut.
        topology: This rank's place.
        symbolic: The dimensions whose sizes are symbols in it, where the ranks have just chosen them.
        ends_because: Why this rank did not see the step's end.
        may_run_whole: Whether ``CannotFollow`` is raised: the step can run on one rank.
    """
    # User code that fails while it is recorded makes another graph; where it does so on one rank alone, its error is here only.
    reasons = [f"{path} is not split ({reason})" for path, reason in assignment.chain.traced.kept_whole.items()]
    cuts = [[node.name for node in assignment.boundary(s)] for s in range(assignment.num_stages - 1)]
    nodes = assignment.chain.traced.graph.nodes
    # Which result of a module is which of the tensors that it leaves on itself.
    left = [(node.name, node.meta["sides"]) for node in nodes if node.meta.get("sides")]
    differs = TraceError(
        "The ranks recorded different graphs of the same step.",
        expected="the same tensors across each cut, and left on modules, on every rank",
        todo="Look for code that depends on the rank, on buffer values, on unseeded random numbers or on the order of a set.",
    )
    gradients = StageGradients(assignment, len(cuts) - 1) if cuts else None
    trained = [[sorted(gradients.into(s + 1)(n)) for n in assignment.boundary(s)] for s in range(len(cuts)) if gradients]
    found = (cuts, left, trained) if symbolic is None else (symbolic, cuts, left, trained)
    try:
        check_agreement(topology.control_group, found, differs, [*reasons, *filter(None, [ends_because])])
    except TraceError as error:
        if may_run_whole:
            raise CannotFollow(error) from None
        raise
