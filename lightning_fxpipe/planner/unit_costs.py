"""What the units of a chain compute, and what they keep for backward, seen by running them on tensors without data.

All units run once, one after the other, forward and backward, each from what the one before has made. Operators are seen below
autograd: the flops of those that torch knows a formula for (``torch.utils.flop_counter``), and the bytes that each reads and
writes. What autograd keeps counts once, where it is kept first: a tensor that two units keep is in memory once. Weights and the
batch are there anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from lightning_fxpipe._compat.modes import TorchDispatchMode
from lightning_fxpipe._compat.torch import storage_key, written_arguments
from lightning_fxpipe.planner.cost import Chain, Unit
from lightning_fxpipe.planner.recompute import tensors_in
from lightning_fxpipe.pytree.sizes import tensor_bytes
from lightning_fxpipe.rng import isolated_rng
from lightning_fxpipe.tracing.repeat import Repeat, modes_of


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator that runs: its flops, and the bytes that it reads and writes."""

    flops: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class UnitCosts:
    """What one unit takes for one microbatch.

    Attributes:
        forward, input_backward, weight_backward: The operators that run. The backward of inputs gives what the unit before
            gets, that of weights the rest.
        saved_bytes: What it keeps for backward that no unit before it keeps.
        parameter_bytes, gradient_bytes: Of its parameters that no unit before it uses, and of those that train.
    """

    forward: tuple[Operator, ...]
    input_backward: tuple[Operator, ...]
    weight_backward: tuple[Operator, ...]
    saved_bytes: int
    parameter_bytes: int
    gradient_bytes: int

    @property
    def flops(self) -> int:
        """Of all three parts."""
        return sum(operator.flops for part in (self.forward, self.input_backward, self.weight_backward) for operator in part)


def unit_costs(chain: Chain) -> tuple[UnitCosts, ...]:
    """The costs of each unit of a chain, for its example's microbatch and device.

    Raises:
        Exception: What a unit raises that does not run without data.
    """
    measurement = _Measurement(chain)
    with isolated_rng(), measurement.repeat.active(), torch.enable_grad():
        return tuple(measurement.of_unit(unit) for unit in chain.units)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given, made = tensors_in((args, kwargs)), tensors_in(result)
        own = {storage_key(tensor) for tensor in given}
        if made and all(storage_key(tensor) in own for tensor in made) and not written_arguments(func, args, kwargs):
            return result  # a view
        if func.namespace == "prim":
            return result  # a question about a tensor
        formula = flop_registry.get(func.overloadpacket)
        flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
        self.found.append(Operator(flops, sum(map(tensor_bytes, (*given, *made)))))
        return result


class _Measurement:
    """Runs the units of a chain.

    Attributes:
        repeat: Makes the calls.
    """

    def __init__(self, chain: Chain) -> None:
        self.repeat = Repeat(chain.traced)
        self._root = chain.traced.root
        self._values: dict[fx.Node, Any] = {}
        self._originals: dict[int, tuple[int, int]] = {}  # by the key of a copy's memory that of the original, and its bytes
        self._kept: set[int] = set()  # memory that is kept for backward, or is there anyway
        self._counted: set[str] = set()  # parameters
        self._alive: list[Any] = []  # so that the keys of memory stay their own

    def of_unit(self, unit: Unit) -> UnitCosts:
        """Runs one unit forward and backward."""
        weights: list[Tensor] = []
        inputs, values = self._inputs(unit, weights)
        saved: dict[int, int] = {}
        forward = _Operators()

        def call(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            with self.repeat.module_on_fakes(module):
                weights.extend((*module.parameters(), *module.buffers()))
                with forward:
                    return module(*args, **kwargs)

        with saved_tensors_hooks(partial(self._note, saved), _as_it_is):
            for node in unit.nodes:
                # What makes a module's tensors fakes is no part of it.
                with modes_of(node), nullcontext() if node.op == "call_module" else forward:
                    values[node] = self.repeat.call(node, values, call)
        made = {node: values[node] for node in unit.nodes}
        self._values |= made
        results = [value for value in made.values() if isinstance(value, Tensor) and value.requires_grad]
        trained = [weight for weight in weights if weight.requires_grad]
        inward, both = self._backward(results, inputs), self._backward(results, [*inputs, *trained])
        own = {storage_key(weight) for weight in weights}
        self._kept |= saved.keys()
        parameters = self._new_parameters(unit)
        return UnitCosts(
            forward=tuple(forward.found),
            input_backward=inward,
            weight_backward=tuple((Counter(both) - Counter(inward)).elements()),
            saved_bytes=sum(num_bytes for key, num_bytes in saved.items() if key not in own),
            parameter_bytes=sum(map(tensor_bytes, parameters)),
            gradient_bytes=sum(tensor_bytes(parameter) for parameter in parameters if parameter.requires_grad),
        )

    def _inputs(self, unit: Unit, weights: list[Tensor]) -> tuple[list[Tensor], dict[fx.Node, Any]]:
        """The tensors that a unit's gradients go to, and the values of its operands that hang on them."""
        inputs, values = [], dict(self._values)
        for node in unit.nodes:
            for operand in node.all_input_nodes:
                if operand in unit.nodes or (operand in values and operand not in self._values):
                    continue
                if operand.op in ("placeholder", "get_attr"):
                    values[operand] = self._source(operand, weights)
                elif isinstance(value := self._values[operand], Tensor) and value.requires_grad:
                    leaf = value.detach().requires_grad_()
                    inputs.append(leaf)
                    values[operand] = leaf.clone()  # a unit may write into what it gets, but not into a leaf
                    self._originals[storage_key(values[operand])] = self._memory(leaf)
                    self._alive.append(values[operand])
        return inputs, values

    def _source(self, node: fx.Node, weights: list[Tensor]) -> Tensor:
        """An input of the region, or a weight that its own code takes."""
        if node not in self._values:
            self._values[node] = self.repeat.blank(node)
            self._kept.add(storage_key(self._values[node]))
        tensor: Tensor = self._values[node]
        if node.op == "get_attr":
            weights.append(tensor)
        return tensor

    def _note(self, saved: dict[int, int], tensor: Tensor) -> Tensor:
        key, num_bytes = self._memory(tensor)
        if key not in self._kept:
            self._alive.append(tensor)
            saved[key] = num_bytes
        return tensor

    def _memory(self, tensor: Tensor) -> tuple[int, int]:
        """Which memory a tensor stands for, and how large that is: a view keeps all of it."""
        key = storage_key(tensor)
        return self._originals.get(key) or (key, int(tensor.untyped_storage().nbytes()))

    def _backward(self, results: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[Operator, ...]:
        if not results or not targets:
            return ()
        gradients = [torch.empty_like(result) for result in results]
        with _Operators() as backward:
            torch.autograd.grad(results, targets, gradients, retain_graph=True, allow_unused=True)
        return tuple(backward.found)

    def _new_parameters(self, unit: Unit) -> list[nn.Parameter]:
        """The parameters that this unit is the first to use."""
        names = {fqn for fqn, _ in self._root.named_parameters()} & unit.tensor_fqns - self._counted
        self._counted |= names
        return [self._root.get_parameter(fqn) for fqn in sorted(names)]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
