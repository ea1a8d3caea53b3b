"""Runs batches through the pipeline: splits them, keeps a trace for each kind of step and a schedule for each shape."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_fxpipe._compat import tree_flatten
from lightning_fxpipe.agreement import check_agreement, digest
from lightning_fxpipe.errors import BatchError, FxPipeError, TraceError
from lightning_fxpipe.metrics import LogEntry, StepLog
from lightning_fxpipe.microbatch import Pass, batch_size, default_num_microbatches, plan_passes, split_batch
from lightning_fxpipe.plan import PartitionPlan
from lightning_fxpipe.planning import follow_plan
from lightning_fxpipe.randomness import BatchRandomness, generator_state
from lightning_fxpipe.reads import ReadKey, changed_reads, current_reads
from lightning_fxpipe.recordable import Recordable, sign
from lightning_fxpipe.reduction import BatchCheck, LossCheck
from lightning_fxpipe.region import StepCall, find_region, trains
from lightning_fxpipe.replay import Replayer
from lightning_fxpipe.schedule import Pipeline, ScheduleName
from lightning_fxpipe.span import Span, StepRegion, locate_region
from lightning_fxpipe.split import Stage, TensorSpec, boundary_specs, build_stage
from lightning_fxpipe.step import BatchRun, StageSetup, Step, StepKind
from lightning_fxpipe.topology import Topology
from lightning_fxpipe.trace import TracedRegion, trace_region
from lightning_fxpipe.weighting import Finding, LossOptions, weighted_sum

# A schedule keeps receive buffers for all its microbatches, so few are kept; a trace costs a fraction of a second to make.
_MAX_PIPELINES = 8
_MAX_TRACES = 32

Value = TypeVar("Value")


class _Cache(Generic[Value]):
    """Keeps the most recently used values. Every rank uses it in the same order, so all drop the same ones."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        if key not in self._values:
            self._values[key] = make()
            if len(self._values) > self._capacity:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return self._values[key]


@dataclass(frozen=True, kw_only=True)
class _StageTrace:
    """A trace and this rank's stage of it; ``span`` is None where the region is a single call, which other steps may make."""

    kind: StepKind
    span: Span | None
    traced: TracedRegion
    stage: Stage


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """What runs passes of one shape, and the graph that it runs."""

    pipeline: Pipeline
    traced: TracedRegion


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """What a batch gave on this rank.

    Attributes:
        outputs: On the last stage, what the step returned for each microbatch; else empty.
        sizes: Samples in each microbatch.
        loss: On the last stage in training, the batch's loss.
        entries: On the last stage, what the step logged.
        rng: On the last stage, the generators' state where the other ranks must take it over.
        finding: What a check of the loss has found; None where there was none.
    """

    outputs: list[Any]
    sizes: list[int]
    loss: float | None
    entries: list[LogEntry]
    rng: dict[str, Any] | None
    finding: Finding | None


