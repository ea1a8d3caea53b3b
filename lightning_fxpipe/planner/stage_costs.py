"""Seconds and bytes of stages on a device that is described by a few numbers, from the operators of their units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.cost import Chain
from lightning_fxpipe.planner.measured_costs import UnitSeconds
from lightning_fxpipe.planner.stage_work import StageWork
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.simulation.costs import StageCosts
from lightning_fxpipe.simulation.devices import Device

# Of what a forward keeps, what is kept until the gradients of weights: about half (arXiv 2401.10241, table 1).
KEPT_FOR_WEIGHTS = 0.5
_DIGITS = 4


def stage_costs(
    chain: Chain, costs: Sequence[UnitCosts], cuts: Sequence[int], device: Device, *, optimizer_bytes_per_byte: float = 2.0
) -> list[StageCosts]:
    """What each stage takes for one microbatch.

    Args:
        chain: The chain.
        costs: Of its units, see :func:`~lightning_fxpipe.planner.unit_costs.unit_costs`.
        cuts: Position of the last unit of each stage but the last.
        device: What each stage runs on.
        optimizer_bytes_per_byte: What the optimizer keeps for each byte of a parameter that trains; for Adam in its type 2.

    Returns:
        For each stage its costs; what is kept until the gradients of weights is taken to be all that is kept. What crosses
        several cuts goes past stages that do not use it.
    """
    assignment = Assignment(chain=chain, cuts=tuple(cuts)).with_skips()
    sent = [{skip.destination: 0.0 for skip in assignment.skips if skip.source == stage} for stage in range(len(cuts) + 1)]
    for skip in assignment.skips:
        sent[skip.source][skip.destination] += chain.num_bytes(skip.node)
    bounds = [0, *(cut + 1 for cut in cuts), len(costs)]
    stages = [_stage(costs[start:end], device, optimizer_bytes_per_byte) for start, end in pairwise(bounds)]
    outputs = [*(sum(map(chain.num_bytes, assignment.boundary(stage))) for stage in range(len(cuts))), 0]
    return [
        replace(stage, output_bytes=output, skips=tuple(past.items()))
        for stage, output, past in zip(stages, outputs, sent, strict=True)
    ]


def units_as_stages(costs: Sequence[UnitCosts], device: Device) -> list[StageCosts]:
    """Costs with a stage for each unit, as ``fastest_cut`` takes them: without what they send."""
    return [_stage([unit], device, 2.0) for unit in costs]


def _stage(costs: Sequence[UnitCosts], device: Device, optimizer_bytes_per_byte: float) -> StageCosts:
    saved = sum(unit.saved_bytes for unit in costs)
    trained = sum(unit.gradient_bytes for unit in costs)
    return StageCosts(
        forward_seconds=sum(device.seconds(unit.forward) for unit in costs),
        input_backward_seconds=sum(device.seconds(unit.input_backward) for unit in costs),
        weight_backward_seconds=sum(device.seconds(unit.weight_backward) for unit in costs),
        activation_bytes=saved,
        weight_bytes=saved,
        state_bytes=sum(unit.parameter_bytes for unit in costs) + trained * (1 + optimizer_bytes_per_byte),
        gradient_bytes=trained,
    )


def stage_work(
    chain: Chain,
    costs: Sequence[UnitCosts],
    cuts: Sequence[int],
    *,
    seconds: Sequence[UnitSeconds] | None = None,
    recomputed: Sequence[str] = (),
) -> tuple[StageWork, ...]:
    """What each stage takes beside the others, for an order of actions that is made from it.

    Args:
        chain: The chain.
        costs: Of its units: they say what is kept, and where there are no seconds what is computed: flops, and as much for each
            byte that is read or written, so that what does no arithmetic counts, too.
        cuts: Position of the last unit of each stage but the last.
        seconds: What its units take, where they have been timed.
        recomputed: Modules whose activations are computed again, once for each half of a backward pass.

    Returns:
        For each stage its work; nothing where all of them take none.
    """
    units = [_unit_work(costs[i] if seconds is None else seconds[i]) for i in range(len(costs))]
    kept = [unit.saved_bytes for unit in costs]
    before: str | None = None
    for index, unit in enumerate(chain.units):
        path = next((path for path in recomputed if f"{unit.path}.".startswith(f"{path}.")), None)
        if path is not None:
            forward, inputs, weights = units[index]
            units[index] = forward, inputs + (forward if inputs else 0.0), weights + (forward if weights else 0.0)
            kept[index] = 0 if path == before else chain.site(index - 1).num_bytes
        before = path
    mean = sum(map(sum, units)) / (len(cuts) + 1)
    bounds = [0, *(cut + 1 for cut in cuts), len(units)]
    return tuple(
        StageWork(
            forward=round(sum(unit[0] for unit in units[start:end]) / mean, _DIGITS),
            input_backward=round(sum(unit[1] for unit in units[start:end]) / mean, _DIGITS),
            weight_backward=round(sum(unit[2] for unit in units[start:end]) / mean, _DIGITS),
            kept_bytes=sum(kept[start:end]),
        )
        for start, end in zip(bounds, bounds[1:], strict=False)
        if mean
    )


def costs_of_work(stages: Sequence[StageWork]) -> tuple[StageCosts, ...]:
    """The same as costs, in seconds of which nobody knows how long they are."""
    return tuple(
        StageCosts(
            forward_seconds=stage.forward,
            input_backward_seconds=stage.input_backward,
            weight_backward_seconds=stage.weight_backward,
            activation_bytes=stage.kept_bytes,
            weight_bytes=KEPT_FOR_WEIGHTS * stage.kept_bytes,
        )
        for stage in stages
    )


def _unit_work(unit: UnitCosts | UnitSeconds) -> tuple[float, float, float]:
    if isinstance(unit, UnitSeconds):
        return unit.forward, unit.input_backward, unit.weight_backward
    forward, inputs, weights = (
        float(sum(operator.flops + operator.num_bytes for operator in part))
        for part in (unit.forward, unit.input_backward, unit.weight_backward)
    )
    return forward, inputs, weights
