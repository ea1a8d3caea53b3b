"""From costs of units to costs of stages, as the simulator reads them: one sum, whatever the seconds are from.

Seconds are a clock's, a device description's, or relative ones (:class:`~lightning_fxpipe.simulation.costs.StageWork`), from
which a schedule makes its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.load import ADAM_BYTES_PER_BYTE, Load
from lightning_fxpipe.planner.measured_costs import UnitSeconds
from lightning_fxpipe.planner.partition import Weights
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.simulation.by_name import simulate
from lightning_fxpipe.simulation.costs import StageCosts, StageWork
from lightning_fxpipe.simulation.devices import Device
from lightning_fxpipe.simulation.simulator import Simulation

_DIGITS = 4


def units_as_stages(costs: UnitCosts, seconds: Sequence[UnitSeconds], scale: float = 1.0) -> list[StageCosts]:
    """Returns the costs with a stage for each unit, without states and messages.

    Args:
        costs: The table.
        seconds: Of each unit.
        scale: How much larger a microbatch is than the table's.
    """
    return [
        StageCosts(
            forward_seconds=each.forward,
            input_backward_seconds=each.input_backward,
            weight_backward_seconds=each.weight_backward,
            activation_bytes=kept * scale,
            weight_bytes=kept * scale,  # taken to be all that is kept
            gradient_bytes=gradients,
        )
        for each, kept, gradients in zip(seconds, costs.kept_bytes, costs.gradient_bytes, strict=True)
    ]


def costs_of_stages(
    units: Sequence[StageCosts],
    cuts: Sequence[int],
    output_bytes: Sequence[float],
    states: Weights | None = None,
    speeds: Sequence[float] = (),
) -> list[StageCosts]:
    """Returns the costs of the stages between cuts.

    Args:
        units: Costs with a stage for each unit.
        cuts: Position of the last unit of each stage but the last.
        output_bytes: Bytes that each stage but the last sends.
        states: Bytes of the units' states, where units share some; None: the sums of ``units``.
        speeds: Speed of each stage's device relative to the one that seconds are of; empty if it is that one.
    """
    stages = []
    bounds = [0, *(cut + 1 for cut in cuts), len(units)]
    for stage, (start, end) in enumerate(pairwise(bounds)):
        of_stage, speed = units[start:end], speeds[stage] if speeds else 1.0
        stages.append(
            StageCosts(
                forward_seconds=sum(unit.forward_seconds for unit in of_stage) / speed,
                input_backward_seconds=sum(unit.input_backward_seconds for unit in of_stage) / speed,
                weight_backward_seconds=sum(unit.weight_backward_seconds for unit in of_stage) / speed,
                activation_bytes=sum(unit.activation_bytes for unit in of_stage),
                weight_bytes=sum(unit.weight_bytes for unit in of_stage),
                output_bytes=output_bytes[stage] if stage < len(cuts) else 0.0,
                state_bytes=sum(unit.state_bytes for unit in of_stage) if states is None else states.of(start, end),
                gradient_bytes=sum(unit.gradient_bytes for unit in of_stage),
            )
        )
    return stages


def stage_costs(costs: UnitCosts, cuts: Sequence[int], device: Device, load: Load | None = None) -> list[StageCosts]:
    """Returns the costs of stages for one microbatch on a device that is described by a few numbers.

    Tensors that cross several cuts go past stages that do not use them.

    Args:
        costs: The table.
        cuts: Position of the last unit of each stage but the last.
        device: The fastest device.
        load: The devices' relative speeds, and what the optimizer keeps; None: equal devices, and Adam.
    """
    chain = costs.chain
    assignment = Assignment(chain=chain, cuts=tuple(cuts)).with_skips()
    outputs = [sum(map(chain.num_bytes, assignment.boundary(stage))) for stage in range(len(cuts))]
    states = costs.states(ADAM_BYTES_PER_BYTE if load is None else load.optimizer_bytes_per_byte)
    speeds = () if load is None else load.speed_shares
    stages = costs_of_stages(units_as_stages(costs, costs.seconds_on(device)), cuts, outputs, states, speeds)
    skips: list[dict[int, float]] = [{} for _ in stages]
    for skip in assignment.skips:
        skips[skip.source][skip.destination] = skips[skip.source].get(skip.destination, 0.0) + chain.num_bytes(skip.node)
    return [replace(stage, skips=tuple(past.items())) for stage, past in zip(stages, skips, strict=True)]


def simulate_stages(costs: UnitCosts, cuts: Sequence[int], device: Device, load: Load) -> Simulation:
    """Simulates a step. Arguments as :func:`stage_costs`, with the schedule in ``load``.

    Raises:
        ScheduleError: There is no such schedule for these stages.
    """
    stages = stage_costs(costs, cuts, device, load)
    states = [0.0] * load.num_ranks
    for stage, cost in enumerate(stages):
        states[load.rank_of(stage)] += cost.state_bytes
    return simulate(
        stages,
        num_microbatches=load.num_microbatches,
        schedule=load.schedule,
        stages_per_rank=load.stages_per_rank,
        memory_bytes=[device.memory_bytes - of_rank for of_rank in states],
        link=device.link,
    )


def stage_work(
    costs: UnitCosts,
    cuts: Sequence[int],
    *,
    seconds: Sequence[UnitSeconds] | None = None,
    recomputed: Sequence[str] = (),
) -> tuple[StageWork, ...]:
    """Returns the relative work of stages; empty if none of them has any.

    Args:
        costs: The table, which says what is kept.
        cuts: Position of the last unit of each stage but the last.
        seconds: Of the units; None: flops, and as much for each byte that is read or written, so that operators without
            arithmetic count.
        recomputed: Modules whose activations are recomputed, once for each half of a backward pass.
    """
    units = [*(_operations(costs) if seconds is None else seconds)]
    kept = [*costs.kept_bytes]
    before: str | None = None
    for index, unit in enumerate(costs.chain.units):
        path = next((path for path in recomputed if f"{unit.path}.".startswith(f"{path}.")), None)
        if path is not None:
            forward, inputs, weights = units[index].parts
            units[index] = UnitSeconds(forward, inputs and inputs + forward, weights and weights + forward)
            kept[index] = 0 if path == before else costs.chain.site(index - 1).num_bytes
        before = path
    mean = sum(sum(unit.parts) for unit in units) / (len(cuts) + 1)
    bounds = [0, *(cut + 1 for cut in cuts), len(units)]
    return tuple(
        StageWork(
            forward=round(sum(unit.forward for unit in units[start:end]) / mean, _DIGITS),
            input_backward=round(sum(unit.input_backward for unit in units[start:end]) / mean, _DIGITS),
            weight_backward=round(sum(unit.weight_backward for unit in units[start:end]) / mean, _DIGITS),
            kept_bytes=sum(kept[start:end]),
        )
        for start, end in pairwise(bounds)
        if mean
    )


def _operations(costs: UnitCosts) -> list[UnitSeconds]:
    """Seconds on a device that needs one for each flop and each byte."""
    return [
        UnitSeconds(
            *(
                float(sum(operator.flops + operator.num_bytes for operator in part))
                for part in (unit.forward, unit.input_backward, unit.weight_backward)
            )
        )
        for unit in costs.operators
    ]
