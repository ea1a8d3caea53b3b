"""Chooses a schedule, the stages on each device and the number of microbatches: what takes the least time and fits the memory.

1. The units of the chain are timed for microbatches of each size that is possible (``measured_costs``).
2. For each combination the chain is cut into stages of equal seconds, and a step is simulated (``simulation``).
3. For those that may be the best other cuts are looked at, too (``fastest_cut``).
4. The fastest that fits the memory is taken; of those that are as good as equal, the one that needs the least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from torch import nn

from lightning_fxpipe.errors import PartitionError, ScheduleError
from lightning_fxpipe.microbatch.batch_norms import batch_norms
from lightning_fxpipe.microbatch.split import default_num_microbatches, plan_passes
from lightning_fxpipe.planner import measured_costs
from lightning_fxpipe.planner.alternatives import Alternative
from lightning_fxpipe.planner.cost import Chain
from lightning_fxpipe.planner.fastest_cut import FastestCut
from lightning_fxpipe.planner.load import ADAM_BYTES_PER_BYTE, Load
from lightning_fxpipe.planner.measured_costs import UnitSeconds
from lightning_fxpipe.planner.partition import Firsts, Weights
from lightning_fxpipe.planner.timed_cut import TimedChain
from lightning_fxpipe.planner.unit_costs import UnitCosts, unit_costs
from lightning_fxpipe.simulation.by_name import SimulatedSchedule, stages_of_ranks
from lightning_fxpipe.simulation.simulator import Simulation

# What differs by less is equal: clocks are no better.
_SAME = 1.01
# Of so many combinations, the fastest with equal seconds, other cuts are looked at.
_NUM_REFINED = 3
# By the number of stages.
MakeFirsts = Callable[[int], Sequence[Firsts]]


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
        memory_bytes: What each device has for its stages, by global rank; empty where nobody knows.
        speeds: How fast each device is, in proportion to the others, by global rank; empty where all are equal.
        optimizer_bytes_per_byte: As of :class:`~lightning_fxpipe.planner.load.Load`.
    """

    num_ranks: int
    num_samples: int
    combinations: tuple[Combination, ...]
    memory_bytes: tuple[int, ...] = ()
    speeds: tuple[float, ...] = ()
    optimizer_bytes_per_byte: float = ADAM_BYTES_PER_BYTE

    @property
    def most_stages(self) -> int:
        """Of the combination that has the most."""
        return self.num_ranks * max(combination.stages_per_rank for combination in self.combinations)

    def load(self, chain: Chain, chosen: Alternative | Combination) -> Load:
        """How stages would run with a combination."""
        size = plan_passes(self.num_samples, chosen.num_microbatches)[0].size
        return Load(
            schedule=cast(SimulatedSchedule, chosen.schedule),
            num_ranks=self.num_ranks,
            stages_per_rank=chosen.stages_per_rank,
            num_microbatches=chosen.num_microbatches,
            scale=size / max(1, chain.traced.batch_size),
            memory_bytes=self.memory_bytes,
            speeds=self.speeds,
            optimizer_bytes_per_byte=self.optimizer_bytes_per_byte,
        )

    def choose(self, chain: Chain, states: Weights, firsts: MakeFirsts) -> Choice:
        """The fastest combination.

        Args:
            chain: The chain, open enough to be cut into :attr:`most_stages`.
            states: Bytes of its units' states.
            firsts: Gives for a number of stages with which units each may begin; nothing where with any.

        Raises:
            PartitionError: No combination has enough legal cuts.
            ScheduleError: There is no such schedule for any of them.
            TraceError: A part of the model cannot be timed.
        """
        return _Chooser(self, chain, states, firsts).choose()


def microbatch_counts(num_samples: int, num_ranks: int, default: int) -> tuple[int, ...]:
    """How many microbatches to look at: the default, and the powers of two up to eight for each device that divide a batch.

    >>> microbatch_counts(16, 2, 8), microbatch_counts(6, 2, 3), microbatch_counts(48, 4, 16)
    ((1, 2, 4, 8, 16), (1, 2, 3), (1, 2, 4, 8, 16))
    """
    powers = [1 << exponent for exponent in range(12) if 1 << exponent <= min(num_samples, 8 * num_ranks)]
    return (*sorted({default, *(count for count in powers if num_samples % count == 0)}),)


