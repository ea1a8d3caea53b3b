"""The one table of costs: what each unit of a chain costs, in every measure that stages can have equal shares of.

A row is a unit, a column is a measure. Columns are computed when they are first read, because their prices differ: parameters
and bytes of states are read off the model, flops and kept bytes come from a run on tensors without data (``unit_operators``),
seconds from a clock (``measured_costs``), or from a device that is described by a few numbers.

    unit        parameters   states   flops   kept bytes   seconds
    embed            8,192   131 kB       0            0      …
    block.0         49,984   800 kB   3.1 M        98 kB      …

The solver (``partition``) balances any of them, ``fastest_cut`` simulates steps with them, and ``stage_costs`` adds them up.

A parameter that several units use is in each stage that has one of them, once, with its gradient and the optimizer's states:
each such stage holds a copy (``stages.gradients`` sums their gradients). What the step uses after the region, or nowhere, is in
the last stage, so it weighs on the last unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate

from torch import nn

from lightning_fxpipe.planner import measured_costs
from lightning_fxpipe.planner.cost import Chain, prelude_fqns
from lightning_fxpipe.planner.load import ADAM_BYTES_PER_BYTE, Load
from lightning_fxpipe.planner.measured_costs import UnitSeconds
from lightning_fxpipe.planner.partition import Firsts, Weights
from lightning_fxpipe.planner.unit_operators import UnitOperators, unit_operators
from lightning_fxpipe.pytree.sizes import tensor_bytes
from lightning_fxpipe.simulation.devices import Device
from lightning_fxpipe.tracing.recordable import Recordable, RegionCall

# For each tensor that crosses a cut, the stage before it has one buffer to send it, and one for the gradient that returns.
_BUFFERS_PER_CUT = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitCosts:
    """Costs of all units of a chain, for one microbatch of the size that the chain was recorded for.

    Attributes:
        chain: The chain.
        call: The call that it was recorded from.
    """

    chain: Chain
    call: Recordable

    def of_samples(self, num_samples: int) -> UnitCosts | None:
        """Returns the table for microbatches of another size; None if the chain's graph does not admit it."""
        chain = self.chain.of_samples(num_samples)
        return None if chain is None else replace(self, chain=chain)

    # ------------------------------------------------------------------ read off the model

    @cached_property
    def parameters(self) -> Weights:
        """Number of parameters."""
        return self._weights(lambda parameter: parameter.numel())

    def states(self, optimizer_bytes_per_byte: float = ADAM_BYTES_PER_BYTE) -> Weights:
        """Bytes of parameters, gradients and optimizer states.

        Args:
            optimizer_bytes_per_byte: Bytes that the optimizer keeps for each byte of a parameter that trains.
        """
        return self._weights(partial(state_bytes, optimizer_bytes_per_byte=optimizer_bytes_per_byte))

    @cached_property
    def gradient_bytes(self) -> tuple[int, ...]:
        """Bytes of the gradients of parameters that no unit before uses."""
        trained = {fqn: tensor_bytes(p) for fqn, p in self.chain.traced.root.named_parameters() if p.requires_grad}
        return tuple(sum(trained.pop(fqn, 0) for fqn in unit.tensor_fqns) for unit in self.chain.units)

    @cached_property
    def cut_costs(self) -> list[int | None]:
        """For the cut after each unit but the last, the bytes that it makes move: tensors that cross it, and gradients of
        parameters that both sides use. None where no cut may fall.
        """
        sizes = {fqn: tensor_bytes(p) for fqn, p in self.chain.traced.root.named_parameters()}
        changes = [0] * len(self.chain.units)  # of the bytes that both sides of a cut use, from one place to the next
        for fqn, users in self._users.items():
            changes[users[0]] += sizes[fqn]
            changes[users[-1]] -= sizes[fqn]
        return [
            site.num_bytes + shared if self.chain.allows_cut(site.position) else None
            for site, shared in zip(self.chain.sites[:-1], [*accumulate(changes)][:-1], strict=True)
        ]

    # ------------------------------------------------------------------ run on tensors without data

    @cached_property
    def operators(self) -> tuple[UnitOperators, ...]:
        """Operators, forward and backward. Errors as :func:`~lightning_fxpipe.planner.unit_operators.unit_operators`."""
        return unit_operators(self.chain)

    @cached_property
    def flops(self) -> Weights:
        """Flops, forward and backward."""
        return Weights(tuple(unit.flops for unit in self.operators))

    @cached_property
    def kept_bytes(self) -> tuple[int, ...]:
        """Bytes kept for the backward pass that no unit before keeps."""
        return tuple(unit.kept_bytes for unit in self.operators)

    def memory(self, states: Weights, microbatches_kept: Sequence[int], scale: float = 1.0) -> list[Weights]:
        """Returns for each stage the bytes that a unit takes there: states, and activations of the microbatches that the stage
        keeps at a time.

        Args:
            states: See :meth:`states`.
            microbatches_kept: Number of microbatches, by stage.
            scale: How much larger a microbatch is than the table's.
        """
        pairs = [*zip(states.own, self.kept_bytes, strict=True)]
        by_count = {
            count: replace(states, own=tuple(own + round(count * scale * kept) for own, kept in pairs))
            for count in {*microbatches_kept}
        }
        return [by_count[count] for count in microbatches_kept]

    def fitting_firsts(self, weights: Sequence[Weights], memories: Sequence[float], load: Load) -> list[Firsts]:
        """Returns with which units each stage may begin so that it fits into its memory, by its last unit.

        Args:
            weights: Bytes of the units, by stage.
            memories: Bytes that each stage has.
            load: How the stages will run.
        """
        buffers = [_BUFFERS_PER_CUT * load.scale * site.num_bytes for site in self.chain.sites[:-1]] + [0.0]
        known: dict[tuple[int, float], Firsts] = {}
        found = []
        for of_stage, memory in zip(weights, memories, strict=True):
            key = id(of_stage), memory
            if key not in known:
                known[key] = of_stage.firsts_within([int(memory - buffer) for buffer in buffers[: len(of_stage.own)]])
            found.append(known[key])
        return found

    # ------------------------------------------------------------------ seconds

    def measured_seconds(self, num_samples: int | None = None) -> tuple[UnitSeconds, ...] | None:
        """Seconds on the device at hand. Arguments and errors as
        :func:`~lightning_fxpipe.planner.measured_costs.measured_seconds`.
        """
        return measured_costs.measured_seconds(self.chain, num_samples)

    def seconds_on(self, device: Device) -> list[UnitSeconds]:
        """Seconds on a device that is described by a few numbers."""
        return [
            UnitSeconds(*(device.seconds(part) for part in (unit.forward, unit.input_backward, unit.weight_backward)))
            for unit in self.operators
        ]

    # ------------------------------------------------------------------ parameters

    @cached_property
    def _users(self) -> dict[str, list[int]]:
        """For each parameter the positions of the units that use it, increasing."""
        names = {fqn for fqn, _ in self.chain.traced.root.named_parameters()}
        users: dict[str, list[int]] = {}
        for position, unit in enumerate(self.chain.units):
            for fqn in unit.tensor_fqns & names:
                users.setdefault(fqn, []).append(position)
        return users

    def _weights(self, weigh: Callable[[nn.Parameter], int]) -> Weights:
        parameters = dict(self.chain.traced.root.named_parameters())
        num_units = len(self.chain.units)
        last = num_units - 1
        found = []
        for fqn, users in sorted(self._users.items()):
            if fqn in self.chain.output_fqns and users[-1] != last:
                users = [*users, last]  # the last stage returns it
            found.append((weigh(parameters[fqn]), users))
        if num_units:
            found += [(weigh(parameters[fqn]), [last]) for fqn in self._fqns_after]
        return Weights.of_users(num_units, found)

    @property
    def _fqns_after(self) -> list[str]:
        """Parameters that the step uses after the region, or nowhere."""
        if isinstance(self.call, RegionCall) and self.call.is_one_of_many:
            return []
        before = {*prelude_fqns(self.chain.traced.root, self.call)}
        return [fqn for fqn in self.chain.unused_fqns if fqn not in before]


def state_bytes(parameter: nn.Parameter, optimizer_bytes_per_byte: float = ADAM_BYTES_PER_BYTE) -> int:
    """Bytes of a parameter, its gradient and its optimizer states."""
    trained = (1 + optimizer_bytes_per_byte) * parameter.requires_grad
    return round((1 + trained) * parameter.numel() * parameter.element_size())
