"""Operators that the units of a chain run, and bytes that they keep for backward, from a run on tensors without data.

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
from lightning_fxpipe._compat.operators import written_arguments
from lightning_fxpipe._compat.torch import storage_key
from lightning_fxpipe.errors import TraceError
from lightning_fxpipe.planner.cost import Chain, Unit
from lightning_fxpipe.planner.recompute import tensors_in
from lightning_fxpipe.pytree.sizes import tensor_bytes
from lightning_fxpipe.reporting.wording import error_words, node_words
from lightning_fxpipe.rng import isolated_rng
from lightning_fxpipe.simulation.devices import Operator
from lightning_fxpipe.tracing.repeat import Repeat, modes_of


@dataclass(frozen=True, slots=True)
class _Parts:
    """Work of a unit, apart from its place in the chain: units that are alike share it.

    Attributes:
        forward, input_backward, weight_backward: Its operators.
        own_bytes: What it keeps for backward of what it has made.
        kept_inputs: Which of its operands it keeps.
        kept_outputs: Which of its nodes' results it keeps.
    """

    forward: tuple[Operator, ...]
    input_backward: tuple[Operator, ...]
    weight_backward: tuple[Operator, ...]
    own_bytes: int
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class UnitOperators:
    """The work of one unit for one microbatch.

    Attributes:
        forward, input_backward, weight_backward: The operators that run. The backward of inputs computes what the unit before
            receives, that of weights the rest.
        kept_bytes: Bytes kept for backward that no unit before it keeps.
    """

    forward: tuple[Operator, ...]
    input_backward: tuple[Operator, ...]
    weight_backward: tuple[Operator, ...]
    kept_bytes: int

    @property
    def flops(self) -> int:
        """Flops of all three parts."""
        return sum(operator.flops for part in (self.forward, self.input_backward, self.weight_backward) for operator in part)


def unit_operators(chain: Chain) -> tuple[UnitOperators, ...]:
    """Returns the operators of each unit of a chain, for its microbatch and its example's device.

    Raises:
        TraceError: A unit does not run on tensors without data.
    """
    measurement = _Measurement(chain)
    found: list[UnitOperators] = []
    with isolated_rng(), measurement.repeat.active(), torch.enable_grad():
        for unit in chain.units:
            try:
                found.append(measurement.of_unit(unit))
            except Exception as error:
                raise TraceError(
                    "The cost of a part of the model cannot be estimated on tensors without data.",
                    where=node_words(unit.nodes[0]),
                    observed=error_words(error),
                    expected="code that reads sizes only, and operators whose output sizes torch can infer",
                    todo="Pass measured costs to simulate(...).",
                ) from error
    return tuple(found)


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
        self.repeat = Repeat(chain.traced, chain.num_samples)
        self._values: dict[fx.Node, Any] = {}
        self._originals: dict[int, tuple[int, int]] = {}  # by the key of a copy's memory that of the original, and its bytes
        self._kept: set[int] = set()  # memory that is kept for backward, or is there anyway
        self._known: dict[int, _Parts] = {}  # of units that are alike
        self._alive: list[Any] = []  # so that the keys of memory stay their own

    def of_unit(self, unit: Unit) -> UnitOperators:
        """Runs one unit forward and backward, or copies the result of one like it."""
        operands = unit.operands
        alike = unit.nodes[0].meta.get("alike")
        parts = self._known.get(id(alike)) if alike is not None else None
        if parts is None:
            parts = self._run(unit, operands)
            if alike is not None:
                self._known[id(alike)] = parts
        else:
            for operand in operands:
                self._value_of(operand)
            for index, node in enumerate(unit.nodes):
                if isinstance(node.meta.get("val"), Tensor):
                    self._values[node] = self.repeat.blank(node)
                    if index in parts.kept_outputs:
                        self._kept.add(storage_key(self._values[node]))
        kept_bytes = parts.own_bytes
        for index in parts.kept_inputs:
            key, num_bytes = self._memory(self._values[operands[index]])
            kept_bytes += num_bytes if key not in self._kept else 0
            self._kept.add(key)
        return UnitOperators(
            forward=parts.forward,
            input_backward=parts.input_backward,
            weight_backward=parts.weight_backward,
            kept_bytes=kept_bytes,
        )

    def _run(self, unit: Unit, operands: Sequence[fx.Node]) -> _Parts:
        weights: list[Tensor] = []
        inputs, values = self._inputs(operands, weights)
        given = {
            self._memory(value)[0]: index for index, node in enumerate(operands) if isinstance(value := values[node], Tensor)
        }
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
        made = [values[node] for node in unit.nodes]
        self._values |= zip(unit.nodes, made, strict=True)
        results = [value for value in made if isinstance(value, Tensor) and value.requires_grad]
        trained = [weight for weight in weights if weight.requires_grad]
        inward, both = self._backward(results, inputs), self._backward(results, [*inputs, *trained])
        there = {storage_key(weight) for weight in weights} | given.keys()
        own = {key: num_bytes for key, num_bytes in saved.items() if key not in there and key not in self._kept}
        self._kept |= own.keys()
        outputs = [self._memory(value)[0] if isinstance(value, Tensor) else 0 for value in made]
        return _Parts(
            forward=tuple(forward.found),
            input_backward=inward,
            weight_backward=tuple((Counter(both) - Counter(inward)).elements()),
            own_bytes=sum(own.values()),
            kept_inputs=tuple(sorted(given[key] for key in saved.keys() & given.keys())),
            kept_outputs=tuple(index for index, key in enumerate(outputs) if key in own),
        )

    def _inputs(self, operands: Sequence[fx.Node], weights: list[Tensor]) -> tuple[list[Tensor], dict[fx.Node, Any]]:
        """The tensors that a unit's gradients go to, and the values of its operands that hang on them."""
        inputs, values = [], dict(self._values)
        for operand in operands:
            value = self._value_of(operand)
            values[operand] = value
            if operand.op == "get_attr":
                weights.append(value)
            elif operand.op != "placeholder" and isinstance(value, Tensor) and value.requires_grad:
                leaf = value.detach().requires_grad_()
                inputs.append(leaf)
                values[operand] = leaf.clone()  # a unit may write into what it gets, but not into a leaf
                self._originals[storage_key(values[operand])] = self._memory(leaf)
                self._alive.append(values[operand])
        return inputs, values

    def _value_of(self, node: fx.Node) -> Any:
        """Returns the result of a node; makes an input of the region, or a weight that its own code takes, at its first use."""
        if node not in self._values:
            self._values[node] = self.repeat.blank(node)
            self._kept.add(storage_key(self._values[node]))
        return self._values[node]

    def _note(self, saved: dict[int, int], tensor: Tensor) -> Tensor:
        key, num_bytes = self._memory(tensor)
        saved[key] = num_bytes
        self._alive.append(tensor)
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


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