def possible_counts(module: nn.Module, num_samples: int, num_ranks: int, num_microbatches: int | None) -> tuple[int, ...]:
    """How many microbatches there may be: what the user says, or the default alone where the module has BatchNorm, which
    normalises over one.

    Args:
        module: The module.
        num_samples: Of a batch.
        num_ranks: Devices of a pipeline.
        num_microbatches: What the user says, if anything.
    """
    default = num_microbatches or default_num_microbatches(num_samples, num_ranks)
    is_open = num_microbatches is None and next(iter(batch_norms(module)), None) is None
    return microbatch_counts(num_samples, num_ranks, default) if is_open else (default,)


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A combination, and the best cut for it so far."""

    combination: Combination
    timed: TimedChain
    cut: FastestCut

    @cached_property
    def alternative(self) -> Alternative:
        """What the plan tells of it."""
        simulation, combination = self.cut.simulation, self.combination
        return Alternative(
            schedule=combination.schedule,
            stages_per_rank=combination.stages_per_rank,
            num_microbatches=combination.num_microbatches,
            step_seconds=simulation.seconds,
            idle_share=simulation.bubble_fraction,
            peak_bytes=round(max(simulation.peak_bytes)),
            fits=self._fits(simulation),
        )

    def _fits(self, simulation: Simulation) -> bool:
        memory = self.timed.load.in_pipeline(self.timed.load.memory_bytes)
        return all(peak <= limit for peak, limit in zip(simulation.peak_bytes, memory, strict=False))

    @property
    def order(self) -> tuple[bool, float]:
        """The best first."""
        return not self.alternative.fits, self.alternative.step_seconds

    def refined(self) -> _Candidate:
        """With a faster cut, or one that fits, if there is one."""
        with suppress(PartitionError, ScheduleError):
            found = _Candidate(self.combination, self.timed, self.timed.fastest())
            return min(self, found, key=lambda candidate: candidate.order)
        return self


class _Chooser:
    """Simulates the combinations of a search."""

    def __init__(self, search: Search, chain: Chain, states: Weights, firsts: MakeFirsts) -> None:
        self._search = search
        self._chain = chain
        self._states = states
        self._firsts = firsts
        self._refused: PartitionError | ScheduleError | None = None
        self._seconds: dict[int, tuple[UnitSeconds, ...] | None] = {}  # by the samples of a microbatch

    def choose(self) -> Choice:
        """The fastest combination, and the others."""
        found = sorted(self._simulated(), key=lambda one: one.order)
        if not found:
            assert self._refused is not None
            raise self._refused
        # The fastest, and of those that do not fit those that would be if another cut did.
        promising = [*found[:_NUM_REFINED], *sorted(found, key=lambda one: one.alternative.step_seconds)[:_NUM_REFINED]]
        better = {one: one.refined() for one in dict.fromkeys(promising)}
        found = sorted((better.get(one, one) for one in found), key=lambda one: one.order)
        fastest = found[0].alternative
        rivals = [
            one
            for one in found
            if one.alternative.fits == fastest.fits and one.alternative.step_seconds <= _SAME * fastest.step_seconds
        ]
        if not fastest.fits:
            rivals = found  # none fits: what is left is to come as close as can be
        chosen = min(rivals, key=lambda one: one.alternative.peak_bytes)
        others = [one.alternative for one in found if one is not chosen]
        return Choice(cuts=chosen.cut.cuts, alternatives=(chosen.alternative, *others), unit_seconds=chosen.timed.seconds)

    def _simulated(self) -> Iterator[_Candidate]:
        for combination in self._search.combinations:
            load = self._search.load(self._chain, combination)
            seconds = self._seconds_of(combination)
            if seconds is None:
                continue
            try:
                timed = TimedChain(
                    chain=self._chain,
                    costs=self._costs,
                    seconds=seconds,
                    states=self._states,
                    load=load,
                    firsts=self._firsts(load.num_stages),
                )
                cut = timed.balanced()
            except (PartitionError, ScheduleError) as error:
                self._refused = self._refused or error
                continue
            yield _Candidate(combination, timed, cut)

    @cached_property
    def _costs(self) -> tuple[UnitCosts, ...]:
        return unit_costs(self._chain)

    def _seconds_of(self, combination: Combination) -> tuple[UnitSeconds, ...] | None:
        """What each unit takes for a microbatch; None where the graph is not that of one of this size."""
        size = plan_passes(self._search.num_samples, combination.num_microbatches)[0].size
        if size not in self._seconds:
            self._seconds[size] = measured_costs.measured_seconds(self._chain, size)
        return self._seconds[size]


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
