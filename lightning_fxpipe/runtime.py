"""Runs batches through the pipeline: splits them, finds a trace for each step and keeps a schedule for each shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe.agreement import check_agreement, digest
from lightning_fxpipe.appended import AppendedEntries
from lightning_fxpipe.assigned import AssignedKinds, AssignedValues
from lightning_fxpipe.batchvalues import keep_batch_values
from lightning_fxpipe.containers import fingerprint
from lightning_fxpipe.errors import BatchError, UnsupportedError
from lightning_fxpipe.evaluation import Evaluation
from lightning_fxpipe.joining import BatchLoss
from lightning_fxpipe.lru import LruCache
from lightning_fxpipe.metrics import LogEntry, StepLog
from lightning_fxpipe.microbatch import Pass, batch_size, default_num_microbatches, plan_passes, split_batch
from lightning_fxpipe.plan import PartitionPlan
from lightning_fxpipe.randomness import BatchRandomness, generator_state
from lightning_fxpipe.reads import current_reads
from lightning_fxpipe.reduction import BatchCheck, LossCheck
from lightning_fxpipe.region import NoModelCall, StepCall
from lightning_fxpipe.replay import Replayer
from lightning_fxpipe.schedule import Pipeline, ScheduleName
from lightning_fxpipe.shapes import Shapes
from lightning_fxpipe.sparing import Sparing, without_values
from lightning_fxpipe.split import TensorSpec, boundary_specs
from lightning_fxpipe.stagetraces import StageTrace, StageTraces, ValuesNeeded
from lightning_fxpipe.step import BatchRun, StageSetup, Step, StepKind
from lightning_fxpipe.topology import Topology
from lightning_fxpipe.trace import TracedRegion
from lightning_fxpipe.tracelog import TraceLog
from lightning_fxpipe.weighting import Finding, LossOptions, weighted_sum

# A schedule keeps receive buffers for all its microbatches, and is made in milliseconds, so few are kept.
_MAX_PIPELINES = 8
_MAX_FOUND = 64

_Found = tuple[StageTrace, Shapes]


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A pass, what runs it, and the graph that it runs, for which shapes, and which stages compute with its inputs."""

    part: Pass
    pipeline: Pipeline
    traced: TracedRegion
    shapes: Shapes
    stages_with_inputs: frozenset[int]


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
        own_draws: Functions that drew other random numbers than on one device.
    """

    outputs: list[Any]
    sizes: list[int]
    loss: float | None
    entries: list[LogEntry]
    rng: dict[str, Any] | None
    finding: Finding | None
    own_draws: frozenset[str] = frozenset()


class PipelineRuntime:
    """Runs steps of a module whose stages follow a plan.

    Args:
        root: The LightningModule, with this rank's stage on its device.
        plan: Where each parameter lives.
        topology: This rank's place.
        num_microbatches: Microbatches of a batch; None chooses by the batch's size.
        schedule: Schedule for training.
        loss: What the user says about the loss.
        trace_log: Gets each trace that is made.
        sparing: Knows the ranks that get batches without values; None where all have them.
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
        trace_log: TraceLog,
        sparing: Sparing | None = None,
    ) -> None:
        self._root = root
        self._topology = topology
        self._batch_dim = plan.batch_dim
        self._num_microbatches = num_microbatches
        self._schedule: ScheduleName = schedule
        self._loss = LossCheck(root, plan, loss, topology)
        self._evaluation = Evaluation(plan)
        self._traces = StageTraces(root, plan, topology, trace_log)
        self._found: LruCache[Hashable, _Found] = LruCache(_MAX_FOUND)
        self._pipelines: LruCache[Hashable, Pipeline] = LruCache(_MAX_PIPELINES)
        self._appended_to: set[tuple[Any, ...]] = set()
        self._assigned_kinds = AssignedKinds()
        self._sparing = sparing
        self._reading: dict[StepKind, frozenset[int]] = {}  # stages that compute with tensors of the batch
        self._run: BatchRun | None = None
        self._offset = 0  # of the running pass's first microbatch in the batch

    def run(self, step: Step, batch: Any, metrics: Mapping[str, nn.Module]) -> BatchResult:
        """Runs one batch, in training forward and backward. Called by every rank of the pipeline.

        Gradients are added to ``.grad`` of this rank's parameters, weighted so that they are those of the batch's loss. Errors
        of user code come out as they were raised.

        Args:
            step: The step.
            batch: The batch.
            metrics: The module's metrics, by name. They count on the last stage.
        """
        num_samples = batch_size(batch, self._batch_dim)
        count = self._num_microbatches or default_num_microbatches(num_samples, self._topology.num_stages)
        passes = plan_passes(num_samples, count)
        log = StepLog(metrics)
        self._run = run = BatchRun(
            root=self._root,
            step=step,
            microbatches=split_batch(batch, passes, self._batch_dim),
            sizes=[part.size for part in passes for _ in range(part.count)],
            randomness=BatchRandomness(step.random_key, num_samples, self._batch_dim),
            log=log,
            device=self._topology.device,
            appended=AppendedEntries(self._root, self._appended_to),
            assigned=AssignedValues(self._root, step.function, self._assigned_kinds, batch_dim=self._batch_dim),
        )
        if step.is_training and self._topology.is_last:
            run.weights = self._loss.weights(run.microbatches, run.sizes)
        gathers = not step.is_training and self._topology.is_last and len(run.sizes) > 1
        check: BatchCheck | None = None
        try:
            with self._evaluation.region_only(run) if gathers else log.capture(self._root):
                try:
                    prepared = self._prepare_all(step, run, passes, batch)
                except NoModelCall:
                    if self._topology.is_last and not gathers:
                        run.run_without_model()
                else:
                    check = self._loss.begin(run, batch, prepared[0].traced)
                    self._run_passes(prepared, check)
            if gathers:
                self._evaluation.run_step(run, batch)
        finally:
            self._run = None
        finding = check.finish() if check is not None else None
        if run.num_without_loss and run.losses:
            raise _mixed(run)
        if self._topology.is_last:
            loss = BatchLoss.of(run.losses, run.weights)
            run.log.calls.run(loss)
            run.log.written.run(loss)
            keep_batch_values(self._root)
            run.appended.join(run.sizes, loss)
            run.assigned.join(run.sizes, loss, run.log.calls.taken)
        losses = torch.stack(run.losses).to("cpu", torch.float64).tolist() if run.losses else []
        return BatchResult(
            outputs=run.outputs,
            sizes=run.sizes,
            loss=weighted_sum(losses, run.weights) if losses else None,
            entries=run.log.entries(run.losses, run.weights) if self._topology.is_last else [],
            rng=run.changed_rng() if self._topology.is_last else None,
            finding=finding,
            own_draws=frozenset(run.randomness.draws.own),
        )

    def _run_passes(self, prepared: Sequence[_Prepared], check: BatchCheck | None) -> None:
        for one in prepared:
            self._offset = one.part.first
            one.pipeline.step()
            if check is not None:
                check.end_pass(one.part)

    def forget(self) -> None:
        """Gives back what is kept for later batches: receive buffers and graphs."""
        self._pipelines = LruCache(_MAX_PIPELINES)
        self._found = LruCache(_MAX_FOUND)

    # ------------------------------------------------------------------ what runs a pass

    def _prepare_all(self, step: Step, run: BatchRun, passes: Sequence[Pass], batch: Any) -> list[_Prepared]:
        """What runs a batch, which gets its values on all ranks where that needs them."""
        spared = self._sparing.stages(step.kind) if self._sparing is not None else frozenset[int]()
        try:
            prepared = [one for part in passes for one in self._prepare(step, run, part, has_values=not spared)]
            needs_values = any(spared & one.stages_with_inputs for one in prepared)
        except ValuesNeeded:
            needs_values = True
        if needs_values:
            assert self._sparing is not None
            run.microbatches = split_batch(self._sparing.with_values(step.kind, batch), passes, self._batch_dim)
            prepared = [one for part in passes for one in self._prepare(step, run, part, has_values=True)]
        self._learn_needs(step, run, prepared)
        return prepared

    def _learn_needs(self, step: Step, run: BatchRun, prepared: Sequence[_Prepared]) -> None:
        if self._topology.num_stages < 3:
            return
        reading = frozenset[int]().union(*(one.stages_with_inputs for one in prepared))
        if step.kind not in self._reading:
            # A step that looks at values is not even tried: on zeros a loop may have no end.
            looks = self._traces.looks_at_values(step.kind)
            if looks or not self._is_found_without_values(step, run, prepared):
                reading = frozenset(range(self._topology.num_stages))
        self._reading[step.kind] = self._reading.get(step.kind, frozenset()) | reading

    def _is_found_without_values(self, step: Step, run: BatchRun, prepared: Sequence[_Prepared]) -> bool:
        """Whether what comes before the model's call runs on zeros, too, and calls it in the same way."""
        part = prepared[0].part
        try:
            found = self._find(
                step, without_values(run.microbatches[part.first], self._topology.device), part.size, has_values=False
            )
        except Exception:  # zeros may be what the step cannot do with, as a division by them
            return False
        return found is not None and found[0].traced is prepared[0].traced and found[1] == prepared[0].shapes

    def free_stages(self, kind: StepKind) -> frozenset[int]:
        """The stages but for the last that a step's batches so far have shown to need no values of them."""
        if kind not in self._reading or self._traces.looks_at_values(kind):
            return frozenset()
        return frozenset(range(self._topology.num_stages - 1)) - self._reading[kind]

    def _prepare(self, step: Step, run: BatchRun, part: Pass, *, has_values: bool) -> list[_Prepared]:
        """What runs the microbatches of a pass: in one go, or in several where the model gets other shapes for some.

        Raises:
            NoModelCall: The step does not call the model for any of them.
            ValuesNeeded: There are none, and they may decide.
        """
        microbatches = run.microbatches[part.first : part.first + part.count]
        find = partial(self._find, step, size=part.size, has_values=has_values)
        first = self._lookup(step, microbatches, part, find)
        if self._traces.is_fixed(step.kind):
            groups = [(part, first)]
        else:
            groups = self._grouped(part, [find(microbatch) for microbatch in microbatches], first)
        return [self._prepared(step, run.microbatches[part.first], part, found) for part, found in groups]

    def _grouped(self, part: Pass, found: Sequence[_Found | None], first: _Found) -> list[tuple[Pass, _Found]]:
        """Passes of successive microbatches with the same shapes. One that skips the model goes with those before it."""
        groups: list[tuple[Pass, _Found]] = []
        for index, one in enumerate(found):
            before = groups[-1] if groups else None
            if before is not None and one in (None, before[1]):
                groups[-1] = dataclasses.replace(before[0], count=before[0].count + 1), before[1]
            else:
                groups.append((Pass(first=part.first + index, count=1, size=part.size), one or first))
        return groups

    def _lookup(self, step: Step, microbatches: Sequence[Any], part: Pass, find_one: Callable[[Any], _Found | None]) -> _Found:
        """The trace and shapes for the first microbatch that calls the model."""

        def find() -> _Found:
            for microbatch in microbatches:
                found = find_one(microbatch)
                if found is not None:
                    return found
            raise NoModelCall("The step calls the model for none of the microbatches.")

        # What the model is called with follows from the batch's shapes and constants and what the prelude reads; where those
        # cannot be compared, and where they are new, such as the names of the samples, the step tells.
        constants = fingerprint((microbatches[0], step.rest[1:]))
        if constants is None or not self._traces.is_fixed(step.kind):
            return find()
        key = (
            step.kind,
            part.size,
            constants,
            tuple(module.training for module in self._root.modules()),
            tuple(parameter.requires_grad for parameter in self._root.parameters()),
        )
        reads = tuple(current_reads(self._root, self._traces.read_keys).values())
        return self._found.get((key, reads), find)

    def _find(self, step: Step, microbatch: Any, size: int, *, has_values: bool) -> _Found | None:
        """None for a microbatch that skips the model."""
        call = StepCall(function=step.function, args=(microbatch, *step.rest), kwargs={})
        try:
            with step.context():
                return self._traces.find(step.kind, call, size, has_values=has_values)
        except NoModelCall:
            return None

    def _prepared(self, step: Step, microbatch: Any, part: Pass, found: _Found) -> _Prepared:
        is_alone = self._run is not None and len(self._run.sizes) == 1
        pipeline = self._pipelines.get(
            (*found, part.count, is_alone, step.is_training), lambda: self._make_pipeline(step, microbatch, part, *found)
        )
        trace, shapes = found
        return _Prepared(
            part=part, pipeline=pipeline, traced=trace.traced, shapes=shapes, stages_with_inputs=trace.stages_with_inputs
        )

    def _make_pipeline(self, step: Step, microbatch: Any, part: Pass, stage_trace: StageTrace, shapes: Shapes) -> Pipeline:
        has_values = self._sparing is None or not self._sparing.is_spared(step.kind)
        check_agreement(
            self._topology.control_group,
            digest(microbatch) if has_values else None,
            BatchError(
                "The ranks of the pipeline have different batches.",
                expected="the same batch on every rank: the first stage takes its inputs, the last stage its targets",
                todo="Make the data the same in every process: call seed_everything before random data is made or split.",
            ),
        )
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
        return Pipeline(
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

    def _run_microbatch(self, index: int, setup: StageSetup, received: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        assert self._run is not None
        return self._run.run_microbatch(self._offset + index, setup, received)


def _mixed(run: BatchRun) -> UnsupportedError:
    return UnsupportedError(
        f"The {run.step.kind.value} returned a loss for some microbatches of a batch, and None for others.",
        observed=f"no loss for {run.num_without_loss} of {len(run.sizes)} microbatches",
        expected="a loss for all of them, or None for all: one device decides once for the whole batch",
        todo="Decide by the batch's index or size, return a loss of zero instead of None, or set num_microbatches=1.",
    )


def random_state_specs(device: torch.device) -> tuple[TensorSpec, ...]:
    """What carries the state of a device's random numbers over a boundary."""
    state = generator_state(device)
    return (TensorSpec(shape=tuple(state.shape), dtype=state.dtype, requires_grad=False),)
