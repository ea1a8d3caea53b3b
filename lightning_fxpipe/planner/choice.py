"""Chooses a schedule, the stages on each device and the number of microbatches: the least time that fits the memory.

1. The units of the chain are timed for microbatches of each possible size.
2. For each combination the chain is cut into stages of equal seconds, and a step is simulated (``simulation``).
3. For those that may be the best, other cuts are simulated, too (``fastest_cut``).
4. The fastest that fits the memory is chosen; among those that are as good as equal, the one that needs the least.
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
from lightning_fxpipe.planner.alternatives import Alternative
from lightning_fxpipe.planner.fastest_cut import TimedChain, TimedCut
from lightning_fxpipe.planner.load import ADAM_BYTES_PER_BYTE, Load
from lightning_fxpipe.planner.measured_costs import UnitSeconds
from lightning_fxpipe.planner.partition import Firsts
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.simulation.by_name import SimulatedSchedule, stages_of_ranks

# A smaller difference is none: clocks are no better.
_SAME = 1.01
# Number of combinations, the fastest with equal seconds, for which other cuts are simulated.
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
    """Cuts, and how they were chosen.

    Attributes:
        cuts: Position of the last unit of each stage but the last.
        alternatives: All combinations that were simulated, the chosen one first, then by their seconds.
        unit_seconds: Measured seconds of the units; None if they were not timed.
    """

    cuts: tuple[int, ...]
    alternatives: tuple[Alternative, ...] = ()
    unit_seconds: tuple[UnitSeconds, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Search:
    """Combinations to choose from, and the devices.

    Attributes:
        num_ranks: Devices.
        num_samples: Samples of a batch.
        combinations: The combinations to compare.
        memory_bytes: Memory of each device for its stages, by global rank; empty if it is unknown.
        speeds: Relative speed of each device, by global rank; empty if all are equal.
        optimizer_bytes_per_byte: Bytes that the optimizer keeps on a device for each byte of a parameter that trains.
    """

    num_ranks: int
    num_samples: int
    combinations: tuple[Combination, ...]
    memory_bytes: tuple[int, ...] = ()
    speeds: tuple[float, ...] = ()
    optimizer_bytes_per_byte: float = ADAM_BYTES_PER_BYTE

    @property
    def most_stages(self) -> int:
        """Stages of the combination that has the most."""
        return self.num_ranks * max(combination.stages_per_rank for combination in self.combinations)

    def microbatch_size(self, num_microbatches: int) -> int:
        """Samples of the first microbatch."""
        return plan_passes(self.num_samples, num_microbatches)[0].size

    def load(self, costs: UnitCosts, chosen: Alternative | Combination) -> Load:
        """Returns how stages would run with a combination."""
        return Load(
            schedule=cast(SimulatedSchedule, chosen.schedule),
            num_ranks=self.num_ranks,
            stages_per_rank=chosen.stages_per_rank,
            num_microbatches=chosen.num_microbatches,
            scale=self.microbatch_size(chosen.num_microbatches) / max(1, costs.chain.traced.batch_size),
            memory_bytes=self.memory_bytes,
            speeds=self.speeds,
            optimizer_bytes_per_byte=self.optimizer_bytes_per_byte,
        )

    def choose(self, costs: UnitCosts, firsts: MakeFirsts) -> Choice:
        """Chooses the fastest combination.

        Args:
            costs: The table of a chain that is open enough to be cut into :attr:`most_stages`.
            firsts: Returns for a number of stages with which units each may begin; nothing where with any.

        Raises:
            PartitionError: No combination has enough legal cuts.
            ScheduleError: There is no such schedule for any of them.
            TraceError: A part of the model cannot be timed.
        """
        found = sorted(self._candidates(costs, firsts), key=_Candidate.order)
        # The fastest, and of those that do not fit those that would be if another cut did.
        promising = [*found[:_NUM_REFINED], *sorted(found, key=lambda one: one.alternative.step_seconds)[:_NUM_REFINED]]
        better = {one: one.refined() for one in dict.fromkeys(promising)}
        found = sorted((better.get(one, one) for one in found), key=_Candidate.order)
        fastest = found[0].alternative
        rivals = [
            one
            for one in found
            if one.alternative.fits == fastest.fits and one.alternative.step_seconds <= _SAME * fastest.step_seconds
        ]
        # If none fits, the choice comes as close as possible.
        chosen = min(rivals if fastest.fits else found, key=lambda one: one.alternative.peak_bytes)
        others = [one.alternative for one in found if one is not chosen]
        return Choice(cuts=chosen.cut.cuts, alternatives=(chosen.alternative, *others), unit_seconds=chosen.seconds)

    def _candidates(self, costs: UnitCosts, firsts: MakeFirsts) -> Iterator[_Candidate]:
        """Yields the combinations that are possible, with stages of equal seconds."""
        sizes = {self.microbatch_size(combination.num_microbatches) for combination in self.combinations}
        seconds = {size: costs.measured_seconds(size) for size in sorted(sizes, reverse=True)}
        refused: PartitionError | ScheduleError | None = None
        is_empty = True
        for combination in self.combinations:
            timed = seconds[self.microbatch_size(combination.num_microbatches)]
            if timed is None:
                continue  # the graph does not admit microbatches of this size
            try:
                load = self.load(costs, combination)
                chain = TimedChain.of(costs, timed, load, firsts(load.num_stages))
                yield _Candidate(combination, chain, timed, chain.balanced())
                is_empty = False
            except (PartitionError, ScheduleError) as error:
                refused = refused or error
        if is_empty:
            assert refused is not None
            raise refused


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A combination, and the best cut for it so far."""

    combination: Combination
    chain: TimedChain
    seconds: tuple[UnitSeconds, ...]
    cut: TimedCut

    @cached_property
    def alternative(self) -> Alternative:
        """The plan's line for it."""
        simulation, limits = self.cut.simulation, self.chain.memory_bytes
        fits = limits is None or all(peak <= limit for peak, limit in zip(simulation.peak_bytes, limits, strict=True))
        return Alternative.of(self.combination.schedule, simulation, fits=fits)

    def order(self) -> tuple[bool, float]:
        """Sorts the best first."""
        return not self.alternative.fits, self.alternative.step_seconds

    def refined(self) -> _Candidate:
        """Returns it with a faster cut, or one that fits, if there is one."""
        with suppress(PartitionError, ScheduleError):
            found = _Candidate(self.combination, self.chain, self.seconds, self.chain.fastest())
            return min(self, found, key=_Candidate.order)
        return self


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
