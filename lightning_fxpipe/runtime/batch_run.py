"""Runs batches: the user's step once, around the region, which is pipelined.

Each rank calls the step with the whole batch. Up to the model's call (the *prelude*) it is ordinary Python, the same on every
rank; there the batch's microbatches run through the stages (``runtime.region_pass``). A stage that is not the last
leaves the step then; on the last stage the call returns what the stages computed, and the rest of the step is ordinary Python
and autograd on the whole batch, as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_fxpipe.data.loading import DIFFERENT_BATCHES
from lightning_fxpipe.data.skip_loading import Sparing
from lightning_fxpipe.distributed.agreement import check_agreement, digest
from lightning_fxpipe.distributed.commands import Commands
from lightning_fxpipe.distributed.decisions import Decisions
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.errors import FxPipeError, PeerError, UnsupportedError
from lightning_fxpipe.metrics.step_log import StepLog
from lightning_fxpipe.microbatch.draws import BatchDraws
from lightning_fxpipe.microbatch.loss_weights import LossOptions
from lightning_fxpipe.microbatch.split import count_samples, default_num_microbatches
from lightning_fxpipe.planner.load import ADAM_BYTES_PER_BYTE
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.pytree.sizes import held_number, plain_numbers
from lightning_fxpipe.recording.recorder import Recorder
from lightning_fxpipe.rng import rng_state
from lightning_fxpipe.runtime.attributes import Change, StepAttributes
from lightning_fxpipe.runtime.batch_passes import BatchPasses
from lightning_fxpipe.runtime.batch_result import BatchResult, rng_since
from lightning_fxpipe.runtime.batch_traces import BatchTraces, Found
from lightning_fxpipe.runtime.pass_setup import PassSetups
from lightning_fxpipe.runtime.region_run import RegionRun
from lightning_fxpipe.runtime.replay import watched_step
from lightning_fxpipe.runtime.schedule_choice import Interleaving
from lightning_fxpipe.runtime.stage_traces import StageTraces
from lightning_fxpipe.schedules.by_name import SCHEDULES, Schedule
from lightning_fxpipe.tracing.region import no_model_called
from lightning_fxpipe.tracing.signals import StepFailed
from lightning_fxpipe.tracing.trace_log import TraceLog
from lightning_fxpipe.user_code.members import Members
from lightning_fxpipe.user_code.step import Step, loss_of


class PipelineRuntime:
    """Runs the batches of a module in stages. Made by every rank of the pipeline.

    Args:
        root: The LightningModule, with this rank's stage on its device.
        members: Its members, listed anew for each batch.
        plan: Where each parameter lives.
        topology: This rank's place.
        num_microbatches: Microbatches of a batch; None: as many as the plan was chosen for, or by the batch's size.
        commands: What the last stage tells the others.
        schedule: Schedule for training; of the name ``"auto"``: the one that the plan was chosen for, if it was.
        loss: What the user says about the loss.
        trace_log: Gets each trace that is made.
        decisions: Has the ranks agree on recording a step.
        sparing: Knows the ranks that get batches without values; None where all have them.
        no_placeholders: In this context a look at a tensor of another stage is an error; yields what watches for it.
        recorder: Notes what runs.
        compiles: Whether modules inside of stages are compiled.
        optimizer_bytes_per_byte: What the optimizer will keep here for each byte of a parameter that trains.

    Attributes:
        stage_traces: The traces of the module's steps.
        batch_traces: Which of them a batch runs with.
        passes: What has gone through the stages, and goes back.
    """

    def __init__(
        self,
        root: nn.Module,
        members: Members,
        plan: PartitionPlan,
        topology: Topology,
        *,
        num_microbatches: int | None,
        commands: Commands,
        trace_log: TraceLog,
        decisions: Decisions,
        schedule: Schedule = SCHEDULES["auto"],
        loss: LossOptions | None = None,
        sparing: Sparing | None = None,
        no_placeholders: Callable[[], AbstractContextManager[TorchFunctionMode | None]] = nullcontext,
        recorder: Recorder | None = None,
        compiles: bool = False,
        optimizer_bytes_per_byte: float = ADAM_BYTES_PER_BYTE,
    ) -> None:
        recorder = recorder or Recorder()
        self._root = root
        self._members = members
        self._no_placeholders = no_placeholders
        self._topology = topology
        self._batch_dim = plan.batch_dim
        chosen = plan.chosen
        self._num_microbatches = num_microbatches or (chosen.num_microbatches if chosen else None)
        self.stage_traces = StageTraces(root, plan, topology, trace_log, decisions)
        self.batch_traces = BatchTraces(root, members, topology, self.stage_traces, sparing, decisions)
        is_chosen = chosen is not None and schedule.name == "auto"
        schedule = SCHEDULES[chosen.schedule] if chosen and is_chosen else schedule
        interleaving = Interleaving(
            schedule=schedule,
            is_chosen=is_chosen,
            options=loss or LossOptions(),
            topology=topology,
            log=trace_log,
            optimizer_bytes_per_byte=optimizer_bytes_per_byte,
        )
        self._setups = PassSetups(root, plan, topology, trace_log, schedule=schedule, recorder=recorder, compiles=compiles)
        self._sparing = sparing
        self._log = trace_log
        self._told_of_one_piece = False
        self.passes = BatchPasses(root, members, topology, self._setups, interleaving, commands, recorder)

    # ------------------------------------------------------------------ a batch

    def run(
        self, step: Step, batch: Any, metrics: Mapping[str, nn.Module], attributes: StepAttributes | None = None
    ) -> BatchResult:
        """Runs the step on a batch, in training up to its loss. Called by every rank of the pipeline.

        Errors of user code come out as they were raised.

        Args:
            step: The step.
            batch: The batch.
            metrics: The module's metrics, by name.
            attributes: What the step can change, as it is now; on the last stage.

        Raises:
            CannotFollow: The step cannot run in stages. No stage has run.
            StepFailed: The same of one that trains nothing, raised on the last stage only; the other ranks return.
        """
        self.passes.end_batch()
        iterators = self.stage_traces.iterators
        iterators.forget()
        num_samples = self._count_samples(batch)
        found, batch = self.batch_traces.find(step, batch, num_samples)
        if found is None and not self._topology.is_last:
            return BatchResult()
        log = StepLog(metrics)
        draws = BatchDraws(num_samples, self._batch_dim)
        call = None if found is None else self._region_call(step, batch, num_samples, found, draws, log, attributes)
        around = _without_model(self._root, draws) if call is None else call.in_place()
        before = rng_state() if call is None else None
        try:
            with log.capture(self._root), step.context(), self._behind_stages(step, call), iterators.one_run(), around:
                output = step.function(batch, *step.rest)
        except BaseException:
            if call is None or not (call.leaving.has_exited or call.leaving.error is not None):
                raise
        if call is not None and call.leaving.has_ended_step():
            if not self.passes.has_ended_step:
                return BatchResult()
            output, told, entries = self.passes.logged_loss()
            return BatchResult(output=output, loss=told, entries=entries)
        if not self._topology.is_last:  # a step that skips its model skips it on every rank
            return BatchResult()
        rng = rng_since(before if call is None else call.rng_before_region)
        loss = self._loss(step, output) if step.is_training else None
        values, losses, logged = plain_numbers([] if loss is None else [held_number(loss)], self.passes.losses, log.values)
        value = values[0] if values else None
        if value is not None and call is not None:
            output = self.passes.with_parked_loss(step, output, value, losses)
        return BatchResult(output=output, loss=value, entries=log.entries_with(logged), rng=rng)

    def _count_samples(self, batch: Any) -> int:
        # A later batch that cannot be split runs whole, also where the first one had to be one that can.
        counted = count_samples(batch, 1 if self._num_microbatches == 1 else None, self._batch_dim)
        if counted.reason is not None and not self._told_of_one_piece:
            self._told_of_one_piece = True
            self._log.warn(
                "Cannot split this batch into microbatches, so it runs as a single one and the stages do not overlap. The "
                f"batch has {counted.reason}. Set FxPipeStrategy(num_microbatches=1) to silence this warning."
            )
        return counted.num_samples

    @contextmanager
    def _behind_stages(self, step: Step, call: RegionRun | None) -> Iterator[None]:
        """The block runs the step's code; behind the region no other rank waits for this one, if nothing is trained."""
        if step.is_training or not self._topology.is_last or self._topology.num_ranks == 1:
            yield
            return
        try:
            with self._no_placeholders() as watch:
                if call is not None:
                    call.watch = watch
                yield
        except PeerError:
            raise
        except FxPipeError as error:
            if call is not None and not call.has_run:
                raise
            raise StepFailed(error) from error

    def _region_call(
        self,
        step: Step,
        batch: Any,
        num_samples: int,
        found: Found,
        draws: BatchDraws,
        log: StepLog,
        attributes: StepAttributes | None,
    ) -> RegionRun:
        trace, shapes = found
        sizes = trace.traced.bind_sizes(shapes)
        assert sizes is not None
        count = self._num_microbatches or default_num_microbatches(num_samples, self._topology.num_ranks)
        training, before = step.is_training, partial(self._agree, step, batch)
        return RegionRun(
            root=self._root,
            passes=self.passes,
            step=step,
            batch=batch,
            log=log,
            batch_dim=self._batch_dim,
            trace=trace,
            sizes=sizes,
            make_setup=partial(self._setups.get, trace, sizes, num_samples, count, training=training, before=before),
            draws=draws,
            attributes=attributes,
            members=self._members,
        )

    def _agree(self, step: Step, batch: Any) -> None:
        """The ranks have the same data; looked at where shapes are new."""
        has_values = self._sparing is None or not self._sparing.is_spared(step.kind)
        check_agreement(
            self._topology.control_group,
            digest(batch) if has_values else None,
            DIFFERENT_BATCHES,
        )

    def _loss(self, step: Step, output: Any) -> Tensor | None:
        if output is None:
            return None
        loss = loss_of(output)
        if loss is None:
            found = output.get("loss") if isinstance(output, dict) else output
            raise UnsupportedError(
                "The training_step returned a value that is not a loss.",
                observed=f"{type(found).__name__}" + (f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""),
                expected="a tensor with one element, a dict with such a tensor under 'loss', or None to skip the batch",
                todo="Return a scalar loss.",
            )
        if not loss.requires_grad and not self.passes.have_run:
            raise UnsupportedError(
                f"The {step.kind.value} returned a loss without calling the model.",
                observed="a loss that does not depend on any parameter",
                expected="a loss computed from the model's result, or None to skip the batch",
                todo="Return None for batches without training.",
            )
        return loss

    def share_left(self, sent: Iterable[Change]) -> None:
        """Gives every rank what the stages have left for hooks. Called by every rank of the pipeline, after each batch.

        Args:
            sent: What the last stage's rank has sent already.

        Raises:
            UnsupportedError: See :class:`LeftState`.
        """
        self._setups.left.share(sent)

    def forget(self) -> None:
        """Gives back what is kept for later batches: schedules and graphs."""
        self._setups.forget()
        self.batch_traces.forget()
        self.passes.end_batch()


@contextmanager
def _without_model(root: nn.Module, draws: BatchDraws) -> Iterator[None]:
    with watched_step(root, draws), no_model_called(root):
        yield
