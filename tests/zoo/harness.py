"""Runs a model whole and in stages, one after another in one process, and compares all that must be equal.

Each stage runs as on a rank of its own: on a copy of the module in which what other stages hold has no data, on detached copies
of the tensors that the previous stage sends, and with the gradients that the next stage sends back.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_fxpipe.planner import planning
from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.cost import build_chain, canonical_fqns
from lightning_fxpipe.planner.follow_plan import follow_plan
from lightning_fxpipe.planner.partition import Demands, cheapest_cuts
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.planning import describe_plan, plan_region
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.pytree.structure import Template
from lightning_fxpipe.stages.build import Stage, TensorSpec, boundary_specs, build_stage
from lightning_fxpipe.tracing.recordable import RegionCall
from lightning_fxpipe.tracing.trace import TracedRegion, trace_region
from tests.staging import backward_from, check_gradient_flow, come_back_to, come_to, retain_gradients, spoil
from tests.traces import covers
from tests.zoo.entry import Batch, Entry

SIZES = (4, 2, 6)  # the one that is traced, a smaller and a larger


@dataclass
class Traces:
    """Traces of one model, each made once."""

    entry: Entry
    root: nn.Module
    seconds: float = 0.0
    _made: dict[Any, TracedRegion] = field(default_factory=dict)
    _plans: dict[int, PartitionPlan] = field(default_factory=dict)

    @classmethod
    def of(cls, entry: Entry) -> Traces:
        """Nothing traced so far."""
        torch.manual_seed(0)
        return cls(entry, entry.make_module().train())

    def plan(self, num_stages: int) -> PartitionPlan:
        """The plan, made in training mode; for fewer stages than the entry's most, other cuts of the same graph."""
        if num_stages not in self._plans:
            self.root.train()
            with torch.enable_grad():
                most = max(self.entry.stages)
                self._plans[num_stages] = self._planned() if num_stages == most else self._cut(self.plan(most), num_stages)
        return self._plans[num_stages]

    def _planned(self) -> PartitionPlan:
        start = perf_counter()
        with mock.patch.object(planning, "trace_region", self._trace):
            plan = plan_region(self.root, self._call(SIZES[0]), num_stages=max(self.entry.stages))
        self.seconds = perf_counter() - start
        return plan

    def _cut(self, plan: PartitionPlan, num_stages: int) -> PartitionPlan:
        call = self._call(SIZES[0])
        chain = build_chain(self._trace(self.root, call, opened=plan.opened))
        costs = [None if site.obstacle else site.num_bytes for site in chain.sites[:-1]]
        cuts = cheapest_cuts(Demands(UnitCosts(chain=chain, call=call).parameters, costs, num_stages))
        return describe_plan(Assignment(chain=chain, cuts=cuts), call)

    def assignment(self, num_stages: int, *, training: bool, size: int = SIZES[0]) -> Assignment:
        """The plan's cuts of the graph for a mode and a number of samples."""
        opened = self.plan(num_stages).opened
        self.root.train(training)
        with torch.set_grad_enabled(training):
            traced = self._trace(self.root, self._call(SIZES[0]), opened=opened)
            call = self._call(size)
            if not covers(traced, call):
                assert self.entry.retraced, f"the graph for {SIZES[0]} samples does not cover {size}"
                traced = self._trace(self.root, call, opened=opened)
        return follow_plan(self.plan(num_stages), traced)

    def _call(self, size: int) -> RegionCall:
        return RegionCall(path="", args=(), kwargs=self.entry.make_batch(size, size), batch_size=size)

    def _trace(self, root: nn.Module, call: RegionCall, **options: Any) -> TracedRegion:
        key = (call.batch_size, root.training, frozenset(options["opened"]))
        if key not in self._made:
            # Recording twice, to see whether both graphs are equal, is tested elsewhere.
            self._made[key] = trace_region(root, call, **{**options, "check": False})
        return self._made[key]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What must be equal."""

    loss: Tensor
    tensors: list[Tensor]
    result_type: type
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Whole:
    """The model in one piece."""

    def __init__(self, root: nn.Module) -> None:
        self.root = copy.deepcopy(root)

    def run(self, entry: Entry, batch: Batch, seed: int) -> Outcome:
        """One step."""
        torch.manual_seed(seed)
        result = self.root(**batch)
        loss = entry.loss(result)
        if torch.is_grad_enabled():
            self.root.zero_grad()
            loss.backward()
        return Outcome(
            loss=loss.detach(),
            tensors=[tensor.detach() for tensor in Template.of(result).tensors],
            result_type=type(result),
            gradients={fqn: p.grad.clone() for fqn, p in self.root.named_parameters() if p.grad is not None},
            buffers={fqn: buffer.clone() for fqn, buffer in self.root.named_buffers()},
        )


class Staged:
    """The model in stages, each on a copy of its own."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.roots = [copy.deepcopy(assignment.chain.traced.root) for _ in range(assignment.num_stages)]
        self.held = [self._spoil_others(index) for index in range(assignment.num_stages)]
        self.stages = self._stages(assignment)

    def use(self, assignment: Assignment) -> None:
        """Goes on with other graphs, on the same copies."""
        if assignment.chain.traced is not self.assignment.chain.traced:
            self.assignment, self.stages = assignment, self._stages(assignment)

    def run(self, entry: Entry, batch: Batch, seed: int) -> Outcome:
        """Forward through all stages, then backward through them in reverse."""
        traced = self.assignment.chain.traced
        training = torch.is_grad_enabled()
        for root in self.roots:
            root.zero_grad()
        inputs = [_inputs(traced, batch) for _ in self.stages]
        sizes = traced.bind_sizes(tuple(tuple(tensor.shape) for tensor in inputs[0]))
        assert sizes is not None
        received: list[list[Tensor]] = []
        sent: list[list[Tensor]] = []
        torch.manual_seed(seed)  # the stages draw one after another, as the whole module does
        for stage, own in zip(self.stages, inputs, strict=True):
            come = come_to(stage, self.stages, sent)
            arriving = [t.detach().clone().requires_grad_(t.requires_grad and training) for t in come]
            specs = boundary_specs(stage.boundary_in, sizes)
            assert all(spec.requires_grad for spec, t in zip(specs, arriving, strict=True) if t.requires_grad)
            assert [(tuple(t.shape), t.dtype) for t in arriving] == [(spec.shape, spec.dtype) for spec in specs]
            before = [tensor.detach().clone() for tensor in arriving]
            available = [*own, *(None for _ in traced.draw_nodes)]  # nothing is drawn ahead
            outputs = stage.module(*arriving, *[available[index] for index in stage.region_inputs])
            assert all(torch.equal(now, then) for now, then in zip(arriving, before, strict=True)), "receive buffer written to"
            received.append(arriving)
            leaving = boundary_specs(stage.boundary_out, sizes)
            sent.append([_arriving(o, s) for o, s in zip(outputs, leaving, strict=True)] if leaving else [*outputs])
        result = traced.result(sent[-1])
        loss = entry.loss(result)
        if training:
            retain_gradients(sent[-1])
            self._backward(loss, received, sent)
            check_gradient_flow(self.assignment, self.stages, received, sent[-1])
        return Outcome(
            loss=loss.detach(),
            tensors=[tensor.detach() for tensor in Template.of(result).tensors],
            result_type=type(result),
            gradients=self._gradients(),
            buffers=self._buffers(),
        )

    def _backward(self, loss: Tensor, received: list[list[Tensor]], sent: list[list[Tensor]]) -> None:
        loss.backward()
        for stage, outputs in zip(reversed(self.stages[:-1]), reversed(sent[:-1]), strict=True):
            backward_from(outputs, come_back_to(stage, self.stages, received))

    def _stages(self, assignment: Assignment) -> list[Stage]:
        return [build_stage(_on(assignment, root), index) for index, root in enumerate(self.roots)]

    def _spoil_others(self, index: int) -> frozenset[str]:
        chain = self.assignment.chain
        units = [unit for position, unit in enumerate(chain.units) if self.assignment.stage_of(position) == index]
        held = frozenset[str]().union(*(unit.tensor_fqns for unit in units))
        if index == self.assignment.num_stages - 1:
            held |= chain.output_fqns
        placeholders: dict[str, Tensor] = {}
        for fqn, first_name in canonical_fqns(self.roots[index]).items():
            if first_name not in held:
                _spoil_once(self.roots[index], fqn, first_name, placeholders)
        return held

    def _gradients(self) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for root in reversed(self.roots):
            for fqn, parameter in root.named_parameters():
                if parameter.grad is not None:
                    total[fqn] = total[fqn] + parameter.grad if fqn in total else parameter.grad.clone()
        return total

    def _buffers(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for root, held in zip(self.roots, self.held, strict=True):
            for fqn, buffer in root.named_buffers():
                if fqn in held:
                    assert fqn not in found or torch.equal(found[fqn], buffer), f"copies of {fqn} differ"
                    found[fqn] = buffer.clone()
        return found


def _spoil_once(root: nn.Module, fqn: str, first_name: str, placeholders: dict[str, Tensor]) -> None:
    """A tensor with several names stays one tensor."""
    path, _, name = fqn.rpartition(".")
    if first_name in placeholders:
        setattr(root.get_submodule(path), name, placeholders[first_name])
    else:
        spoil(root, fqn)
        placeholders[first_name] = getattr(root.get_submodule(path), name)


def _on(assignment: Assignment, root: nn.Module) -> Assignment:
    chain = assignment.chain
    return replace(assignment, chain=replace(chain, traced=replace(chain.traced, root=root)))


def _arriving(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """A tensor as another stage gets it."""
    packed = spec.packed(tensor)
    order = spec.memory_order
    return packed if order is None else packed.permute([order.index(dim) for dim in range(len(order))])


def _inputs(traced: TracedRegion, batch: Mapping[str, Any]) -> list[Tensor]:
    tensors = traced.input_tensors((), batch)
    assert tensors is not None
    return [tensor.clone() for tensor in tensors]


def assert_equal(staged: Outcome, whole: Outcome, tolerance: float) -> None:
    """Loss, results, gradients by FQN, buffers."""

    def close(what: str, found: Tensor, expected: Tensor) -> None:
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
        found, expected = found.nan_to_num().double(), expected.nan_to_num().double()
        difference = (found - expected).abs().max().item() if found.numel() else 0.0
        scale = max(expected.abs().max().item(), 1e-4) if found.numel() else 1.0
        assert difference <= tolerance * scale, f"{what} differs by {difference:.1e}, values are up to {scale:.1e}"

    assert torch.isfinite(whole.loss), "the loss is no number"
    close("loss", staged.loss, whole.loss)
    assert staged.result_type is whole.result_type
    assert len(staged.tensors) == len(whole.tensors)
    for index, (found, expected) in enumerate(zip(staged.tensors, whole.tensors, strict=True)):
        close(f"tensor {index} of the result", found, expected)
    assert staged.gradients.keys() == whole.gradients.keys()
    for fqn, gradient in whole.gradients.items():
        close(f"gradient of {fqn}", staged.gradients[fqn], gradient)
    for fqn, buffer in staged.buffers.items():
        close(f"buffer {fqn}", buffer, whole.buffers[fqn])


def check(traces: Traces, num_stages: int, *, training: bool) -> None:
    """Compares stages and whole at all sizes, one after another, so that buffers go on changing."""
    entry = traces.entry
    with torch.set_grad_enabled(training):
        staged = Staged(traces.assignment(num_stages, training=training).with_skips())
        whole = Whole(traces.root)
        for size in SIZES:
            staged.use(traces.assignment(num_stages, training=training, size=size))
            batch = entry.make_batch(size, size)
            assert_equal(staged.run(entry, batch, size), whole.run(entry, entry.make_batch(size, size), size), entry.tolerance)
