"""How long the units of a chain take on the device at hand, for a microbatch of any size: they run, and a clock is read.

A unit runs on data that is made up, with copies of its parameters: nothing that the model has is changed, and one unit at a
time takes memory. Of units that are alike one runs. How long something takes does not depend on the numbers in it; where it
does, as with experts that few tokens are sent to, this is a guess.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_fxpipe.errors import TraceError
from lightning_fxpipe.planner.cost import Chain, Unit
from lightning_fxpipe.planner.recompute import tensors_in
from lightning_fxpipe.reporting.wording import error_words, node_words
from lightning_fxpipe.rng import isolated_rng
from lightning_fxpipe.tracing.repeat import Repeat, modes_of
from lightning_fxpipe.user_code.exchange import exchanged_tensors
from lightning_fxpipe.user_code.placement import Placement
from lightning_fxpipe.user_code.silence import silencing

# Runs of a unit that count, after one that does not; fewer, but three, where they have taken so long.
_NUM_RUNS = 10
_MAX_SECONDS = 0.4


@dataclass(frozen=True, slots=True)
class UnitSeconds:
    """Seconds of one unit for one microbatch."""

    forward: float
    input_backward: float
    weight_backward: float

    @property
    def parts(self) -> tuple[float, float, float]:
        """All three, in this order."""
        return self.forward, self.input_backward, self.weight_backward


def measured_seconds(chain: Chain, num_samples: int | None = None) -> tuple[UnitSeconds, ...] | None:
    """How long each unit of a chain takes on the device that the chain was recorded for.

    Args:
        chain: The chain.
        num_samples: Samples of the microbatch; None: as many as the chain's example has.

    Returns:
        For each unit its seconds; None where the chain is not that of a microbatch of so many samples.

    Raises:
        TraceError: A unit does not run on data that is made up.
    """
    measurement = _Measurement(chain, Repeat(chain.traced, num_samples))
    if not measurement.repeat.is_possible:
        return None
    found = []
    with isolated_rng(), silencing(), measurement.repeat.autocast():
        for unit in chain.units:
            try:
                found.append(measurement.of_unit(unit))
            except Exception as error:
                raise TraceError(
                    "A part of the model cannot be timed separately.",
                    where=node_words(unit.nodes[0]),
                    observed=error_words(error),
                    expected="code that runs with zeros for integers and random numbers for floats",
                    todo='Set balance="flops", which needs no timing.',
                ) from error
    return tuple(found)


class _Measurement:
    """Times the units of a chain.

    Attributes:
        repeat: Makes the calls.
    """

    def __init__(self, chain: Chain, repeat: Repeat) -> None:
        self.repeat = repeat
        self._root = chain.traced.root
        self._device = chain.traced.device
        self._values: dict[fx.Node, Any] = {}
        self._known: dict[Hashable, UnitSeconds] = {}  # of units that are alike
        self._last_use = {node: index for index, unit in enumerate(chain.units) for node in unit.operands}
        self._index = -1

    def of_unit(self, unit: Unit) -> UnitSeconds:
        """Times one unit, or takes what one like it has shown. They come in their order."""
        self._index += 1
        kinds = self._kinds(unit)
        seconds = next((self._known[kind] for kind in kinds if kind in self._known), None)
        if seconds is None:
            seconds = self._time(unit)
        else:
            self._values |= {node: self._made_up(node) for node in unit.nodes if isinstance(node.meta.get("val"), Tensor)}
        self._known |= dict.fromkeys(kinds, seconds)
        for node in [node for node in self._values if self._last_use.get(node, -1) <= self._index]:
            del self._values[node]
        return seconds

    def _kinds(self, unit: Unit) -> list[Hashable]:
        """Returns keys that are equal for units that take equally long."""
        call = unit.nodes[0]
        known = call.meta.get("alike")
        kinds: list[Hashable] = [] if known is None else [id(known)]
        if call.op != "call_module":
            return kinds
        operands = [(self.repeat.shape(node), str(value.dtype), value.requires_grad) for node, value in _tensors(unit)]
        module = self._root.get_submodule(str(call.target))
        trained = tuple((parameter.shape, parameter.requires_grad) for parameter in module.parameters())
        plain = [
            [(name, value) for name, value in vars(inner).items() if type(value) in (bool, int, float, str, tuple)]
            for inner in module.modules()
        ]
        arguments = [(name, value) for name, value in call.kwargs.items() if not isinstance(value, fx.Node)]
        return [*kinds, (type(module), repr(module), trained, str((operands, plain, arguments, len(unit.nodes))))]

    def _time(self, unit: Unit) -> UnitSeconds:
        operands = unit.operands
        values = {node: self._value_of(node) for node in operands}
        modules = [self._root.get_submodule(str(node.target)) for node in unit.nodes if node.op == "call_module"]
        with self._copied(modules) as weights:
            weights += [value for node, value in values.items() if node.op == "get_attr" and isinstance(value, Tensor)]
            runs = [self._run(unit, values, weights)]
            begin = time.perf_counter()
            while len(runs) <= 3 or (len(runs) <= _NUM_RUNS and time.perf_counter() - begin < _MAX_SECONDS):
                runs.append(self._run(unit, values, weights))
        # The median: the shortest run ignores load that also slows steps (docs/explanation/simulation.md), and with the mean
        # one pause of the machine would count for every similar unit.
        return UnitSeconds(*(statistics.median(run[part] for run in runs[1:]) for part in range(3)))

    def _run(self, unit: Unit, given: Mapping[fx.Node, Any], weights: Sequence[Tensor]) -> tuple[float, float, float]:
        """Seconds of one forward, of the backward of its inputs, and of what is left of a whole backward."""
        inputs = []
        values = dict(given)
        with torch.enable_grad():
            for node, value in given.items():
                if isinstance(value, Tensor) and node.op not in ("get_attr", "placeholder") and value.requires_grad:
                    inputs.append(value.detach().requires_grad_())
                    values[node] = inputs[-1].clone()  # a unit may write into what it gets, but not into a leaf
                elif isinstance(value, Tensor) and node.op != "get_attr":
                    values[node] = value.clone()
            forward = self._clock(lambda: self._forward(unit, values))
        made = [values[node] for node in unit.nodes]
        results = [value for value in tensors_in(made) if value.requires_grad and value.grad_fn is not None]
        trained = [weight for weight in weights if weight.requires_grad]
        gradients = [torch.ones_like(result) for result in results]
        inward = both = 0.0
        if results and inputs:
            inward = self._clock(partial(torch.autograd.grad, results, inputs, gradients, retain_graph=True, allow_unused=True))
        if results and (inputs or trained):
            # Gradients of weights are added up, as in training: the copies keep theirs from run to run.
            both = self._clock(partial(torch.autograd.backward, results, gradients, inputs=[*inputs, *trained]))
        self._values |= {node: _detached(value) for node, value in zip(unit.nodes, made, strict=True)}
        return forward, inward, max(both - inward, 0.0)

    def _forward(self, unit: Unit, values: dict[fx.Node, Any]) -> None:
        for node in unit.nodes:
            with modes_of(node):
                values[node] = self.repeat.call(node, values, lambda module, args, kwargs: module(*args, **kwargs))

    def _clock(self, run: Callable[[], Any]) -> float:
        self._wait()
        begin = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # an unfinished kernel would count for the next unit

    # ------------------------------------------------------------------ data

    def _value_of(self, node: fx.Node) -> Any:
        """Returns the result of a node; an input of the region, or a tensor of a node's own code, is made up at its first
        use.
        """
        if node not in self._values:
            self._values[node] = self._made_up(node)
        return self._values[node]

    def _made_up(self, node: fx.Node) -> Tensor:
        """A tensor of the shape and kind of a node's: random numbers, or zeros where those would be no valid index."""
        value: Tensor = node.meta["val"]
        return _filled(torch.empty(self.repeat.shape(node), dtype=value.dtype, device=value.device), value.requires_grad)

    @contextmanager
    def _copied(self, modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
        """During the block the modules have copies of their tensors, on the device; yields the parameters among these."""
        with ExitStack() as stack:
            for module in modules:
                placement = Placement(module, self._device)
                stack.enter_context(exchanged_tensors(module, partial(_copy, placement)))
                stack.enter_context(placement.naming())
            yield [parameter for module in modules for parameter in module.parameters()]


def _copy(placement: Placement, tensor: Tensor, _: str) -> Tensor:
    device = placement.device_of(tensor)
    if tensor.is_meta:
        made = _filled(torch.empty_like(tensor, device=device), requires_grad=False)
    else:
        made = tensor.detach().to(device, copy=True)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _filled(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Fills a tensor with numbers."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.normal_(std=0.02).requires_grad_(requires_grad)
    return tensor.zero_()


def _detached(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _tensors(unit: Unit) -> list[tuple[fx.Node, Tensor]]:
    """Lists the recorded tensors among the inputs of a unit."""
    return [(node, value) for node in unit.operands if isinstance(value := node.meta.get("val"), Tensor)]
