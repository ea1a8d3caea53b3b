"""Contents of a page, as frozen data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_fxpipe.pictures.replica_grid import ReplicaGrid
from lightning_fxpipe.planner.layouts import Layout, LayoutComparison
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.simulated_plan import SimulatedPlan, placement_of
from lightning_fxpipe.simulation.costs import StageCosts
from lightning_fxpipe.simulation.timeline import Timeline

_SIMULATED = (
    "Times are simulated for the device {device}. They cover the model's calls only, without the rest of the step, the "
    "optimizer and Python overhead."
)

_LAYOUTS = "Each layout is pipeline ranks x replicas; the first one that fits has the highest throughput."
_AVERAGES = (
    "With several replicas, each rank averages the gradients of its stages with the other replicas at the end of a step. This "
    "counts as work, not as idle time."
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
    """Contents of a page.

    Attributes:
        title: Its heading.
        plan: The stages, and the model that they are of; None if unknown.
        stage_costs: What each stage of the plan takes for one microbatch; empty if unknown.
        alternatives: Timelines to compare.
        memory_limit_bytes: What each rank has, as a line above what it keeps.
        notes: Sentences below the heading.
        replicas: Which rank has which stages of which replica; None if there is one, or if unknown.
    """

    title: str
    plan: PartitionPlan | None = None
    stage_costs: tuple[StageCosts, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    memory_limit_bytes: float | None = None
    notes: tuple[str, ...] = ()
    replicas: ReplicaGrid | None = None


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
                for name, found in ((name, simulations[name]) for name in simulated.by_time())
            ),
            *(Alternative(name=name, refused=reason) for name, reason in simulated.refused.items()),
        ),
        memory_limit_bytes=limit if math.isfinite(limit) else None,
        notes=(_SIMULATED.format(device=simulated.device.name),),
    )


def page_of_timelines(
    title: str,
    timelines: Mapping[str, Sequence[Timeline]],
    *,
    plan: PartitionPlan | None = None,
    memory_limit_bytes: float | None = None,
    notes: Sequence[str] = (),
    replicas: ReplicaGrid | None = None,
) -> Page:
    """The page of any timelines.

    Args:
        title: Its heading.
        timelines: Those of each alternative, by its name; all of one alternative are drawn under each other.
        plan, memory_limit_bytes, notes, replicas: As those of :class:`Page`.
    """
    return Page(
        title=title,
        plan=plan,
        alternatives=tuple(Alternative(name=name, timelines=tuple(found)) for name, found in timelines.items()),
        memory_limit_bytes=memory_limit_bytes,
        notes=tuple(notes),
        replicas=replicas,
    )


def page_of_layouts(found: LayoutComparison) -> Page:
    """The page of the stages and replicas that a number of devices can be shared out among, with a step of each.

    Args:
        found: What :func:`~lightning_fxpipe.planner.layouts.compare_layouts` gives; the plan and the replicas are of its best.
    """
    best, limit = found.layouts[0], found.device.memory_bytes
    placement = placement_of(best.simulation)
    has_costs = len(best.simulation.costs) == found.plan.num_stages == best.num_ranks
    averages = (_AVERAGES,) if any(layout.num_replicas > 1 for layout in found.layouts) else ()
    return Page(
        title=f"{found.num_devices} devices: {title_of_plan(found.plan)}",
        plan=found.plan,
        stage_costs=best.simulation.costs if has_costs else (),
        alternatives=(
            *(
                Alternative(name=_name(layout), timelines=(timeline,))
                for layout, timeline in zip(found.layouts, timelines_of_layouts(found), strict=True)
            ),
            *(Alternative(name=f"{count} x {found.num_devices // count}", refused=reason) for count, reason in found.refused),
        ),
        memory_limit_bytes=limit if math.isfinite(limit) else None,
        notes=(_LAYOUTS, _SIMULATED.format(device=found.device.name), *averages),
        replicas=ReplicaGrid(num_replicas=best.num_replicas, placement=placement, gradient_bytes=best.simulation.gradient_bytes)
        if best.num_replicas > 1
        else None,
    )


def timelines_of_layouts(found: LayoutComparison) -> list[Timeline]:
    """Returns for each layout a step of one of its pipelines, with the average of the gradients."""
    link, shares_out = found.replica_link, found.shares_out
    return [
        Timeline.of_replicas(_label(each), each.simulation, each.num_replicas, link, shares_out=shares_out)
        for each in found.layouts
    ]


def _label(layout: Layout) -> str:
    return f"{_name(layout)}, simulated: {layout.samples_per_second:,.1f} samples/s"


def _name(layout: Layout) -> str:
    return f"{layout.num_ranks} x {layout.num_replicas}, {layout.chosen.schedule}"


def title_of_plan(plan: PartitionPlan) -> str:
    """A heading that names the pipelined module."""
    return f"Pipeline of {plan.region or 'the module'}"
