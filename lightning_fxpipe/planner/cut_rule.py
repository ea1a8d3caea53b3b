"""By what rule a graph is cut: stages of equal weight, in one of several weights, or cuts that are fastest, or wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from lightning_fxpipe.errors import PartitionError, TraceError
from lightning_fxpipe.planner.alternatives import Alternative
from lightning_fxpipe.planner.choice import Choice, Search
from lightning_fxpipe.planner.cost import Chain
from lightning_fxpipe.planner.granularity import cut_costs, parameters_after, stage_weights
from lightning_fxpipe.planner.measured_costs import measured_seconds
from lightning_fxpipe.planner.partition import solve
from lightning_fxpipe.planner.recompute_rule import Load, RecomputeRule
from lightning_fxpipe.planner.stage_costs import stage_work
from lightning_fxpipe.planner.stage_work import StageWork
from lightning_fxpipe.planner.unit_costs import unit_costs
from lightning_fxpipe.reporting.messages import logger
from lightning_fxpipe.simulation.by_name import FITTED
from lightning_fxpipe.tracing.recordable import Recordable

BalanceName = Literal["parameters", "flops", "memory", "seconds"]
# What training keeps for each byte of a parameter besides itself: its gradient, and two moments of Adam.
_STATES_PER_BYTE = 3


@dataclass(frozen=True, kw_only=True)
class CutRule:
    """Where a graph is cut.

    Attributes:
        num_stages: Number of stages.
        balance: What is equal on all stages, as far as it can be: parameters; flops, forward and backward; or bytes of memory:
            parameters, gradients, Adam's states, and the activations of all microbatches; or seconds on the device at hand,
            forward and backward.
        num_microbatches: How many microbatches' activations are in memory.
        split_points: Paths of the modules before which a cut falls; the balance does not count then.
        recompute: Which modules' activations are computed again.
        load: What the stages have to hold, where that decides about it; None: nobody knows, or a search says it.
        search: What the number of stages and all else is chosen from, so that a step is fastest; None: it is not chosen.
        tells_work: Whether the plan tells what its stages take, for a schedule whose order is made from it.
    """

    num_stages: int
    balance: BalanceName = "parameters"
    num_microbatches: int = 1
    split_points: tuple[str, ...] = ()
    recompute: RecomputeRule = RecomputeRule()
    load: Load | None = None
    search: Search | None = None
    tells_work: bool = False

    @property
    def needs_clock(self) -> bool:
        """Whether layers are timed, which gives other cuts another time."""
        return self.search is not None or (self.balance == "seconds" and not self.split_points)

    @property
    def is_by_parameters(self) -> bool:
        """Whether it is the usual one."""
        return self.balance == "parameters" and not self.split_points and self.search is None

    def weights(self, chain: Chain, call: Recordable) -> list[int]:
        """What each unit of a chain weighs; by flops where only a clock tells more."""
        if self.balance == "parameters" and self.search is None:
            return stage_weights(chain, call)
        costs = unit_costs(chain)
        if self.balance == "flops" or self.needs_clock:
            return [unit.flops for unit in costs]
        weights = [
            unit.parameter_bytes + _STATES_PER_BYTE * unit.gradient_bytes + self.num_microbatches * unit.saved_bytes
            for unit in costs
        ]
        for parameter in parameters_after(chain, call) if weights else ():
            copies = 1 + _STATES_PER_BYTE * parameter.requires_grad
            weights[-1] += copies * parameter.numel() * parameter.element_size()
        return weights

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
            logger.debug("What the stages take cannot be seen on tensors without data", exc_info=True)
            return ()
        return stage_work(chain, costs, choice.cuts, seconds=choice.unit_seconds, recomputed=recomputed)

    def choose(self, chain: Chain, call: Recordable) -> Choice:
        """The cuts by a clock, for a rule that needs one. Errors as :meth:`cuts` and ``measured_seconds``."""
        if self.search is not None:
            outside = sum(parameter.numel() * parameter.element_size() for parameter in parameters_after(chain, call))
            return self.search.choose(chain, outside)
        seconds = measured_seconds(chain)
        assert seconds is not None  # for the very microbatch that was recorded
        weights = [round(1e9 * (unit.forward + unit.input_backward + unit.weight_backward)) for unit in seconds]
        return Choice(cuts=solve(weights, cut_costs(chain), self.num_stages), alternatives=(), unit_seconds=seconds)

    def cuts(self, chain: Chain, call: Recordable) -> tuple[int, ...]:
        """Position of the last unit of each stage but the last.

        Raises:
            PartitionError: There are fewer legal cuts than needed, or none where one is wanted.
        """
        if self.split_points:
            return cuts_before(chain, self.split_points)
        return solve(self.weights(chain, call), cut_costs(chain), self.num_stages)


def check_split_points(root: nn.Module, split_points: Sequence[str]) -> None:
    """Raises :class:`PartitionError` for a path that is no module's."""
    paths = {path for path, _ in root.named_modules() if path}
    unknown = [point for point in split_points if point not in paths]
    if unknown:
        near = [path for path in sorted(paths) if path.rpartition(".")[2] == unknown[0].rpartition(".")[2]][:3]
        raise PartitionError(
            "A split point is no module of the model.",
            observed=unknown[0],
            expected="paths as model.named_modules() gives them" + (f", such as {', '.join(near)}" if near else ""),
            todo="Give split_points the paths of the modules that later stages begin with.",
        )


def modules_around(split_points: Sequence[str]) -> frozenset[str]:
    """The modules that hold those of some paths: they have to be open for a cut to fall before these."""
    return frozenset(
        ".".join(parts[:length]) for parts in (point.split(".") for point in split_points) for length in range(1, len(parts))
    )


def cuts_before(chain: Chain, split_points: Sequence[str]) -> tuple[int, ...]:
    """The cuts before some modules.

    Args:
        chain: The chain, in which what holds the modules is open.
        split_points: Their paths.

    Raises:
        PartitionError: The region does not come by one of them, or no cut may fall there.
    """
    cuts = sorted(_cut_before(chain, point) for point in split_points)
    if len(set(cuts)) < len(cuts):
        raise PartitionError(
            "Two split points are the same place.",
            observed=", ".join(split_points),
            expected="modules with something that computes between them",
            todo="Leave one of them out.",
        )
    return tuple(cuts)


def _cut_before(chain: Chain, point: str) -> int:
    inside = [i for i, unit in enumerate(chain.units) if f"{unit.path}.".startswith(f"{point}.")]
    if not inside:
        raise _not_there(chain, point)
    costs = cut_costs(chain)
    cut = inside[0] - 1
    while cut >= 0 and chain.units[cut].is_recomputed:  # each stage computes it for itself
        cut -= 1
    if cut < 0 or costs[cut] is None:
        raise PartitionError(
            "No cut may fall before a split point.",
            where=point,
            observed="nothing computes before it" if cut < 0 else chain.sites[cut].obstacle,
            expected="a place where only tensors of known size cross",
            todo="Take the module before or after it.",
        )
    return cut


def _not_there(chain: Chain, point: str) -> PartitionError:
    whole = [(path, reason) for path, reason in chain.traced.kept_whole.items() if point.startswith(f"{path}.")]
    observed = f"{whole[0][0]} stays whole: {whole[0][1]}" if whole else "the model's calls in the step do not come by it"
    return PartitionError(
        "A split point is not where the model can be cut.",
        where=point,
        observed=observed,
        expected="a module that the step's calls of the model run",
        todo="Take another module, or change the code that keeps it whole." if whole else "Take a module that runs.",
    )