class PipelineRuntime:
    """Runs steps of a module whose stages follow a plan.

    Args:
        root: The LightningModule, with this rank's stage on its device.
        plan: Where each parameter lives.
        topology: This rank's place.
        num_microbatches: Microbatches of a batch; None chooses by the batch's size.
        schedule: Schedule for training.
        loss: What the user says about the loss.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: PartitionPlan,
        topology: Topology,
        *,
        num_microbatches: int | None,
        schedule: ScheduleName,
        loss: LossOptions,
    ) -> None:
        self._root = root
        self._plan = plan
        self._topology = topology
        self._num_microbatches = num_microbatches
        self._schedule: ScheduleName = schedule
        self._loss = LossCheck(root, plan, loss, topology)
        self._pipelines: _Cache[_Prepared] = _Cache(_MAX_PIPELINES)
        self._traces: list[_StageTrace] = []
        self._read_keys: dict[ReadKey, None] = {}
        self._warned_of: set[str] = set()
        self._run: BatchRun | None = None
        self._offset = 0  # of the running pass's first microbatch in the batch
        self._staged = {id(p) for fqn, p in root.named_parameters(remove_duplicate=False) if plan.stages_of(fqn)}

    def run(self, step: Step, batch: Any) -> BatchResult:
        """Runs one batch, in training forward and backward. Called by every rank of the pipeline.

        Gradients are added to ``.grad`` of this rank's parameters, weighted so that they are those of the batch's loss. Errors
        of user code come out as they were raised.
        """
        num_samples = batch_size(batch)
        count = self._num_microbatches or default_num_microbatches(num_samples, self._topology.num_stages)
        passes = plan_passes(num_samples, count)
        log = StepLog()
        self._run = run = BatchRun(
            root=self._root,
            step=step,
            microbatches=split_batch(batch, passes),
            sizes=[part.size for part in passes for _ in range(part.count)],
            randomness=BatchRandomness(step.random_key, num_samples),
            log=log,
            device=self._topology.device,
        )
        if step.is_training and self._topology.is_last:
            run.weights = self._loss.weights(run.microbatches, run.sizes)
        check: BatchCheck | None = None
        try:
            with log.capture(self._root):
                for part in passes:
                    prepared = self._pipeline(step, run.microbatches[part.first], part)
                    if part.first == 0:
                        check = self._loss.begin(run, batch, prepared.traced)
                    self._offset = part.first
                    prepared.pipeline.step()
                    if check is not None:
                        check.end_pass(part)
        finally:
            self._run = None
        finding = check.finish() if check is not None else None
        losses = torch.stack(run.losses).to("cpu", torch.float64).tolist() if run.losses else []
        return BatchResult(
            outputs=run.outputs,
            sizes=run.sizes,
            loss=weighted_sum(losses, run.weights) if losses else None,
            entries=log.entries(run.losses, run.weights) if self._topology.is_last else [],
            rng=run.changed_rng() if self._topology.is_last else None,
            finding=finding,
        )

    # ------------------------------------------------------------------ what runs a pass

    def _pipeline(self, step: Step, microbatch: Any, part: Pass) -> _Prepared:
        leaves, structure = tree_flatten((microbatch, step.rest[1:]))
        key = (
            step.kind,
            part.count,
            self._run is not None and len(self._run.sizes) == 1,
            structure,
            tuple(
                (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), _hashable(leaf))
                for leaf in leaves
            ),
            tuple(module.training for module in self._root.modules()),
            tuple(parameter.requires_grad for parameter in self._root.parameters()),
        )
        values = current_reads(self._root, self._read_keys)
        return self._pipelines.get((key, tuple(values.values())), lambda: self._make_pipeline(step, microbatch, part))

    def _make_pipeline(self, step: Step, microbatch: Any, part: Pass) -> _Prepared:
        check_agreement(
            self._topology.control_group,
            digest(microbatch),
            BatchError(
                "The ranks of the pipeline have different batches.",
                expected="the same batch on every rank: the first stage takes its inputs, the last stage its targets",
                todo="Make the data the same in every process: call seed_everything before random data is made or split.",
            ),
        )
        call = StepCall(function=step.function, args=(microbatch, *step.rest), kwargs={})
        with step.context():
            stage_trace, shapes = self._stage_trace(step.kind, call, part.size)
        traced, stage, device = stage_trace.traced, stage_trace.stage, self._topology.device
        sizes = traced.bind_sizes(shapes)
        assert sizes is not None
        # With one microbatch the random numbers run through the stages as on one device.
        carried = random_state_specs(self._topology.device) if self._run is not None and len(self._run.sizes) == 1 else ()
        setup = StageSetup(
            traced=traced,
            stage=stage,
            input_shapes=tuple(spec.shape for spec in boundary_specs(traced.input_nodes, sizes)),
            received=boundary_specs(stage.boundary_in, sizes) + (carried if stage.index else ()),
            sent=boundary_specs(stage.boundary_out, sizes) + (() if stage.is_last else carried),
            replayer=None if traced.record is None else Replayer(self._root, traced.record, sizes, device.type),
            draws=tuple(node.meta["draw"] for node in traced.draw_nodes),
            sizes=sizes,
            carries_random_state=bool(carried),
        )
        pipeline = Pipeline(
            lambda index, received: self._run_microbatch(index, setup, received),
            stage_index=self._topology.stage_index,
            num_stages=self._topology.num_stages,
            received=setup.received,
            sent=None if stage.is_last else setup.sent,
            num_microbatches=part.count,
            schedule=self._schedule,
            training=step.is_training,
            device=self._topology.device,
            group=self._topology.group,
        )
        return _Prepared(pipeline=pipeline, traced=traced)

    def _run_microbatch(self, index: int, setup: StageSetup, received: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        assert self._run is not None
        return self._run.run_microbatch(self._offset + index, setup, received)

    def _is_staged(self, module: nn.Module) -> bool:
        return any(id(parameter) in self._staged for parameter in module.parameters())

    def _stage_trace(self, kind: StepKind, call: StepCall, size: int) -> tuple[_StageTrace, tuple[tuple[int, ...], ...]]:
        """A trace that covers the step's calls of the model, and the shapes that they get."""
        is_region = trains if kind is StepKind.TRAIN else self._is_staged
        for known in self._traces:
            if known.kind is kind or known.span is None:
                region = self._region_as(known, call, size)
                if region is not None and known.traced.covers(region):
                    return known, sign(self._root, region)[1]
        region = locate_region(self._root, call, batch_size=size, device=self._topology.device, fallback=is_region)
        made = self._make_stage_trace(kind, region)
        return made, sign(self._root, region)[1]

    def _region_as(self, known: _StageTrace, call: StepCall, size: int) -> Recordable | None:
        """The region of a step if it makes the calls of a known trace."""
        if known.span is not None:
            return StepRegion(step=call, span=known.span, batch_size=size)
        try:
            return find_region(self._root, call, batch_size=size, is_region=self._is_staged)
        except FxPipeError:
            return None

    def _make_stage_trace(self, kind: StepKind, region: Recordable) -> _StageTrace:
        traced = trace_region(self._root, region, opened=self._plan.opened, device=self._topology.device)
        assignment = follow_plan(self._plan, traced)
        check_agreement(
            self._topology.control_group,
            [[node.name for node in assignment.boundary(s)] for s in range(assignment.num_stages - 1)],
            TraceError(
                "The ranks recorded different graphs of the same step.",
                expected="the same tensors across each cut on every rank",
                todo="Look for code that depends on the rank, on unseeded random numbers or on the order of a set.",
            ),
        )
        span = region.span if isinstance(region, StepRegion) else None
        made = _StageTrace(kind=kind, span=span, traced=traced, stage=build_stage(assignment, self._topology.stage_index))
        self._warn_of_changes(region)
        self._traces = [*self._traces[-(_MAX_TRACES - 1) :], made]
        self._read_keys |= dict.fromkeys(traced.reads)
        return made

    def _warn_of_changes(self, region: Recordable) -> None:
        """Says once which attribute makes the model be traced again."""
        known = (trace.traced for trace in self._traces if trace.traced.computes(region))
        changed = {name for traced in known for name in changed_reads(self._root, traced.reads)} - self._warned_of
        if changed:
            self._warned_of |= changed
            rank_zero_warn(
                f"The model was traced again because {', '.join(sorted(changed))} changed, which its forward reads. Where it "
                "changes often, read it in a submodule that stays whole, or use the value after the model's call."
            )


def random_state_specs(device: torch.device) -> tuple[TensorSpec, ...]:
    """What carries the state of a device's random numbers over a boundary."""
    state = generator_state(device)
    return (TensorSpec(shape=tuple(state.shape), dtype=state.dtype, requires_grad=False),)


def _hashable(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value  # type: ignore[no-any-return]
