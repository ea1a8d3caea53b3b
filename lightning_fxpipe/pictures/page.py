"""What a page shows, as frozen data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.simulated_plan import SimulatedPlan
from lightning_fxpipe.simulation.costs import StageCosts
from lightning_fxpipe.simulation.timeline import Timeline

_CALLS_ALONE = (
    "The times are simulated, of the model's calls alone: without the rest of the step, the optimizer and what Python takes."
)


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One of several ways to do a step, such as a schedule.

    Attributes:
        name: What it is called.
        timelines: Of a step, drawn under each other with the same time scale, such as a simulated and a measured one.
        refused: Why there are none; empty where there are.
    """

    name: str
    timelines: tuple[Timeline, ...] = ()
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a page shows.

    Attributes:
        title: Its heading.
        plan: The stages, and the model that they are of; None where nobody knows.
        stage_costs: What each stage of the plan takes for one microbatch; empty where nobody knows.
        alternatives: Timelines to compare.
        memory_limit_bytes: What each rank has, as a line above what it keeps.
        notes: Sentences below the heading.
    """

    title: str
    plan: PartitionPlan | None = None
    stage_costs: tuple[StageCosts, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    memory_limit_bytes: float | None = None
    notes: tuple[str, ...] = ()


def page_of_simulated_plan(simulated: SimulatedPlan, *, title: str = "") -> Page:
    """The page of a plan, and of a step with it under each schedule that was simulated.

    Args:
        simulated: What :func:`~lightning_fxpipe.planner.simulated_plan.simulate_plan` gives.
        title: Its heading; by default one that names the pipelined module.
    """
    plan, simulations = simulated.plan, simulated.simulations
    costs = (found.costs for found in simulations.values() if len(found.costs) == plan.num_stages)
    limit = simulated.device.memory_bytes
    return Page(
        title=title or title_of_plan(plan),
        plan=plan,
        stage_costs=next(costs, ()),
        alternatives=(
            *(
                Alternative(name=name, timelines=(Timeline.of_simulation(f"{name}, simulated", found),))
                for name, found in simulations.items()
            ),
            *(Alternative(name=name, refused=reason) for name, reason in simulated.refused.items()),
        ),
        memory_limit_bytes=limit if math.isfinite(limit) else None,
        notes=(_CALLS_ALONE,),
    )


def page_of_timelines(
    title: str,
    timelines: Mapping[str, Sequence[Timeline]],
    *,
    plan: PartitionPlan | None = None,
    memory_limit_bytes: float | None = None,
    notes: Sequence[str] = (),
) -> Page:
    """The page of any timelines.

    Args:
        title: Its heading.
        timelines: Those of each alternative, by its name; all of one alternative are drawn under each other.
        plan, memory_limit_bytes, notes: As those of :class:`Page`.
    """
    return Page(
        title=title,
        plan=plan,
        alternatives=tuple(Alternative(name=name, timelines=tuple(found)) for name, found in timelines.items()),
        memory_limit_bytes=memory_limit_bytes,
        notes=tuple(notes),
    )


def title_of_plan(plan: PartitionPlan) -> str:
    """A heading that names the pipelined module."""
    return f"Pipeline of {plan.region or 'the module'}"
