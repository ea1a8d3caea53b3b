"""Where to cut a chain so that a step takes the least time under a schedule.

The lightest heaviest stage (``partition``) is not always the fastest cut: what lies before and after the heaviest stage is
waited for, too, and a message takes time (pytorch PR 179212 has examples). So cuts are compared by simulated time.

1. Begin from the lightest heaviest stage, and move single cuts and pairs of neighbours as long as that helps.
2. Then look at all others, stage by stage from the first. A beginning that cannot be part of anything faster is left out, by
   what passes at least: until a stage gets the first microbatch, while that stage works on all, and until what it gives back
   has gone through the stages before it.

The second step is exact, and is broken off after a number of simulations: for chains of a dozen units it never is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from lightning_fxpipe.errors import PartitionError, ScheduleError
from lightning_fxpipe.planner.partition import Demands, Firsts, Weights, cheapest_cuts
from lightning_fxpipe.reporting.table import human_bytes
from lightning_fxpipe.simulation.actions import ActionTable
from lightning_fxpipe.simulation.costs import Link, Overhead, StageCosts
from lightning_fxpipe.simulation.simulator import Simulation, run_table

_NO_LINK, _NO_OVERHEAD = Link(), Overhead()
# What is simulated at most, in actions: some seconds.
MAX_ACTIONS = 2_000_000
_RESOLUTION = 10**6  # parts of the heaviest unit, in which the solver of whole numbers weighs

MakeTable = Callable[[Sequence[StageCosts]], ActionTable]


@dataclass(frozen=True, kw_only=True)
class StageRules:
    """What stages are besides the sums of their units.

    Attributes:
        shares: For each stage the speed of its device beside that of the fastest, which units' seconds are of; empty where all
            are equal.
        firsts: With which units each stage may begin, by its last one; empty where with any.
        states: Bytes of the states of stages, where units have some in common; None: what the units have together.
    """

    shares: Sequence[float] = ()
    firsts: Sequence[Firsts] = ()
    states: Weights | None = None


_NO_RULES = StageRules()


@dataclass(frozen=True, kw_only=True)
class FastestCut:
    """A cut, and what a step takes with it.

    Attributes:
        cuts: Position of the last unit of each stage but the last.
        simulation: Of a step.
        is_exact: Whether no other cut is faster; else it is the best that was found.
    """

    cuts: tuple[int, ...]
    simulation: Simulation
    is_exact: bool


def fastest_cut(
    units: Sequence[StageCosts],
    cut_bytes: Sequence[float | None],
    num_stages: int,
    make_table: MakeTable,
    *,
    link: Link = _NO_LINK,
    overhead: Overhead = _NO_OVERHEAD,
    memory_bytes: Sequence[float] | None = None,
    stages: StageRules = _NO_RULES,
    max_actions: int = MAX_ACTIONS,
) -> FastestCut:
    """Cuts a chain into stages.

    Args:
        units: Costs of each unit, for one microbatch; its ``output_bytes`` do not count.
        cut_bytes: What crosses a cut after each unit but the last; None where no cut is allowed.
        num_stages: Number of stages.
        make_table: The schedule for given stages.
        link, overhead: As :func:`~lightning_fxpipe.simulation.simulator.run_table`.
        memory_bytes: What each rank has for states and activations; None for no limit.
        stages: What stages are besides the sums of their units.
        max_actions: After how many simulated actions the search ends.

    Raises:
        PartitionError: There are fewer legal cuts than needed, or none was found that fits into the memory.
        ScheduleError: There is no such schedule for any cut.
        NothingFits: No stages begin where ``stages`` allows it.
    """
    search = _Search(tuple(units), tuple(cut_bytes), num_stages, make_table, link, overhead, memory_bytes, stages, max_actions)
    most = max((_seconds(unit) for unit in units), default=0.0) or 1.0
    weights = Weights(tuple(round(_seconds(unit) / most * _RESOLUTION) for unit in units))
    costs = [None if num_bytes is None else round(num_bytes) for num_bytes in cut_bytes]
    search.descend(cheapest_cuts(Demands(weights, costs, num_stages, stages.shares, stages.firsts)))
    is_exact = search.look_at_all()
    if search.best is None and search.refused is not None:
        raise search.refused
    if search.best is None:
        raise PartitionError(
            f"No partition into {num_stages} stages fits in memory.",
            observed=f"{', '.join(human_bytes(peak) for peak in search.closest)} with the closest partition",
            expected=f"at most {', '.join(human_bytes(limit) for limit in memory_bytes or ())}",
            todo="Use more microbatches or devices, a schedule that needs less memory, or activation checkpointing.",
        )
    return FastestCut(cuts=search.best[0], simulation=search.best[1], is_exact=is_exact)


def merged(units: Sequence[StageCosts], output_bytes: float) -> StageCosts:
    """The costs of a stage of these units."""
    return StageCosts(
        forward_seconds=sum(unit.forward_seconds for unit in units),
        input_backward_seconds=sum(unit.input_backward_seconds for unit in units),
        weight_backward_seconds=sum(unit.weight_backward_seconds for unit in units),
        activation_bytes=sum(unit.activation_bytes for unit in units),
        weight_bytes=sum(unit.weight_bytes for unit in units),
        output_bytes=output_bytes,
        state_bytes=sum(unit.state_bytes for unit in units),
        gradient_bytes=sum(unit.gradient_bytes for unit in units),
    )


def costs_of_stages(
    units: Sequence[StageCosts], cut_bytes: Sequence[float | None], cuts: Sequence[int], rules: StageRules = _NO_RULES
) -> list[StageCosts]:
    """The costs of the stages between cuts. Arguments as :func:`fastest_cut`."""
    bounds = [0, *(cut + 1 for cut in cuts), len(units)]
    outputs = [*(cut_bytes[cut] or 0.0 for cut in cuts), 0.0]
    stages = [merged(units[start:end], output) for start, end, output in zip(bounds, bounds[1:], outputs, strict=False)]
    if rules.states is not None:
        states = rules.states.of_stages(cuts)
        stages = [replace(stage, state_bytes=float(state)) for stage, state in zip(stages, states, strict=True)]
    if rules.shares:
        stages = [on_device(stage, share) for stage, share in zip(stages, rules.shares, strict=True)]
    return stages


def on_device(stage: StageCosts, speed: float) -> StageCosts:
    """A stage's costs on a device that is so fast, in proportion to the one that they are of."""
    return replace(
        stage,
        forward_seconds=stage.forward_seconds / speed,
        input_backward_seconds=stage.input_backward_seconds / speed,
        weight_backward_seconds=stage.weight_backward_seconds / speed,
    )


