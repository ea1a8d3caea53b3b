"""Cuts by seconds: stages that take equally long, or the cut with which a simulated step takes the least time.

The lightest heaviest stage, which ``partition`` finds, is not always the fastest cut: the stages before and after it are waited
for, too, and a message takes time (pytorch PR 179212 has examples). A step's time is no sum over units, so no dynamic programme
minimises it. Cuts are compared by simulation instead:

1. Begin with the solver's cut by seconds, and move single cuts and pairs of neighbours as long as that helps.
2. Then enumerate all others, stage by stage from the first. A beginning with a stage that alone takes a step too much time is
   left out with all that begins so: until the stage gets the first microbatch, while it works on all, and until its last
   gradient has gone through the stages before it.

The second step makes it exact. It ends after a number of simulated actions: for chains of a dozen units it never does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from lightning_fxpipe.errors import PartitionError, ScheduleError
from lightning_fxpipe.planner.load import Load
from lightning_fxpipe.planner.measured_costs import UnitSeconds
from lightning_fxpipe.planner.partition import Demands, Firsts, NothingFits, Weights, cheapest_cuts
from lightning_fxpipe.planner.pinned import no_pinned_cut
from lightning_fxpipe.planner.stage_costs import costs_of_stages, units_as_stages
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.reporting.table import human_bytes
from lightning_fxpipe.simulation.actions import ActionTable
from lightning_fxpipe.simulation.by_name import table_of
from lightning_fxpipe.simulation.costs import Link, Overhead, StageCosts
from lightning_fxpipe.simulation.simulator import Simulation, run_table

# Of each action of the runtime: Python, and the start of a message (benchmarks/overhead.py, a tiny GPT).
OVERHEAD = Overhead(action_seconds=1.2e-3)
# Messages between processes of a machine: through its memory, or over NVLink or PCIe.
_LINKS = {"cpu": Link(latency_seconds=2e-4, bytes_per_second=2e9), "cuda": Link(latency_seconds=2e-5, bytes_per_second=2e10)}
# The two halves of a backward take longer than the whole by this share (docs/reference/schedules.md: zb_h1 beside 1f1b).
_SPLIT_SHARE = 0.05
_WHOLE_BACKWARDS = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b")
_NANOSECONDS = 1e9
# Actions that are simulated at most to find a faster cut: some tenths of a second.
_MAX_ACTIONS = 20_000
_NEVER = float("inf")

MakeTable = Callable[[Sequence[StageCosts]], ActionTable]


@dataclass(frozen=True, kw_only=True)
class TimedCut:
    """A cut, and a simulated step with it.

    Attributes:
        cuts: Position of the last unit of each stage but the last.
        simulation: The step.
    """

    cuts: tuple[int, ...]
    simulation: Simulation


@dataclass(frozen=True, kw_only=True)
class TimedChain:
    """A chain whose units have been timed, and the conditions that its stages run under.

    Attributes:
        units: Costs of each unit for one microbatch on the fastest device; their ``output_bytes`` do not count.
        cut_bytes: Bytes that cross the cut after each unit but the last; None where no cut may fall.
        num_stages: Number of stages.
        make_table: Makes the schedule for given stages.
        link, overhead: As for :func:`~lightning_fxpipe.simulation.simulator.run_table`.
        memory_bytes: Memory of each rank for states and activations; None for no limit.
        speeds: For each stage the speed of its device relative to the fastest; empty if all are equal.
        firsts: With which units each stage may begin, by its last one; empty where with any.
        states: Bytes of the units' states, where units share some; None: those of ``units``.
    """

    units: Sequence[StageCosts]
    cut_bytes: Sequence[float | None]
    num_stages: int
    make_table: MakeTable
    link: Link = Link()
    overhead: Overhead = Overhead()
    memory_bytes: Sequence[float] | None = None
    speeds: Sequence[float] = ()
    firsts: Sequence[Firsts] = ()
    states: Weights | None = None

    @classmethod
    def of(cls, costs: UnitCosts, seconds: Sequence[UnitSeconds], load: Load, firsts: Sequence[Firsts] = ()) -> TimedChain:
        """The chain of a table under a load.

        Args:
            costs: The table.
            seconds: Of its units on rank 0's device, for a microbatch of the load.
            load: How the stages will run.
            firsts: See :attr:`firsts`.
        """
        chain, schedule = costs.chain, load.schedule
        link = _LINKS.get(chain.traced.device.type, _LINKS["cpu"])
        splits = schedule.is_split if isinstance(schedule, ActionTable) else schedule not in _WHOLE_BACKWARDS
        on_fastest = load.speeds[0] / max(load.speeds) if load.speeds else 1.0

        def make_table(stages: Sequence[StageCosts]) -> ActionTable:
            if isinstance(schedule, ActionTable):
                return schedule
            return table_of(schedule, stages, load.num_microbatches, load.stages_per_rank, link=link)

        return cls(
            units=units_as_stages(costs, [_on_device(each, on_fastest, splits=splits) for each in seconds], load.scale),
            cut_bytes=[site.num_bytes * load.scale if chain.allows_cut(site.position) else None for site in chain.sites[:-1]],
            num_stages=load.num_stages,
            make_table=make_table,
            link=link,
            overhead=OVERHEAD,
            memory_bytes=load.in_pipeline(load.memory_bytes) or None,
            speeds=load.speed_shares,
            firsts=firsts,
            states=costs.states(load.optimizer_bytes_per_byte),
        )

    def balanced(self) -> TimedCut:
        """Returns the cut whose stages take equally long on their devices, as far as they can.

        Raises:
            PartitionError: There are fewer legal cuts than needed, or modules cannot be in the stages assigned to them.
            ScheduleError: There is no such schedule.
        """
        cuts = self._balanced_cuts
        return TimedCut(cuts=cuts, simulation=self.simulate(cuts))

    def fastest(self, max_actions: int = _MAX_ACTIONS) -> TimedCut:
        """Returns the cut with which a simulated step is fastest and fits the memory; the best one found if the search ends.

        Args:
            max_actions: Number of simulated actions after which the search ends.

        Raises:
            PartitionError: As :meth:`balanced`, or no cut was found that fits.
            ScheduleError: There is no such schedule for any cut.
        """
        search = _Search(self, max_actions)
        search.descend(self._balanced_cuts)
        search.enumerate_others()
        if search.best is None and search.refused is not None:
            raise search.refused
        if search.best is None:
            raise PartitionError(
                f"No partition into {self.num_stages} stages fits in memory.",
                observed=f"{', '.join(human_bytes(peak) for peak in search.closest)} with the closest partition",
                expected=f"at most {', '.join(human_bytes(limit) for limit in self.memory_bytes or ())}",
                todo="Use more microbatches or devices, a schedule that needs less memory, or activation checkpointing.",
            )
        return search.best

    def simulate(self, cuts: tuple[int, ...]) -> Simulation:
        """Simulates a step. Raises :class:`ScheduleError` if there is no schedule for these stages."""
        outputs = [self.cut_bytes[cut] or 0.0 for cut in cuts]
        stages = costs_of_stages(self.units, cuts, outputs, self.states, self.speeds)
        return run_table(self.make_table(stages), stages, link=self.link, overhead=self.overhead)

    def may_begin(self, cuts: tuple[int, ...]) -> bool:
        """True if each stage between cuts begins where it may."""
        stages = pairwise((-1, *cuts, len(self.units) - 1))
        return all(firsts[end] <= before + 1 for firsts, (before, end) in zip(self.firsts, stages, strict=False))

    @cached_property
    def legal(self) -> list[int]:
        """Positions of the units after which a cut may fall."""
        return [position for position, num_bytes in enumerate(self.cut_bytes) if num_bytes is not None]

    @cached_property
    def _balanced_cuts(self) -> tuple[int, ...]:
        weights = Weights(tuple(round(_NANOSECONDS * _seconds(unit)) for unit in self.units))
        costs = [None if num_bytes is None else round(num_bytes) for num_bytes in self.cut_bytes]
        try:
            return cheapest_cuts(Demands(weights, costs, self.num_stages, self.speeds, self.firsts))
        except NothingFits:
            raise no_pinned_cut() from None


def _on_device(unit: UnitSeconds, factor: float, *, splits: bool) -> UnitSeconds:
    inputs, weights = factor * unit.input_backward, factor * unit.weight_backward
    return UnitSeconds(factor * unit.forward, inputs, weights + _SPLIT_SHARE * (inputs + weights) if splits else weights)


def _seconds(unit: StageCosts) -> float:
    return unit.forward_seconds + unit.input_backward_seconds + unit.weight_backward_seconds


class _Search:
    """A search for the fastest cut.

    Attributes:
        best: The fastest cut so far that fits.
        closest: Peaks of memory of the ranks with the cut that comes closest to fitting.
        refused: Why there is no schedule for a cut.
    """

    def __init__(self, chain: TimedChain, max_actions: int) -> None:
        self.best: TimedCut | None = None
        self.closest: tuple[float, ...] = ()
        self.refused: ScheduleError | None = None
        self._chain, self._actions_left = chain, max_actions
        self._seen: dict[tuple[int, ...], float] = {}
        # Sums over the first units: forwards, backwards of inputs, all.
        self._forwards = [0.0, *accumulate(unit.forward_seconds for unit in chain.units)]
        self._inputs = [0.0, *accumulate(unit.input_backward_seconds for unit in chain.units)]
        self._all = [0.0, *accumulate(map(_seconds, chain.units))]

    def seconds(self, cuts: tuple[int, ...]) -> float:
        """Seconds of a step with these cuts; infinite if they are not allowed or do not fit."""
        if cuts not in self._seen:
            self._seen[cuts] = self._simulated(cuts) if self._chain.may_begin(cuts) else _NEVER
        return self._seen[cuts]

    def _simulated(self, cuts: tuple[int, ...]) -> float:
        try:
            found = self._chain.simulate(cuts)
        except ScheduleError as error:
            self.refused = error
            return _NEVER
        self._actions_left -= len(found.table.actions)
        if self._excess(found.peak_bytes) > 0:
            if not self.closest or self._excess(found.peak_bytes) < self._excess(self.closest):
                self.closest = found.peak_bytes
            return _NEVER
        if self.best is None or found.seconds < self.best.simulation.seconds:
            self.best = TimedCut(cuts=cuts, simulation=found)
        return found.seconds

    def _excess(self, peaks: Sequence[float]) -> float:
        """How much more memory the rank that lacks most would need."""
        limits = self._chain.memory_bytes
        return 0.0 if limits is None else max(peak - limit for peak, limit in zip(peaks, limits, strict=True))

    # ------------------------------------------------------------------ step 1

    def descend(self, cuts: tuple[int, ...]) -> None:
        """Moves cuts as long as that helps."""
        current = self.seconds(cuts)
        while self._actions_left >= 0:
            better = next((other for other in self._neighbours(cuts) if self.seconds(other) < current), None)
            if better is None:
                return
            cuts, current = better, self.seconds(better)

    def _neighbours(self, cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        legal = self._chain.legal
        places = [legal.index(cut) for cut in cuts]
        for width in (1, 2):
            for first in range(len(places) - width + 1):
                for step in (-1, 1, -2, 2):
                    moved = [place + step * (first <= index < first + width) for index, place in enumerate(places)]
                    if moved[0] >= 0 and moved[-1] < len(legal) and all(one < other for one, other in pairwise(moved)):
                        yield tuple(legal[place] for place in moved)

    # ------------------------------------------------------------------ step 2

    def enumerate_others(self) -> None:
        """Simulates all cuts that could be faster. Not with several stages on a rank: the bound is of ranks with one."""
        if self.best is None or self.best.simulation.table.num_ranks == self._chain.num_stages:
            self._enumerate(())

    def _enumerate(self, cuts: tuple[int, ...]) -> None:
        """Simulates those that begin with these cuts."""
        begin, left = (cuts[-1] + 1 if cuts else 0), self._chain.num_stages - len(cuts)
        if left == 1:
            if self._could_help(len(cuts), begin, len(self._chain.units)):
                self.seconds(cuts)
            return
        legal = [cut for cut in self._chain.legal if cut >= begin]
        for cut in legal[: len(legal) - left + 2]:
            if self._actions_left < 0 or not self._could_help(len(cuts), begin, cut + 1):
                return  # a longer stage takes longer
            self._enumerate((*cuts, cut))

    def _could_help(self, stage: int, start: int, end: int) -> bool:
        """True if a step may be faster than the best in which the units from ``start`` on before ``end`` are that stage."""
        if self.best is None:
            return True
        table, pause = self.best.simulation.table, self._chain.overhead.action_seconds
        work, count = self._all[end] - self._all[start], table.num_microbatches
        way = stage * (pause + self._chain.link.latency_seconds)  # through the stages before it, beside their work
        least = self._forwards[start] + way
        if table.is_split:
            # Gradients of weights may come last, while those of inputs go back.
            urgent = self._forwards[end] - self._forwards[start] + self._inputs[end] - self._inputs[start]
            back = count * (urgent + 2 * pause) + self._inputs[start] + way if urgent else 0.0
            least += max(count * (work + 3 * pause), back)
        else:
            least += count * (work + 2 * pause) + self._all[start] - self._forwards[start] + way
        return least + self._chain.overhead.step_seconds < self.best.simulation.seconds * (1 - 1e-12)
