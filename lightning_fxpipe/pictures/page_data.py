"""A page as plain values, which its script draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_fxpipe.pictures.looks import LOOKS, OTHER, Look
from lightning_fxpipe.pictures.page import Alternative, Page
from lightning_fxpipe.pictures.replica_grid import ReplicaGrid
from lightning_fxpipe.planner.plan import PartitionPlan, StageSpec
from lightning_fxpipe.simulation.actions import Action
from lightning_fxpipe.simulation.costs import StageCosts
from lightning_fxpipe.simulation.timeline import Span, Timeline

_DIGITS = 9  # of times: more than any clock has, and half of what Python would write


def data_of(page: Page) -> dict[str, Any]:
    """A page as a dict of lists, dicts, texts and numbers. What a rank does is in columns: a step may have 100,000 actions."""
    return {
        "title": page.title,
        "notes": [*page.notes],
        "memoryLimitBytes": page.memory_limit_bytes,
        "looks": {**{kind.value: _look(look) for kind, look in LOOKS.items()}, "other": _look(OTHER)},
        "plan": None if page.plan is None else _plan(page.plan, page.stage_costs),
        "replicas": None if page.replicas is None else _replicas(page.replicas),
        "alternatives": [_alternative(each) for each in page.alternatives],
    }


def _look(look: Look) -> Mapping[str, Any]:
    return {"words": look.words, "light": [*look.light], "dark": [*look.dark]}


def _plan(plan: PartitionPlan, costs: Sequence[StageCosts]) -> Mapping[str, Any]:
    every_rank = {*plan.prelude_fqns}
    return {
        "text": str(plan),
        "numParameters": plan.num_parameters,
        "microbatchSize": plan.microbatch_size,
        "stages": [_stage(stage, plan.num_held(stage.index), costs[stage.index] if costs else None) for stage in plan.stages],
        # A parameter on every rank has no stage.
        "parameters": [
            [fqn, [*shape], [] if fqn in every_rank else [*plan.stages_of(fqn)]] for fqn, shape in plan.parameter_shapes.items()
        ],
    }


def _replicas(grid: ReplicaGrid) -> Mapping[str, Any]:
    return {
        "stages": [[*grid.placement.stages_of(place)] for place in range(grid.placement.num_ranks)],
        "ranks": [[*ranks] for ranks in grid.ranks],
        "machines": [[*machines] for machines in grid.machines],
        "gradientBytes": [round(num_bytes) for num_bytes in grid.gradient_bytes],
    }


def _stage(stage: StageSpec, num_parameters: int, costs: StageCosts | None) -> Mapping[str, Any]:
    known = {} if costs is None else {"stateBytes": costs.state_bytes, "activationBytes": costs.activation_bytes}
    return {
        "first": stage.first_module or "(root)",
        "last": stage.last_module or "(root)",
        "numParameters": num_parameters,
        "outputBytes": stage.output_bytes,
        "skippingBytes": stage.skipping_bytes,
        "numOutputs": len(stage.outputs),
        **known,
    }


def _alternative(alternative: Alternative) -> Mapping[str, Any]:
    return {
        "name": alternative.name,
        "refused": alternative.refused,
        "timelines": [_timeline(each) for each in alternative.timelines],
    }


def _timeline(timeline: Timeline) -> Mapping[str, Any]:
    critical = frozenset(timeline.critical_path)
    kept = timeline.kept_bytes or [()] * len(timeline.ranks)
    return {
        "label": timeline.label,
        "seconds": _rounded(timeline.seconds),
        "idle": timeline.bubble_fraction,
        "ranks": [
            _rank(number, spans, pairs, critical)
            for number, spans, pairs in zip(timeline.rank_numbers, timeline.ranks, kept, strict=True)
        ],
    }


def _rank(
    number: int, spans: Sequence[Span], kept: Sequence[tuple[float, float]], critical: frozenset[Action]
) -> Mapping[str, Any]:
    """Returns the actions of a rank, and the memory that it keeps, with a time for each change of that."""
    changes = [pair for index, pair in enumerate(kept) if index == 0 or pair[1] != kept[index - 1][1]]
    return {
        "number": number,
        "work": [str(span.work) for span in spans],
        "starts": [_rounded(span.start_seconds) for span in spans],
        "ends": [_rounded(span.end_seconds) for span in spans],
        "critical": [index for index, span in enumerate(spans) if span.work in critical],
        "keptSeconds": [_rounded(seconds) for seconds, _ in changes],
        "keptBytes": [round(num_bytes) for _, num_bytes in changes],
    }


def _rounded(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")
