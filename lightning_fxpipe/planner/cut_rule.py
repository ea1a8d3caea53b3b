"""By what rule a graph is cut: stages of equal weight, in one of several weights, or cuts that are fastest, or wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import nn

from lightning_fxpipe.errors import PartitionError, TraceError
from lightning_fxpipe.planner.alternatives import Alternative
from lightning_fxpipe.planner.choice import Choice, Search
from lightning_fxpipe.planner.cost import Chain
from lightning_fxpipe.planner.granularity import cut_costs
from lightning_fxpipe.planner.load import ADAM_BYTES_PER_BYTE, Load
from lightning_fxpipe.planner.measured_costs import measured_seconds
from lightning_fxpipe.planner.partition import Demands, Firsts, NothingFits, Weights, cheapest_cuts
from lightning_fxpipe.planner.pinned import pinned_firsts, pinned_modules, pinned_units
from lightning_fxpipe.planner.recompute_rule import RecomputeRule
from lightning_fxpipe.planner.split_points import cuts_before, modules_around
from lightning_fxpipe.planner.stage_costs import stage_work
from lightning_fxpipe.planner.stage_work import StageWork
from lightning_fxpipe.planner.timed_cut import TimedChain, no_pinned_cut
from lightning_fxpipe.planner.unit_costs import UnitCosts, unit_costs
from lightning_fxpipe.planner.weighing import fitting_firsts, memory_weights, parameter_weights, state_weights
from lightning_fxpipe.reporting.messages import logger
from lightning_fxpipe.reporting.table import human_bytes
from lightning_fxpipe.simulation.by_name import FITTED
from lightning_fxpipe.tracing.recordable import Recordable

BalanceName = Literal["parameters", "flops", "memory", "seconds"]


@dataclass(frozen=True, kw_only=True)
class CutRule:
    """Where a graph is cut.

    Attributes:
        num_stages: Number of stages.
        balance: What is equal on all stages, as far as it can be: parameters; flops, forward and backward; bytes of memory:
            parameters, gradients, Adam's states, and the activations of the microbatches that a stage keeps at a time; or
            seconds on the device at hand, forward and backward. In proportion to the devices' speeds, or memory.
        num_microbatches: How many microbatches' activations are in memory, where no load says it.
        split_points: Paths of the modules before which a cut falls; the balance does not count then.
        stage_of: Patterns of modules' paths, and the stage that each of them has to be in.
        recompute: Which modules' activations are computed again.
        load: How the stages will run; None: in any way.
        must_fit: Whether each stage has to fit into the load's memory.
        search: What the number of stages and all else is chosen from, so that a step is fastest; None: it is not chosen.
        tells_work: Whether the plan tells what its stages take, for a schedule whose order is made from it.
        opened: More modules that have to be open, as a cut of another trace falls into them.
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
        """Whether layers are timed, which gives other cuts another time."""
        return self.search is not None or (self.balance == "seconds" and not self.split_points)

    @property
    def is_by_parameters(self) -> bool:
        """Whether it is the usual one."""
        has_more = self.split_points or self.stage_of or self.must_fit or (self.load is not None and self.load.speeds)
        return self.balance == "parameters" and not has_more and self.search is None

    @property
    def optimizer_bytes_per_byte(self) -> float:
        """What the optimizer keeps on a device for each byte of its stages' parameters that train."""
        told = self.search or self.load
        return ADAM_BYTES_PER_BYTE if told is None else told.optimizer_bytes_per_byte

    def has_to_be_open(self, root: nn.Module) -> frozenset[str]:
        """The modules that have to be open whatever they weigh, as the user has said something of what is inside."""
        named = (*self.split_points, *pinned_modules(root, self.stage_of, self.num_stages))
        return modules_around(named) | self.opened

    def demands(self, chain: Chain, call: Recordable) -> Demands:
        """What is asked of the stages; by flops where only a clock tells more. Errors as :meth:`cuts`."""
        return next(iter(_Asked(self, chain, call).demands()))

    def recomputed(self, chain: Chain, cuts: Sequence[int], chosen: Alternative | None) -> tuple[str, ...]:
        """The modules whose activations are computed again. Errors as ``RecomputeRule.modules``."""
        load = self.search.load(chain, chosen) if self.search is not None and chosen is not None else self.load
        return self.recompute.modules(chain, cuts, load)

    def work(self, chain: Chain, choice: Choice, recomputed: Sequence[str]) -> tuple[StageWork, ...]:
        """What the stages take that were chosen; nothing where no order is made from it, or nobody knows.

        Args:
            chain: The chain.
            choice: Where it is cut.
            recomputed: The modules whose activations are computed again.
        """
        if not self.tells_work and not (choice.alternatives and choice.alternatives[0].schedule in FITTED):
            return ()
        try:
            costs = unit_costs(chain)
        except TraceError:
            logger.debug("The stages' cost cannot be estimated on tensors without data", exc_info=True)
            return ()
        return stage_work(chain, costs, choice.cuts, seconds=choice.unit_seconds, recomputed=recomputed)

    def choose(self, chain: Chain, call: Recordable) -> Choice:
        """The cuts by a clock, for a rule that needs one. Errors as :meth:`cuts` and ``measured_seconds``."""
        asked = _Asked(self, chain, call)
        if self.search is not None:
            return self.search.choose(chain, asked.states, asked.pinned)
        seconds = measured_seconds(chain)
        assert seconds is not None  # for the very microbatch that was recorded
        load = self.load or Load(schedule="gpipe", num_ranks=self.num_stages, num_microbatches=self.num_microbatches)
        timed = TimedChain(
            chain=chain,
            costs=asked.costs,
            seconds=seconds,
            states=asked.states,
            load=load if self.must_fit else load.without_memory(),
            firsts=asked.pinned(self.num_stages),
        )
        return Choice(cuts=timed.fastest().cuts, alternatives=(), unit_seconds=seconds)

    def cuts(self, chain: Chain, call: Recordable, costs: tuple[UnitCosts, ...] | None = None) -> tuple[int, ...]:
        """Position of the last unit of each stage but the last.

        Args:
            chain, call: The chain, and what it is of.
            costs: Of its units, where they are known already.

        Raises:
            PartitionError: There are fewer legal cuts than needed, or none where one is wanted, or none with which stages fit
                into their memory.
        """
        return cuts_before(chain, self.split_points) if self.split_points else _Asked(self, chain, call, costs).cuts()


