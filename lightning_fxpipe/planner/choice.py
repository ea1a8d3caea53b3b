"""Chooses a schedule, the stages on each device and the number of microbatches: what takes the least time and fits the memory.

1. The units of the chain are timed for microbatches of each size that is possible (``measured_costs``).
2. For each combination the chain is cut into stages of equal seconds, and a step is simulated (``simulation``).
3. The fastest that fits the memory is taken; of those that are as good as equal, the one that needs the least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from lightning_fxpipe.errors import PartitionError, ScheduleError
from lightning_fxpipe.microbatch.split import plan_passes
from lightning_fxpipe.planner import measured_costs
from lightning_fxpipe.planner.alternatives import Alternative
from lightning_fxpipe.planner.cost import Chain
from lightning_fxpipe.planner.fastest_cut import merged
from lightning_fxpipe.planner.granularity import cut_costs
from lightning_fxpipe.planner.measured_costs import UnitSeconds
from lightning_fxpipe.planner.partition import solve
from lightning_fxpipe.planner.recompute_rule import Load
from lightning_fxpipe.planner.unit_costs import UnitCosts, unit_costs
from lightning_fxpipe.simulation.by_name import SimulatedSchedule, simulate, stages_of_ranks
from lightning_fxpipe.simulation.costs import Link, Overhead, StageCosts
from lightning_fxpipe.simulation.simulator import Simulation

# Of each action of the runtime: Python, and what starts a message (examples/benchmarks/overhead.py, a tiny GPT).
OVERHEAD = Overhead(action_seconds=1.2e-3)
# Messages between processes of a machine: through its memory, or over NVLink or PCIe.
_LINKS = {"cpu": Link(latency_seconds=2e-4, bytes_per_second=2e9), "cuda": Link(latency_seconds=2e-5, bytes_per_second=2e10)}
# The two halves of a backward take so much longer than the whole (docs/schedules.md: zb_h1 beside 1f1b).
_SPLIT_SHARE = 0.05
_WHOLE_BACKWARDS = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b")
# What differs by less is equal: clocks are no better.
_SAME = 1.01
_STATES_PER_BYTE = 3  # of a parameter that trains: its gradient, and two moments of Adam
_NANOSECONDS = 1e9


@dataclass(frozen=True, kw_only=True)
class Combination:
    """A schedule, the stages on each device, and the microbatches of a batch."""

    schedule: SimulatedSchedule
    stages_per_rank: int
    num_microbatches: int


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was chosen.

    Attributes:
        cuts: Position of the last unit of each stage but the last.
        alternatives: All combinations that there are, the chosen one first, then by their seconds.
        unit_seconds: What the units take that were timed for it; None where none were.
    """

    cuts: tuple[int, ...]
    alternatives: tuple[Alternative, ...]
    unit_seconds: tuple[UnitSeconds, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a choice is made from.

    Attributes:
        num_ranks: Devices.
        num_samples: Of a batch.
        combinations: Those to look at.
        memory_bytes: What a device has for its stages; None where nobody knows.
    """

    num_ranks: int
    num_samples: int
    combinations: tuple[Combination, ...]
    memory_bytes: int | None = None

    @property
    def most_stages(self) -> int:
        """Of the combination that has the most."""
        return self.num_ranks * max(combination.stages_per_rank for combination in self.combinations)

    def load(self, chain: Chain, chosen: Alternative) -> Load | None:
        """What the stages have to hold with what was chosen; None where nobody knows the memory."""
        if self.memory_bytes is None:
            return None
        size = plan_passes(self.num_samples, chosen.num_microbatches)[0].size
        return Load(
            schedule=cast(SimulatedSchedule, chosen.schedule),
            stages_per_rank=chosen.stages_per_rank,
            num_microbatches=chosen.num_microbatches,
            scale=size / max(1, chain.traced.batch_size),
            memory_bytes=self.memory_bytes,
        )

    def choose(self, chain: Chain, outside_bytes: int = 0) -> Choice:
        """The fastest combination.

        Args:
            chain: The chain, open enough to be cut into :attr:`most_stages`.
            outside_bytes: Of parameters that the last stage has besides.

        Raises:
            PartitionError: No combination has enough legal cuts.
            ScheduleError: There is no such schedule for any of them.
            TraceError: A part of the model cannot be timed.
        """
        return _Chooser(self, chain, outside_bytes).choose()


def microbatch_counts(num_samples: int, num_ranks: int, default: int) -> tuple[int, ...]:
    """How many microbatches to look at: the default, and the powers of two up to eight for each device that divide a batch.

    >>> microbatch_counts(16, 2, 8), microbatch_counts(6, 2, 3), microbatch_counts(48, 4, 16)
    ((1, 2, 4, 8, 16), (1, 2, 3), (1, 2, 4, 8, 16))
    """
    powers = [1 << exponent for exponent in range(12) if 1 << exponent <= min(num_samples, 8 * num_ranks)]
    return (*sorted({default, *(count for count in powers if num_samples % count == 0)}),)


class _Chooser:
    """Simulates the combinations of a search."""

    def __init__(self, search: Search, chain: Chain, outside_bytes: int) -> None:
        self._search = search
        self._chain = chain
        self._outside_bytes = outside_bytes
        self._cut_bytes = cut_costs(chain)
        self._refused: PartitionError | ScheduleError | None = None
        self._seconds: dict[int, tuple[UnitSeconds, ...] | None] = {}  # by the samples of a microbatch
        self._link = _LINKS.get(chain.traced.device.type, _LINKS["cpu"])

    def choose(self) -> Choice:
        """The fastest combination, and the others."""
        found = sorted(self._simulated(), key=lambda one: (not one[0].fits, one[0].step_seconds))
        if not found:
            assert self._refused is not None
            raise self._refused
        fastest = found[0][0]
        rivals = [one for one in found if one[0].fits == fastest.fits and one[0].step_seconds <= _SAME * fastest.step_seconds]
        if not fastest.fits:
            rivals = found  # none fits: what is left is to come as close as can be
        chosen = min(rivals, key=lambda one: one[0].peak_bytes)
        others = [alternative for alternative, _ in found if alternative is not chosen[0]]
        size = plan_passes(self._search.num_samples, chosen[0].num_microbatches)[0].size
        return Choice(cuts=chosen[1], alternatives=(chosen[0], *others), unit_seconds=self._seconds[size])

    def _simulated(self) -> Iterator[tuple[Alternative, tuple[int, ...]]]:
        for combination in self._search.combinations:
            units = self._units(combination)
            if units is None:
                continue
            try:
                cuts, simulation = self._simulate(combination, units)
            except (PartitionError, ScheduleError) as error:
                self._refused = self._refused or error
                continue
            yield self._alternative(combination, simulation), cuts

    def _simulate(self, combination: Combination, units: Sequence[StageCosts]) -> tuple[tuple[int, ...], Simulation]:
        num_stages = self._search.num_ranks * combination.stages_per_rank
        weights = [round(_NANOSECONDS * _all_seconds(unit)) for unit in units]
        cuts = solve(weights, self._cut_bytes, num_stages)
        bounds = [0, *(cut + 1 for cut in cuts), len(units)]
        outputs = [*(self._chain.site(cut).num_bytes * self._scale(combination) for cut in cuts), 0.0]
        stages = [merged(units[start:end], output) for start, end, output in zip(bounds, bounds[1:], outputs, strict=False)]
        if combination.schedule not in _WHOLE_BACKWARDS:
            stages = [_split(stage) for stage in stages]
        return cuts, simulate(
            stages,
            num_microbatches=combination.num_microbatches,
            schedule=combination.schedule,
            stages_per_rank=combination.stages_per_rank,
            link=self._link,
            overhead=OVERHEAD,
        )

    def _alternative(self, combination: Combination, simulation: Simulation) -> Alternative:
        peak = max(simulation.peak_bytes)
        limit = self._search.memory_bytes
        return Alternative(
            schedule=combination.schedule,
            stages_per_rank=combination.stages_per_rank,
            num_microbatches=combination.num_microbatches,
            step_seconds=simulation.seconds,
            idle_share=simulation.bubble_fraction,
            peak_bytes=round(peak),
            fits=limit is None or peak <= limit,
        )

    # ------------------------------------------------------------------ costs

    @cached_property
    def _costs(self) -> tuple[UnitCosts, ...]:
        return unit_costs(self._chain)

    def _num_samples(self, combination: Combination) -> int:
        """Of a microbatch."""
        return plan_passes(self._search.num_samples, combination.num_microbatches)[0].size

    def _scale(self, combination: Combination) -> float:
        """How much larger a microbatch is than the one that bytes are known of."""
        return self._num_samples(combination) / max(1, self._chain.traced.batch_size)

    def _units(self, combination: Combination) -> list[StageCosts] | None:
        """What each unit takes for a microbatch; None where the graph is not that of one of this size."""
        size = self._num_samples(combination)
        if size not in self._seconds:
            self._seconds[size] = measured_costs.measured_seconds(self._chain, size)
        seconds = self._seconds[size]
        if seconds is None:
            return None
        units = [_stage_costs(cost, each, self._scale(combination)) for cost, each in zip(self._costs, seconds, strict=True)]
        outside = (1 + _STATES_PER_BYTE) * self._outside_bytes
        return [*units[:-1], replace(units[-1], state_bytes=units[-1].state_bytes + outside)]


def _stage_costs(costs: UnitCosts, seconds: UnitSeconds, scale: float) -> StageCosts:
    saved_bytes = costs.saved_bytes * scale
    return StageCosts(
        forward_seconds=seconds.forward,
        input_backward_seconds=seconds.input_backward,
        weight_backward_seconds=seconds.weight_backward,
        activation_bytes=saved_bytes,
        weight_bytes=saved_bytes,
        state_bytes=costs.parameter_bytes + _STATES_PER_BYTE * costs.gradient_bytes,
    )


def _split(stage: StageCosts) -> StageCosts:
    extra = _SPLIT_SHARE * (stage.input_backward_seconds + stage.weight_backward_seconds)
    return replace(stage, weight_backward_seconds=stage.weight_backward_seconds + extra)


def _all_seconds(unit: StageCosts) -> float:
    return unit.forward_seconds + unit.input_backward_seconds + unit.weight_backward_seconds


def combinations(
    schedules: Sequence[SimulatedSchedule], counts: Sequence[int], stages_per_rank: int | None, num_ranks: int
) -> tuple[Combination, ...]:
    """All of these, with as many stages on each device as a schedule wants or, where it takes any, as the user does.

    Args:
        schedules: Schedules to look at.
        counts: Numbers of microbatches to look at.
        stages_per_rank: What the user wants, if anything.
        num_ranks: Devices.
    """
    found = []
    for schedule in schedules:
        natural = len(stages_of_ranks(schedule, num_ranks)[0])
        takes_any = natural > 1 and schedule in ("interleaved_1f1b", "looped_bfs")
        if stages_per_rank in (None, natural) or takes_any:
            each = stages_per_rank if takes_any and stages_per_rank else natural
            found += [Combination(schedule=schedule, stages_per_rank=each, num_microbatches=count) for count in counts]
    return tuple(found)