def _seconds(unit: StageCosts) -> float:
    return unit.forward_seconds + unit.input_backward_seconds + unit.weight_backward_seconds


class _Search:
    """The best cut so far, and what has been looked at."""

    def __init__(
        self,
        units: tuple[StageCosts, ...],
        cut_bytes: tuple[float | None, ...],
        num_stages: int,
        make_table: MakeTable,
        link: Link,
        overhead: Overhead,
        memory_bytes: Sequence[float] | None,
        rules: StageRules,
        max_actions: int,
    ) -> None:
        self.best: tuple[tuple[int, ...], Simulation] | None = None
        self.closest: tuple[float, ...] = ()
        self.refused: ScheduleError | None = None  # why there is no schedule for a cut
        self._units, self._cut_bytes, self._num_stages = units, cut_bytes, num_stages
        self._make_table, self._link, self._overhead, self._memory = make_table, link, overhead, memory_bytes
        self._rules, self._max_actions = rules, max_actions
        self._legal = [position for position, num_bytes in enumerate(cut_bytes) if num_bytes is not None]
        self._seen: dict[tuple[int, ...], float] = {}
        self._num_actions = 0
        # Sums over the first units: forwards, backwards of inputs, all.
        self._forwards = [0.0, *accumulate(unit.forward_seconds for unit in units)]
        self._inputs = [0.0, *accumulate(unit.input_backward_seconds for unit in units)]
        self._all = [0.0, *accumulate(map(_seconds, units))]

    # ------------------------------------------------------------------ simulation

    def seconds(self, cuts: tuple[int, ...]) -> float:
        """Of a step with these cuts; infinite where they do not fit into the memory."""
        if cuts not in self._seen:
            if not self._may_begin(cuts):
                self._seen[cuts] = float("inf")
                return self._seen[cuts]
            stages = costs_of_stages(self._units, self._cut_bytes, cuts, self._rules)
            try:
                table = self._make_table(stages)
            except ScheduleError as error:
                self.refused, self._seen[cuts] = error, float("inf")
                return self._seen[cuts]
            found = run_table(table, stages, link=self._link, overhead=self._overhead)
            self._num_actions += len(table.actions)
            excess = self._excess(found)
            self._seen[cuts] = float("inf") if excess > 0 else found.seconds
            if excess <= 0 and (self.best is None or found.seconds < self.best[1].seconds):
                self.best = cuts, found
        return self._seen[cuts]

    def _may_begin(self, cuts: tuple[int, ...]) -> bool:
        ends = [*cuts, len(self._units) - 1]
        begins = [0, *(cut + 1 for cut in cuts)]
        return all(firsts[end] <= begin for firsts, begin, end in zip(self._rules.firsts, begins, ends, strict=False))

    def _excess(self, simulation: Simulation) -> float:
        """How much more memory the rank that lacks most would need."""
        if self._memory is None:
            return 0.0
        excess = max(peak - limit for peak, limit in zip(simulation.peak_bytes, self._memory, strict=True))
        if not self.closest or excess < max(peak - limit for peak, limit in zip(self.closest, self._memory, strict=True)):
            self.closest = simulation.peak_bytes
        return excess

    @property
    def is_over(self) -> bool:
        """Whether enough has been simulated."""
        return self._num_actions > self._max_actions

    # ------------------------------------------------------------------ step 1

    def descend(self, cuts: tuple[int, ...]) -> None:
        """Moves cuts as long as that helps."""
        current = self.seconds(cuts)
        while not self.is_over:
            better = next((other for other in self._neighbours(cuts) if self.seconds(other) < current), None)
            if better is None:
                return
            cuts, current = better, self.seconds(better)

    def _neighbours(self, cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        places = [self._legal.index(cut) for cut in cuts]
        for width in (1, 2):
            for first in range(len(places) - width + 1):
                for step in (-1, 1, -2, 2):
                    moved = [place + step * (first <= index < first + width) for index, place in enumerate(places)]
                    is_legal = moved[0] >= 0 and moved[-1] < len(self._legal)
                    if is_legal and all(one < other for one, other in zip(moved, moved[1:], strict=False)):
                        yield tuple(self._legal[place] for place in moved)

    # ------------------------------------------------------------------ step 2

    def look_at_all(self) -> bool:
        """Looks at all cuts that could be faster; returns whether it has come to the end. With several stages on a rank it does
        not begin: what passes at least is known of ranks with one."""
        has_several = self.best is not None and self.best[1].table.num_ranks < self._num_stages
        return not has_several and self._look_at((), 0.0)

    def _look_at(self, cuts: tuple[int, ...], least: float) -> bool:
        """Looks at all that begin with these cuts, which take at least so long."""
        begin = cuts[-1] + 1 if cuts else 0
        left = self._num_stages - len(cuts)
        if left == 1:
            if self._could_help(max(least, self._least_of(len(cuts), begin, len(self._units)))):
                self.seconds(cuts)
            return not self.is_over
        for cut in self._legal:
            if cut < begin or len(self._legal) - self._legal.index(cut) < left - 1:
                continue
            of_stage = self._least_of(len(cuts), begin, cut + 1)
            if not self._could_help(of_stage):
                break  # it only grows
            of_rest = self._least_of_rest(len(cuts) + 1, cut + 1)
            if self._could_help(max(least, of_stage, of_rest)) and not self._look_at((*cuts, cut), max(least, of_stage)):
                return False
        return not self.is_over

    def _could_help(self, least: float) -> bool:
        return self.best is None or least + self._overhead.step_seconds < self.best[1].seconds * (1 - 1e-12)

    def _least_of(self, stage: int, start: int, end: int) -> float:
        """What a step takes at least where these units are that stage."""
        forward, inputs = self._forwards[end] - self._forwards[start], self._inputs[end] - self._inputs[start]
        return self._least(stage, start, forward + inputs, self._all[end] - self._all[start])

    def _least_of_rest(self, stage: int, start: int) -> float:
        """What a step takes at least where that stage and those after it share all units from here on."""
        return self._least(stage, start, 0.0, (self._all[-1] - self._all[start]) / (self._num_stages - stage))

    def _least(self, stage: int, start: int, urgent: float, work: float) -> float:
        if self.best is None:
            return 0.0
        table, fixed, latency = self.best[1].table, self._overhead.action_seconds, self._link.latency_seconds
        count = table.num_microbatches
        arrival = self._forwards[start] + stage * (fixed + latency)
        if table.is_split:
            # Gradients of weights may come last, while those of inputs go back.
            back = self._inputs[start] + stage * (fixed + latency)
            return arrival + max(count * (work + 3 * fixed), count * (urgent + 2 * fixed) + back if urgent else 0.0)
        back = self._all[start] - self._forwards[start] + stage * (fixed + latency)
        return arrival + count * (work + 2 * fixed) + back
