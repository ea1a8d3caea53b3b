"""The cut of a chain whose units have been timed: stages that take equally long, or those of the fastest simulated step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_fxpipe.errors import PartitionError
from lightning_fxpipe.planner.cost import Chain
from lightning_fxpipe.planner.fastest_cut import FastestCut, StageRules, costs_of_stages, fastest_cut
from lightning_fxpipe.planner.load import Load
from lightning_fxpipe.planner.measured_costs import UnitSeconds
from lightning_fxpipe.planner.partition import Demands, Firsts, NothingFits, Weights, cheapest_cuts
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.simulation.actions import ActionTable
from lightning_fxpipe.simulation.by_name import table_of
from lightning_fxpipe.simulation.costs import Link, Overhead, StageCosts
from lightning_fxpipe.simulation.simulator import run_table

# Of each action of the runtime: Python, and what starts a message (benchmarks/overhead.py, a tiny GPT).
OVERHEAD = Overhead(action_seconds=1.2e-3)
# Messages between processes of a machine: through its memory, or over NVLink or PCIe.
_LINKS = {"cpu": Link(latency_seconds=2e-4, bytes_per_second=2e9), "cuda": Link(latency_seconds=2e-5, bytes_per_second=2e10)}
# The two halves of a backward take so much longer than the whole (docs/reference/schedules.md: zb_h1 beside 1f1b).
_SPLIT_SHARE = 0.05
_WHOLE_BACKWARDS = ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b")
_NANOSECONDS = 1e9
# How much is simulated to find a faster cut: some tenths of a second.
_MAX_ACTIONS = 20_000


@dataclass(frozen=True, kw_only=True)
class TimedChain:
    """A chain, and what its units take.

    Attributes:
        chain: The chain.
        costs: What its units compute and keep.
        seconds: What they take on the device of rank 0, for a microbatch of the load.
        states: Bytes of their states.
        load: How the stages will run.
        firsts: With which units each stage may begin, by its last one; empty where with any.
    """

    chain: Chain
    costs: Sequence[UnitCosts]
    seconds: tuple[UnitSeconds, ...]
    states: Weights
    load: Load
    firsts: Sequence[Firsts] = ()

    def balanced(self) -> FastestCut:
        """The cut whose stages take equally long on their devices, as far as they can, and a step with it.

        Raises:
            PartitionError: There are fewer legal cuts than needed, or modules cannot be in the stages that they have to be in.
            ScheduleError: There is no such schedule.
        """
        weights = Weights(tuple(round(_NANOSECONDS * _all_seconds(unit)) for unit in self._units))
        costs = [None if num_bytes is None else round(num_bytes) for num_bytes in self._cut_bytes]
        try:
            cuts = cheapest_cuts(Demands(weights, costs, self.load.num_stages, self._rules.shares, self.firsts))
        except NothingFits:
            raise no_pinned_cut() from None
        stages = costs_of_stages(self._units, self._cut_bytes, cuts, self._rules)
        simulation = run_table(self._table(stages), stages, link=self._link, overhead=OVERHEAD)
        return FastestCut(cuts=cuts, simulation=simulation, is_exact=False)

    def fastest(self) -> FastestCut:
        """The cut with which a simulated step is fastest and fits the memory; the best that some simulations find.

        Raises:
            PartitionError: As :meth:`balanced`, or no cut was found that fits.
            ScheduleError: There is no such schedule.
        """
        memory = self.load.in_pipeline(self.load.memory_bytes)
        try:
            return fastest_cut(
                self._units,
                self._cut_bytes,
                self.load.num_stages,
                self._table,
                link=self._link,
                overhead=OVERHEAD,
                memory_bytes=memory or None,
                stages=self._rules,
                max_actions=_MAX_ACTIONS,
            )
        except NothingFits:
            raise no_pinned_cut() from None

    def _table(self, stages: Sequence[StageCosts]) -> ActionTable:
        load = self.load
        if isinstance(load.schedule, ActionTable):
            return load.schedule
        return table_of(load.schedule, stages, load.num_microbatches, load.stages_per_rank, link=self._link)

    @property
    def _rules(self) -> StageRules:
        return StageRules(shares=self.load.speed_shares, firsts=self.firsts, states=self.states)

    @property
    def _link(self) -> Link:
        return _LINKS.get(self.chain.traced.device.type, _LINKS["cpu"])

    @cached_property
    def _cut_bytes(self) -> list[float | None]:
        return [
            None if site.obstacle or unit.is_recomputed else site.num_bytes * self.load.scale
            for unit, site in zip(self.chain.units[:-1], self.chain.sites[:-1], strict=True)
        ]

    @cached_property
    def _units(self) -> list[StageCosts]:
        """Of each unit, on the fastest of the devices."""
        speeds = self.load.speeds
        factor = speeds[0] / max(speeds) if speeds else 1.0
        schedule = self.load.schedule
        splits = schedule.is_split if isinstance(schedule, ActionTable) else schedule not in _WHOLE_BACKWARDS
        return [
            _unit(costs, seconds, factor, self.load.scale, splits=splits)
            for costs, seconds in zip(self.costs, self.seconds, strict=True)
        ]


def no_pinned_cut() -> PartitionError:
    """What is raised where modules cannot be in the stages that they have to be in."""
    return PartitionError(
        "The stages assigned by stage_of are impossible.",
        observed="no legal cuts place all of these modules there without an empty stage",
        expected="a legal cut between modules of different stages, and at least one module per stage",
        todo="Remove some modules from stage_of, or choose other stages.",
    )


def _unit(costs: UnitCosts, seconds: UnitSeconds, factor: float, scale: float, *, splits: bool) -> StageCosts:
    saved_bytes = costs.saved_bytes * scale
    inward, weight = factor * seconds.input_backward, factor * seconds.weight_backward
    unit = StageCosts(
        forward_seconds=factor * seconds.forward,
        input_backward_seconds=inward,
        weight_backward_seconds=weight,
        activation_bytes=saved_bytes,
        weight_bytes=saved_bytes,
    )
    return replace(unit, weight_backward_seconds=weight + _SPLIT_SHARE * (inward + weight)) if splits else unit


def _all_seconds(unit: StageCosts) -> float:
    return unit.forward_seconds + unit.input_backward_seconds + unit.weight_backward_seconds
