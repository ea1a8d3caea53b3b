"""What the units of a chain weigh, in parameters or in bytes of memory.

A parameter that several units use is there once in each stage that has one of them, with its gradient and the optimizer's
states: each such stage holds a copy (``stages.gradients`` sums what they get).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from lightning_fxpipe.planner.cost import Chain, canonical_fqns
from lightning_fxpipe.planner.load import ADAM_BYTES_PER_BYTE, Load
from lightning_fxpipe.planner.partition import Firsts, Weights
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.tracing.recordable import Recordable, RegionCall

# Of what crosses a cut, the stage before it has a buffer for the gradient that comes back, beside what it sends.
_BUFFERS_PER_CUT = 2


def parameter_weights(chain: Chain, call: Recordable) -> Weights:
    """Parameters of each unit; those used after the region weigh on the last unit, because the last stage holds them."""
    return _weights(chain, call, lambda parameter: parameter.numel())


def state_weights(chain: Chain, call: Recordable, optimizer_bytes_per_byte: float = ADAM_BYTES_PER_BYTE) -> Weights:
    """Bytes of the same: parameters, gradients, and the optimizer's states.

    Args:
        chain, call: The chain, and what it is of.
        optimizer_bytes_per_byte: What the optimizer keeps for each byte of a parameter that trains.
    """
    return _weights(chain, call, partial(state_bytes, optimizer_bytes_per_byte=optimizer_bytes_per_byte))


def state_bytes(parameter: nn.Parameter, optimizer_bytes_per_byte: float = ADAM_BYTES_PER_BYTE) -> int:
    """Of a parameter, its gradient and the optimizer's states."""
    trained = (1 + optimizer_bytes_per_byte) * parameter.requires_grad
    return round((1 + trained) * parameter.numel() * parameter.element_size())


def memory_weights(
    states: Weights, costs: Sequence[UnitCosts], microbatches_kept: Sequence[int], scale: float = 1.0
) -> list[Weights]:
    """For each stage what a unit takes of its memory: states, and activations of the microbatches that it keeps at a time.

    Args:
        states: Bytes that are there all the time.
        costs: Of the units.
        microbatches_kept: By each stage.
        scale: How much larger a microbatch is than the one that costs are of.
    """
    saved = [unit.saved_bytes for unit in costs]
    by_count = {
        count: replace(
            states, own=tuple(own + round(count * scale * each) for own, each in zip(states.own, saved, strict=True))
        )
        for count in {*microbatches_kept}
    }
    return [by_count[count] for count in microbatches_kept]


def fitting_firsts(chain: Chain, weights: Sequence[Weights], memories: Sequence[float], load: Load) -> list[Firsts]:
    """With which units each stage may begin so that it fits into its memory, by its last unit.

    Args:
        chain: The chain.
        weights: For each stage what units take of memory.
        memories: Bytes that each stage has.
        load: How the stages will run.
    """
    buffers = [_BUFFERS_PER_CUT * load.scale * site.num_bytes for site in chain.sites[:-1]] + [0.0]
    known: dict[tuple[int, float], Firsts] = {}
    found = []
    for of_stage, memory in zip(weights, memories, strict=True):
        key = id(of_stage), memory
        if key not in known:
            known[key] = of_stage.firsts_within([int(memory - buffer) for buffer in buffers[: len(of_stage.own)]])
        found.append(known[key])
    return found


def parameters_after(chain: Chain, call: Recordable) -> list[nn.Parameter]:
    """The parameters that the step uses after the region, or nowhere; the last stage holds them."""
    if isinstance(call, RegionCall) and call.is_one_of_many:
        return []
    root = chain.traced.root
    outside = set(unused_fqns(chain)) - set(prelude_fqns(root, call))
    return [parameter for fqn, parameter in root.named_parameters() if fqn in outside]


def unused_fqns(chain: Chain) -> tuple[str, ...]:
    """The parameters that no unit uses."""
    used = {fqn for unit in chain.units for fqn in unit.tensor_fqns}
    return tuple(fqn for fqn, _ in chain.traced.root.named_parameters() if fqn not in used)


def prelude_fqns(root: nn.Module, call: Recordable) -> tuple[str, ...]:
    """The parameters of the modules that the step calls before the region."""
    names = canonical_fqns(root)
    prefixes = tuple(f"{path}." if path else "" for path in call.prelude_paths)
    return tuple(fqn for fqn, _ in root.named_parameters() if names[fqn].startswith(prefixes)) if prefixes else ()


def _weights(chain: Chain, call: Recordable, weigh: Callable[[nn.Parameter], int]) -> Weights:
    parameters = dict(chain.traced.root.named_parameters())
    users: dict[str, list[int]] = {}
    for position, unit in enumerate(chain.units):
        for fqn in unit.tensor_fqns & parameters.keys():
            users.setdefault(fqn, []).append(position)
    last = len(chain.units) - 1
    for fqn in chain.output_fqns & users.keys():  # the last stage returns them
        users[fqn] = users[fqn] if users[fqn][-1] == last else [*users[fqn], last]
    own = [0] * len(chain.units)
    shared = []
    for fqn in sorted(users):
        if len(users[fqn]) == 1:
            own[users[fqn][0]] += weigh(parameters[fqn])
        else:
            shared.append((weigh(parameters[fqn]), tuple(users[fqn])))
    if own:
        own[-1] += sum(map(weigh, parameters_after(chain, call)))
    return Weights(tuple(own), tuple(shared))
