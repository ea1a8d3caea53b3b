"""Plans and timelines of any size, without a model."""

from __future__ import annotations

import math

from lightning_fxpipe.planner.plan import BoundaryTensor, PartitionPlan, StageSpec
from lightning_fxpipe.planner.simulated_plan import SimulatedPlan
from lightning_fxpipe.simulation.by_name import SimulatedSchedule, simulate, stages_of_ranks
from lightning_fxpipe.simulation.costs import StageCosts
from lightning_fxpipe.simulation.devices import Device
from lightning_fxpipe.simulation.simulator import Simulation
from lightning_fxpipe.simulation.timeline import Span, Timeline

WIDTH = 16
MEMORY_BYTES = 5e9
# A key of a ModuleDict may have any characters but dots.
WICKED = "</script><b onclick='alert(1)'>&\"\u2028"


def simulated_plan(num_stages: int, num_microbatches: int, *schedules: SimulatedSchedule) -> SimulatedPlan:
    """A plan, and what a step would take with it."""
    return SimulatedPlan(
        plan=plan_of(num_stages),
        num_microbatches=num_microbatches,
        device=Device(flops_per_second=1, bytes_per_second=1, memory_bytes=MEMORY_BYTES),
        simulations={name: simulation(name, num_stages, num_microbatches) for name in schedules},
        refused={"dualpipev": "There are too few microbatches."},
    )


def simulation(schedule: SimulatedSchedule, num_ranks: int, num_microbatches: int) -> Simulation:
    """A step whose stages take a little longer one after the other."""
    per_rank = len(stages_of_ranks(schedule, num_ranks)[0])
    costs = [_costs(stage / per_rank) for stage in range(num_ranks * per_rank)]
    return simulate(costs, num_microbatches=num_microbatches, schedule=schedule, stages_per_rank=per_rank)


def _costs(place: float) -> StageCosts:
    seconds = 1e-3 * (1 + 0.01 * place)
    return StageCosts(
        forward_seconds=seconds,
        input_backward_seconds=seconds,
        weight_backward_seconds=seconds / 3,
        activation_bytes=2e9,
        weight_bytes=1e9,
        state_bytes=1e9 + place,
    )


def timeline(schedule: SimulatedSchedule = "1f1b", num_ranks: int = 2, num_microbatches: int = 4) -> Timeline:
    """That of a simulated step."""
    return Timeline.of_simulation(f"{schedule}, simulated", simulation(schedule, num_ranks, num_microbatches))


def measured(like: Timeline) -> Timeline:
    """One that took half as long again, with an optimizer's step after it; nobody knows what was kept."""
    ranks = []
    for spans in like.ranks:
        end = 1.5 * spans[-1].end_seconds
        later = (Span(span.work, 1.5 * span.start_seconds, 1.5 * span.end_seconds) for span in spans)
        ranks.append((*later, Span("optimizer step", end, end + 2e-3)))
    return Timeline("measured", tuple(ranks))


def plan_of(num_stages: int) -> PartitionPlan:
    """A layer for each stage, one of which has a name that is markup; a head outside, and a teacher on every rank."""
    layers = [f"net.{stage if stage else WICKED}" for stage in range(num_stages)]
    shapes: dict[str, tuple[int, ...]] = {f"{layer}.weight": (WIDTH, WIDTH) for layer in layers}
    return PartitionPlan(
        region="net",
        stages=tuple(
            StageSpec(
                index=stage,
                first_module=layer,
                last_module=layer,
                fqns=(f"{layer}.weight",),
                num_parameters=math.prod(shapes[f"{layer}.weight"]),
                outputs=() if stage == num_stages - 1 else (_boundary(stage, layer),),
            )
            for stage, layer in enumerate(layers)
        ),
        microbatch_size=2,
        parameter_shapes={**shapes, "head.bias": (3,), "teacher.weight": (2, 2)},
        outside_fqns=("head.bias",),
        prelude_fqns=("teacher.weight",),
    )


def _boundary(stage: int, layer: str) -> BoundaryTensor:
    return BoundaryTensor(
        name="out",
        module=layer,
        shape=(2, WIDTH),
        dtype="float32",
        requires_grad=True,
        producer_stage=stage,
        consumer_stages=(stage + 1,),
        num_bytes=2 * WIDTH * 4,
    )