@dataclass(frozen=True, eq=False)
class _Asked:
    """What a rule asks of the stages of one chain."""

    rule: CutRule
    chain: Chain
    call: Recordable
    known_costs: tuple[UnitCosts, ...] | None = None

    @cached_property
    def costs(self) -> tuple[UnitCosts, ...]:
        """Of its units."""
        return unit_costs(self.chain) if self.known_costs is None else self.known_costs

    @cached_property
    def states(self) -> Weights:
        """Bytes of its units' states."""
        return state_weights(self.chain, self.call, self.rule.optimizer_bytes_per_byte)

    def pinned(self, num_stages: int) -> list[Firsts]:
        """With which units stages may begin as modules have to be in some; empty where with any."""
        rule = self.rule
        modules = pinned_modules(self.chain.traced.root, rule.stage_of, num_stages)
        return pinned_firsts(pinned_units(self.chain, modules), num_stages) if modules else []

    def cuts(self) -> tuple[int, ...]:
        """As :meth:`CutRule.cuts`."""
        found: dict[tuple[int, ...], float] = {}
        for demands in self.demands():
            with suppress(NothingFits):
                cuts = cheapest_cuts(demands)
                found[cuts] = demands.heaviest(cuts)
        if found:
            return min(found, key=found.__getitem__)
        try:
            closest = cheapest_cuts(self._demands([]))
        except NothingFits:
            raise no_pinned_cut() from None
        if not self.rule.recompute.is_none:
            return closest  # less is kept then
        raise self._nothing_fits()

    def demands(self) -> Iterator[Demands]:
        """What is asked; where each stage has to fit, for each way to share out a device's memory among its stages."""
        if not self.rule.must_fit:
            yield self._demands([])
            return
        assert self.rule.load is not None
        for memories in self.rule.load.stage_memories():
            yield self._demands(fitting_firsts(self.chain, self._memory_of_stages, memories, self.rule.load))

    def _demands(self, fitting: list[Firsts]) -> Demands:
        pinned = self.pinned(self.rule.num_stages)
        firsts = [[*map(max, *both)] for both in zip(pinned, fitting, strict=True)] if pinned and fitting else pinned or fitting
        return Demands(self._weights, cut_costs(self.chain), self.rule.num_stages, self._shares, firsts)

    @cached_property
    def _weights(self) -> Weights | list[Weights]:
        rule = self.rule
        if rule.balance == "parameters" and rule.search is None:
            return parameter_weights(self.chain, self.call)
        if rule.balance == "flops" or rule.needs_clock:
            return Weights(tuple(unit.flops for unit in self.costs))
        found = self._memory_of_stages
        return found[0] if len({id(weights) for weights in found}) == 1 else found

    @cached_property
    def _memory_of_stages(self) -> list[Weights]:
        rule, load = self.rule, self.rule.load
        kept = (rule.num_microbatches,) * rule.num_stages if load is None else load.microbatches_kept
        return memory_weights(self.states, self.costs, kept, 1.0 if load is None else load.scale)

    @property
    def _shares(self) -> tuple[float, ...]:
        load = self.rule.load
        if load is None:
            return ()
        return load.memory_shares if self.rule.balance == "memory" else load.speed_shares

    def _nothing_fits(self) -> PartitionError:
        load = self.rule.load
        assert load is not None
        demands = Demands(
            self._memory_of_stages,
            cut_costs(self.chain),
            self.rule.num_stages,
            load.memory_shares,
            self.pinned(self.rule.num_stages),
        )
        closest = demands.of_stages(cheapest_cuts(demands))
        limits = next(load.stage_memories())
        return PartitionError(
            f"No partition into {self.rule.num_stages} stages fits in the devices' memory.",
            observed=f"{', '.join(map(human_bytes, closest))} for the stages of the closest partition: parameters, gradients, "
            f"{load.states_words}, and the activations of {load.words}",
            expected=f"at most {', '.join(human_bytes(int(limit)) for limit in limits)}, including communication buffers",
            todo="Use more devices, more and smaller microbatches, a schedule that stores the activations of fewer "
            "microbatches, or activation checkpointing.",
        )
