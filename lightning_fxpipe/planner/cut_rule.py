"""The rule by which a graph is cut: stages of equal cost in one measure, the fastest cuts, or cuts that the user wants.

Each way is a choice of columns of the table of costs (``unit_costs``) and of constraints for the one solver (``partition``):

- what is balanced is the weight: parameters, flops, bytes of memory, or seconds, which a simulation refines (``fastest_cut``);
- devices' speeds or memories are shares of that weight;
- modules that are assigned to stages, and stages that have to fit, say with which units a stage may begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import nn

from lightning_fxpipe.errors import PartitionError, TraceError
from lightning_fxpipe.planner.alternatives import Alternative
from lightning_fxpipe.planner.choice import Choice, Search
from lightning_fxpipe.planner.cost import Chain
from lightning_fxpipe.planner.fastest_cut import TimedChain
from lightning_fxpipe.planner.load import ADAM_BYTES_PER_BYTE, Load
from lightning_fxpipe.planner.partition import Demands, Firsts, NothingFits, Weights, cheapest_cuts
from lightning_fxpipe.planner.pinned import no_pinned_cut, pinned_firsts, pinned_modules, pinned_units
from lightning_fxpipe.planner.recompute_rule import RecomputeRule
from lightning_fxpipe.planner.split_points import cuts_before, modules_around
from lightning_fxpipe.planner.stage_costs import stage_work
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.reporting.messages import logger
from lightning_fxpipe.reporting.table import human_bytes
from lightning_fxpipe.simulation.by_name import FITTED
from lightning_fxpipe.simulation.costs import StageWork

BalanceName = Literal["parameters", "flops", "memory", "seconds"]


@dataclass(frozen=True, kw_only=True)
class CutRule:
    """Rule by which a graph is cut.

    Attributes:
        num_stages: Number of stages.
        balance: Measure that is equal on all stages, as far as possible: parameters; flops, forward and backward; bytes of
            memory: parameters, gradients, Adam's states, and the activations of the microbatches that a stage keeps at a time;
            or seconds on the device at hand, forward and backward. In proportion to the devices' speeds, or memory.
        num_microbatches: Microbatches whose activations are in memory, if there is no load.
        split_points: Paths of the modules before which a cut falls, instead of the balance.
        stage_of: Patterns of module paths, and the stage that each of them has to be in.
        recompute: Modules whose activations are recomputed.
        load: How the stages will run; None: in any way.
        must_fit: True if each stage has to fit into the load's memory.
        search: Combinations from which the fastest is chosen, with its number of stages; None: nothing is chosen.
        tells_work: True if the plan has the relative work of its stages, for a schedule whose order is made from it.
        opened: More modules that have to be open, because a cut of another trace falls into them.
    """

    num_stages: int
    balance: BalanceName = "parameters"
    num_microbatches: int = 1
    split_points: tuple[str, ...] = ()
    stage_of: tuple[tuple[str, int], ...] = ()
    recompute: RecomputeRule = RecomputeRule()
    load: Load | None = None
    must_fit: bool = False
    search: Search | None = None
    tells_work: bool = False
    opened: frozenset[str] = frozenset()

    @property
    def needs_clock(self) -> bool:
        """True if layers are timed, which may give other cuts another time."""
        return self.search is not None or (self.balance == "seconds" and not self.split_points)

    @property
    def is_by_parameters(self) -> bool:
        """True if nothing but parameters counts."""
        has_more = self.split_points or self.stage_of or self.must_fit or (self.load is not None and self.load.speeds)
        return self.balance == "parameters" and not has_more and self.search is None

    def has_to_be_open(self, root: nn.Module) -> frozenset[str]:
        """Modules that have to be open whatever they weigh, because the user names modules inside them."""
        named = (*self.split_points, *pinned_modules(root, self.stage_of, self.num_stages))
        return modules_around(named) | self.opened

    # ------------------------------------------------------------------ cuts

    def choose(self, costs: UnitCosts) -> Choice:
        """Chooses the cuts of a table's chain.

        Raises:
            PartitionError: There are fewer legal cuts than needed, or none where one is wanted, or none with which stages fit
                into their memory.
            TraceError: A part of the model cannot be timed or run on tensors without data.
        """
        if self.search is not None:
            return self.search.choose(costs, partial(self._pinned, costs.chain))
        return self._fastest(costs) if self.needs_clock else Choice(cuts=self.cuts(costs))

    def _fastest(self, costs: UnitCosts) -> Choice:
        seconds = costs.measured_seconds()
        assert seconds is not None  # for the very microbatch that was recorded
        load = self.load or Load(schedule="gpipe", num_ranks=self.num_stages, num_microbatches=self.num_microbatches)
        load = load if self.must_fit else load.without_memory()
        chain = TimedChain.of(costs, seconds, load, self._pinned(costs.chain, self.num_stages))
        return Choice(cuts=chain.fastest().cuts, unit_seconds=seconds)

    def cuts(self, costs: UnitCosts) -> tuple[int, ...]:
        """Returns the position of the last unit of each stage but the last, by flops where only a clock tells more.

        Errors as :meth:`choose`.
        """
        if self.split_points:
            return cuts_before(costs.chain, self.split_points)
        found: dict[tuple[int, ...], float] = {}
        for demands in self._all_demands(costs):
            with suppress(NothingFits):
                cuts = cheapest_cuts(demands)
                found[cuts] = demands.heaviest(cuts)
        if found:
            return min(found, key=found.__getitem__)
        try:
            closest = cheapest_cuts(self._demands(costs))
        except NothingFits:
            raise no_pinned_cut() from None
        if not self.recompute.is_none:
            return closest  # less is kept then
        raise self._nothing_fits(costs)

    # ------------------------------------------------------------------ weights and constraints

    def demands(self, costs: UnitCosts) -> Demands:
        """Returns what is asked of the stages; by flops where only a clock tells more. Errors as :meth:`choose`."""
        return next(iter(self._all_demands(costs)))

    def _all_demands(self, costs: UnitCosts) -> Iterator[Demands]:
        """Yields one, or if each stage has to fit, one for each way to divide a device's memory among its stages."""
        if not self.must_fit:
            yield self._demands(costs)
            return
        assert self.load is not None
        memory = self._memory(costs)
        for memories in self.load.stage_memories():
            yield self._demands(costs, costs.fitting_firsts(memory, memories, self.load))

    def _demands(self, costs: UnitCosts, fitting: Sequence[Firsts] = ()) -> Demands:
        pinned = self._pinned(costs.chain, self.num_stages)
        firsts = [[*map(max, *both)] for both in zip(pinned, fitting, strict=True)] if pinned and fitting else pinned or fitting
        shares: tuple[float, ...] = ()
        if self.load is not None:
            shares = self.load.memory_shares if self.balance == "memory" else self.load.speed_shares
        return Demands(self._weights(costs), costs.cut_costs, self.num_stages, shares, firsts)

    def _weights(self, costs: UnitCosts) -> Weights | list[Weights]:
        if self.balance == "parameters" and self.search is None:
            return costs.parameters
        if self.balance == "flops" or self.needs_clock:
            return costs.flops
        found = self._memory(costs)
        return found[0] if len({id(weights) for weights in found}) == 1 else found

    def _memory(self, costs: UnitCosts) -> list[Weights]:
        load = self.load
        kept = (self.num_microbatches,) * self.num_stages if load is None else load.microbatches_kept
        return costs.memory(costs.states(self.optimizer_bytes_per_byte), kept, 1.0 if load is None else load.scale)

    def _pinned(self, chain: Chain, num_stages: int) -> list[Firsts]:
        """With which units stages may begin so that modules are in their stages; empty where with any."""
        modules = pinned_modules(chain.traced.root, self.stage_of, num_stages)
        return pinned_firsts(pinned_units(chain, modules), num_stages) if modules else []

    @property
    def optimizer_bytes_per_byte(self) -> float:
        """Bytes that the optimizer keeps on a device for each byte of its stages' parameters that train."""
        told = self.search or self.load
        return ADAM_BYTES_PER_BYTE if told is None else told.optimizer_bytes_per_byte

    def _nothing_fits(self, costs: UnitCosts) -> PartitionError:
        load = self.load
        assert load is not None
        pinned = self._pinned(costs.chain, self.num_stages)
        demands = Demands(self._memory(costs), costs.cut_costs, self.num_stages, load.memory_shares, pinned)
        closest = demands.of_stages(cheapest_cuts(demands))
        limits = next(load.stage_memories())
        return PartitionError(
            f"No partition into {self.num_stages} stages fits in the devices' memory.",
            observed=f"{', '.join(map(human_bytes, closest))} for the stages of the closest partition: parameters, gradients, "
            f"{load.states_words}, and the activations of {load.words}",
            expected=f"at most {', '.join(human_bytes(int(limit)) for limit in limits)}, including communication buffers",
            todo="Use more devices, more and smaller microbatches, a schedule that stores the activations of fewer "
            "microbatches, or activation checkpointing.",
        )

    # ------------------------------------------------------------------ what a plan says besides

    def recomputed(self, costs: UnitCosts, cuts: Sequence[int], chosen: Alternative | None) -> tuple[str, ...]:
        """Returns the modules whose activations are recomputed. Errors as ``RecomputeRule.modules``."""
        load = self.search.load(costs, chosen) if self.search is not None and chosen is not None else self.load
        return self.recompute.modules(costs, cuts, load)

    def work(self, costs: UnitCosts, choice: Choice, recomputed: Sequence[str]) -> tuple[StageWork, ...]:
        """Returns the relative work of the chosen stages; empty if no order is made from it, or it is unknown.

        Args:
            costs: The table.
            choice: Where its chain is cut.
            recomputed: Modules whose activations are recomputed.
        """
        if not self.tells_work and not (choice.alternatives and choice.alternatives[0].schedule in FITTED):
            return ()
        try:
            return stage_work(costs, choice.cuts, seconds=choice.unit_seconds, recomputed=recomputed)
        except TraceError:
            logger.debug("The stages' cost cannot be estimated on tensors without data", exc_info=True)
            return ()
