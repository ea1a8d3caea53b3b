"""Runs batches: the user's step once, around the region, which is pipelined.

Each rank calls the step with the whole batch. Up to the model's call (the *prelude*) it is ordinary Python, the same on every
rank; there the batch's microbatches run through the stages (:mod:`lightning_fxpipe.regionpass`). A stage that is not the last
leaves the step then; on the last stage the call returns what the stages computed, and the rest of the step is ordinary Python
and autograd on the whole batch, as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe.agreement import check_agreement, digest
from lightning_fxpipe.batchresult import BatchResult
from lightning_fxpipe.batchtraces import BatchTraces, Found
from lightning_fxpipe.commands import Command, Commands
from lightning_fxpipe.errors import BatchError, FxPipeError, PeerError, UnsupportedError
from lightning_fxpipe.interleaved import InterleavedPass, Interleaving, ParkedLoss, StepTail
from lightning_fxpipe.iterators import StepIterators
from lightning_fxpipe.metrics import StepLog
from lightning_fxpipe.microbatch import count_samples, default_num_microbatches, split_batch
from lightning_fxpipe.passsetup import PassSetups
from lightning_fxpipe.plan import PartitionPlan
from lightning_fxpipe.randomness import BatchDraws
from lightning_fxpipe.region import Leaving, StageExit, no_model_called, replaced_region
from lightning_fxpipe.regionpass import PassSetup, RegionPass
from lightning_fxpipe.replay import Replayer, watched_step
from lightning_fxpipe.rng import rng_state, same_rng, set_rng_state
from lightning_fxpipe.schedule import ScheduleName
from lightning_fxpipe.signals import StepFailed
from lightning_fxpipe.sparing import Sparing
from lightning_fxpipe.split import boundary_specs
from lightning_fxpipe.stagetraces import StageTrace
from lightning_fxpipe.step import Step, StepKind, loss_of
from lightning_fxpipe.structure import describe
from lightning_fxpipe.topology import Topology
from lightning_fxpipe.tracelog import TraceLog
from lightning_fxpipe.weighting import Finding, LossOptions


class PipelineRuntime:
    """Runs the batches of a module in stages. Made by every rank of the pipeline.

    Args:
        root: The LightningModule, with this rank's stage on its device.
        plan: Where each parameter lives.
        topology: This rank's place.
        num_microbatches: Microbatches of a batch; None chooses by the batch's size.
        schedule: Schedule for training.
        loss: What the user says about the loss.
        trace_log: Gets each trace that is made.
        sparing: Knows the ranks that get batches without values; None where all have them.
        no_placeholders: In this context a look at a tensor of another stage is an error.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: PartitionPlan,
        topology: Topology,
        *,
        num_microbatches: int | None,
        trace_log: TraceLog,
        schedule: ScheduleName = "auto",
        loss: LossOptions | None = None,
        sparing: Sparing | None = None,
        no_placeholders: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._root = root
        self._no_placeholders = no_placeholders
        self._topology = topology
        self._batch_dim = plan.batch_dim
        self._num_microbatches = num_microbatches
        self._traces = BatchTraces(root, plan, topology, trace_log, sparing)
        self._interleaving = Interleaving(options=loss or LossOptions(), is_asked_for=schedule == "1f1b")
        self._setups = PassSetups(root, plan, topology, trace_log, interleaves=schedule == "1f1b")
        self._sparing = sparing
        self._log = trace_log
        self._told_of_one_piece = False
        self._commands = Commands(topology)
        self._passes: list[RegionPass] = []  # of the running batch
        self._interleaved: InterleavedPass | None = None

    @property
    def iterators(self) -> StepIterators:
        """Those that the running batch's step has made."""
        return self._traces.iterators

    # ------------------------------------------------------------------ a batch

    def run(
        self, step: Step, batch: Any, metrics: Mapping[str, nn.Module], at_region: Callable[[], None] | None = None
    ) -> BatchResult:
        """Runs the step on a batch, in training up to its loss. Called by every rank of the pipeline.

        Errors of user code come out as they were raised.

        Args:
            step: The step.
            batch: The batch.
            metrics: The module's metrics, by name.
            at_region: Called when what the step does before it calls the model is done.

        Raises:
            CannotFollow: The step trains nothing, and cannot run in stages.
            StepFailed: The same, raised on the last stage only; the other ranks return.
        """
        self.end_batch()
        self.iterators.forget()
        num_samples = self._count_samples(batch)
        found, batch = self._traces.find(step, batch, num_samples)
        if found is None and not self._topology.is_last:
            return BatchResult(num_microbatches=0)
        log = StepLog(metrics)
        draws = BatchDraws(num_samples, self._batch_dim)
        call = None if found is None else self._region_call(step, batch, num_samples, found, draws)
        if call is not None:
            call.at_region = at_region
        around: AbstractContextManager[Any] = self._without_model(step, draws) if call is None else call.in_place(batch)
        before = rng_state() if call is None else None
        try:
            with log.capture(self._root), step.context(), self._behind_stages(step, call), self.iterators.one_run(), around:
                output = step.function(batch, *step.rest)
        except BaseException:
            if call is None or call.leaving.error is None:
                raise
        if call is not None and call.leaving.has_ended_step():
            return BatchResult(num_microbatches=call.setup.num_microbatches)
        if not self._topology.is_last:  # a step that skips its model skips it on every rank
            return BatchResult(num_microbatches=0)
        if call is not None:
            before = call.rng_before_region
        rng = _changed_since(before)
        loss = self._loss_value(step, output) if step.is_training else None
        if loss is not None and call is not None:
            output = self._with_parked_loss(step, output, call)
        return BatchResult(
            num_microbatches=0 if call is None else call.setup.num_microbatches,
            output=output,
            loss=loss,
            finding=self._interleaving.finding,
            entries=log.entries,
            rng=rng,
        )

    def _count_samples(self, batch: Any) -> int:
        counted = count_samples(batch, self._num_microbatches, self._batch_dim)
        if counted.reason is not None and not self._told_of_one_piece:
            self._told_of_one_piece = True
            self._log.warn(
                f"A batch cannot be split into microbatches, and runs as one: the stages wait for each other. It has "
                f"{counted.reason}. FxPipeStrategy(num_microbatches=1) says that it is meant so."
            )
        return counted.num_samples

    @contextmanager
    def _behind_stages(self, step: Step, call: _RegionCall | None) -> Iterator[None]:
        """The block runs the step's code; behind the region no other rank waits for this one, if nothing is trained."""
        if step.is_training or not self._topology.is_last or self._topology.num_stages == 1:
            yield
            return
        try:
            with self._no_placeholders():
                yield
        except PeerError:
            raise
        except FxPipeError as error:
            if call is not None and not call.has_run:
                raise
            raise StepFailed(error) from error

    def _region_call(self, step: Step, batch: Any, num_samples: int, found: Found, draws: BatchDraws) -> _RegionCall:
        trace, shapes = found
        traced = trace.traced
        sizes = traced.bind_sizes(shapes)
        assert sizes is not None
        count = self._num_microbatches or default_num_microbatches(num_samples, self._topology.num_stages)

        def setup() -> PassSetup:
            return self._setups.get(
                trace, sizes, num_samples, count, training=step.is_training, before=lambda: self._agree(step, batch)
            )

        return _RegionCall(self, step, batch, trace, sizes, setup, draws)

    def _agree(self, step: Step, batch: Any) -> None:
        """The ranks have the same data; looked at where shapes are new."""
        has_values = self._sparing is None or not self._sparing.is_spared(step.kind)
        check_agreement(
            self._topology.control_group,
            digest(batch) if has_values else None,
            BatchError(
                "The ranks of the pipeline have different batches.",
                expected="the same batch on every rank: the first stage takes its inputs, the last stage its targets",
                todo="Make the data the same in every process: call seed_everything before random data is made or split.",
            ),
        )

    @contextmanager
    def _without_model(self, step: Step, draws: BatchDraws) -> Iterator[None]:
        with watched_step(self._root, draws), no_model_called(self._root):
            yield

    def _loss_value(self, step: Step, output: Any) -> float | None:
        if output is None:
            return None
        loss = loss_of(output)
        if loss is None:
            found = output.get("loss") if isinstance(output, dict) else output
            raise UnsupportedError(
                "The training_step returned something that is no loss.",
                observed=f"{type(found).__name__}" + (f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""),
                expected="a tensor with one element, a dict with one under 'loss', or None to skip the batch",
                todo="Return a loss.",
            )
        if not loss.requires_grad and not self._passes and self._interleaved is None:
            raise UnsupportedError(
                f"The {step.kind.value} returned a loss without calling the model.",
                observed="a loss that depends on no parameter",
                expected="a loss of the model's result, or None to skip the batch",
                todo="Return None for batches that train nothing.",
            )
        return float(loss.detach())

    def _with_parked_loss(self, step: Step, output: Any, call: _RegionCall) -> Any:
        """What the step returned; where the batch has run forward and backward, with a loss that brings the gradients."""
        loss = loss_of(output)
        assert loss is not None
        interleaved = self._interleaved
        if interleaved is None:
            if self._interleaving.is_open and call.tail is not None:
                self._interleaving.try_out(call.tail, call.joined, loss)
            return output
        interleaved.checked(loss, step)

        def install(factor: float) -> None:
            self._commands.tell(Command.INSTALL, option=factor / step.scale)
            interleaved.install(factor / step.scale)

        anchor = torch.zeros((), requires_grad=True)
        parked: Tensor = ParkedLoss.apply(anchor, loss.detach(), install)  # type: ignore[no-untyped-call]
        return {**output, "loss": parked} if isinstance(output, dict) else parked

    def learn(self, finding: Finding | None) -> None:
        """Takes over what the last stage has found out of the loss."""
        self._interleaving.finding = finding

    def runs_interleaved(self, step: Step, setup: PassSetup) -> bool:
        """Whether a batch runs forward and backward at once; the same on every rank."""
        return step.is_training and self._interleaving.is_on and all(leg.interleaved is not None for leg in setup.legs)

    def may_interleave(self, step: Step) -> bool:
        """Whether a batch may run so, or show whether later ones can."""
        return step.is_training and self._interleaving.is_asked_for

    def run_interleaved(
        self, setup: PassSetup, values: list[Tensor | None], step: Step, tail: StepTail | None
    ) -> tuple[Tensor, ...] | None:
        """The region's call in the running batch, forward and backward. Called by every rank."""
        self._interleaved = InterleavedPass(
            setup,
            values,
            random_key=step.random_key,
            parameters=[parameter for parameter in self._root.parameters() if not parameter.is_meta],
            tail=tail,
            weights=() if tail is None else self._interleaving.weights(tail),
            scale=step.scale,
        )
        return self._interleaved.run()

    def run_pass(
        self, setup: PassSetup, values: list[Tensor | None], step: Step, trace: StageTrace
    ) -> tuple[bool, tuple[Tensor, ...] | None]:
        """The region's call in the running batch, forward. Called by every rank.

        Returns:
            Whether it counts, and the joined results. It does not where a first try shows that samples notice each other.
        """
        tries = not self._setups.is_proven(trace, setup)
        buffers = [(b, b.clone()) for b in self._root.buffers() if not b.is_meta] if tries else []
        one = self._started(setup, values, step, tries=tries)
        joined = one.forward()
        if tries and not self._setups.prove(trace, one.mixing):
            self._passes.remove(one)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            return False, None
        return True, joined

    def _started(self, setup: PassSetup, values: list[Tensor | None], step: Step, *, tries: bool) -> RegionPass:
        number = len(self._passes)
        made = RegionPass(
            setup,
            values,
            random_key=(*step.random_key, number) if number else step.random_key,
            training=step.is_training,
            announce=lambda one: self._commands.tell(Command.BACKWARD, number, int(one.retains)),
            tries=tries,
        )
        self._passes.append(made)
        return made

    def free_stages(self, kind: StepKind) -> frozenset[int]:
        """The stages but for the last that a step's batches so far have shown to need no values of them."""
        return self._traces.free_stages(kind)

    # ------------------------------------------------------------------ backward

    def lead_backward(self, run: Callable[[], None], *, retains: bool) -> None:
        """Runs ``run``, which calls backward on the batch's loss. Called on the last stage, and :meth:`follow` on the others.

        Args:
            run: Calls backward.
            retains: Whether what the stages saved is kept for another backward pass.
        """
        for one in self._passes:
            one.retains = retains
        run()
        self._commands.tell(Command.DONE)

    def follow(self) -> None:
        """Runs the backward passes that the last stage asks for, until it asks for no more. Called on the other stages."""
        while True:
            command, number, option = self._commands.hear()
            if command is Command.DONE:
                return
            if command is Command.INSTALL:
                assert self._interleaved is not None
                self._interleaved.install(option)
                continue
            one = self._passes[number]
            one.retains = bool(option)
            one.backward()

    def end_batch(self) -> None:
        """Drops what the batch's passes have kept."""
        self._passes = []
        self._interleaved = None

    def forget(self) -> None:
        """Gives back what is kept for later batches: receive buffers and graphs."""
        self._setups.forget()
        self._traces.forget()
        self.end_batch()


class _RegionCall:
    """Runs the region in place of the step's calls of the model, for one batch."""

    def __init__(
        self,
        runtime: PipelineRuntime,
        step: Step,
        batch: Any,
        trace: StageTrace,
        sizes: Mapping[Any, int],
        make_setup: Callable[[], PassSetup],
        draws: BatchDraws,
    ) -> None:
        self.setup = make_setup()
        self.rng_before_region: dict[str, Any] | None = None
        self.tail: StepTail | None = None
        self.joined: tuple[Tensor, ...] = ()
        self.has_run = False  # all ranks have done their part
        self.at_region: Callable[[], None] | None = None
        self._batch = batch
        self._rng_at_start = rng_state() if runtime.may_interleave(step) else None
        self.leaving = Leaving()
        self._runtime = runtime
        self._step = step
        self._trace = trace
        self._traced = trace.traced
        self._make_setup = make_setup
        self._sizes = sizes
        self._draws = draws

    @contextmanager
    def in_place(self, batch: Any) -> Iterator[None]:
        """In the block, the step on ``batch``, the region is pipelined.

        Raises:
            StageExit: The region has run, and this is not the last stage.
        """
        root, traced, run = self._runtime._root, self._traced, self.leaving.noted(self._run)
        if traced.record is not None:
            device_type = self._runtime._topology.device.type
            replayer = Replayer(root, traced.record, self._sizes, device_type, traced.held)
            with replayer.lead((batch, self._step.rest[1:]), self._draws, run):
                yield
            return

        def run_region(*args: Any, **kwargs: Any) -> Any:
            inputs = traced.input_tensors(args, kwargs)
            if inputs is None:
                raise self._varying("other arguments", describe((args, kwargs)), "the same arguments but for the tensors")
            with mode.in_stage():
                outputs = run(list(inputs))
            return traced.result(outputs, self._sizes)

        path = traced.signature.path
        assert path is not None
        with watched_step(root, self._draws) as mode, replaced_region(root, path, run_region):
            yield

    def _run(self, inputs: list[Tensor]) -> list[Tensor]:
        """The region's outputs on the last stage, from its inputs.

        Raises:
            StageExit: This is not the last stage.
        """
        if self.at_region is not None:
            self.at_region()
        traced, setup = self._traced, self.setup
        expected = tuple(spec.shape for spec in boundary_specs(traced.input_nodes, self._sizes))
        actual = tuple(tuple(tensor.shape) for tensor in inputs)
        if actual != expected:
            raise self._varying("inputs of other shapes", str(actual), str(expected))
        before_draws = rng_state()
        values = self._values(inputs)
        if self._runtime.runs_interleaved(self._step, setup):
            joined = self._runtime.run_interleaved(setup, values, self._step, self.tail)
        else:
            counts, joined = self._runtime.run_pass(setup, values, self._step, self._trace)
            if not counts:
                self.setup = setup = self._make_setup()
                set_rng_state(before_draws)
                values = self._values(inputs)
                _, joined = self._runtime.run_pass(setup, values, self._step, self._trace)
        self.has_run = True
        if joined is None:
            raise StageExit(())
        assert setup.tail is not None
        self.joined = joined
        return list(setup.tail.module(*joined, *(values[i] for i in setup.tail.region_inputs)))

    def _values(self, inputs: list[Tensor]) -> list[Tensor | None]:
        """The region's inputs and draws for the whole batch; with one microbatch these are drawn where they stand."""
        setup = self.setup
        is_cut = setup.num_microbatches > 1
        ahead = [node.meta["draw"].make(self._draws, self._sizes) if is_cut else None for node in self._traced.draw_nodes]
        self.rng_before_region = rng_state()
        values: list[Tensor | None] = [*inputs, *ahead]
        self.tail = None
        if self._rng_at_start is not None and setup.is_last and is_cut:
            self.tail = self._step_tail(values, self._rng_at_start, self.rng_before_region)
        return values

    def _step_tail(self, values: list[Tensor | None], at_start: dict[str, Any], after_prelude: dict[str, Any]) -> StepTail:
        runtime = self._runtime
        passes = [leg.part for leg in self.setup.legs]
        return StepTail(
            root=runtime._root,
            step=self._step,
            microbatches=split_batch(self._batch, passes, runtime._batch_dim),
            traced=self._traced,
            setup=self.setup,
            values=values,
            rng_at_start=at_start,
            rng_after_prelude=after_prelude,
            draws=BatchDraws(sum(part.count * part.size for part in passes), runtime._batch_dim),
        )

    def _varying(self, what: str, observed: str, expected: str) -> UnsupportedError:
        return UnsupportedError(
            f"The {self._step.kind.value} calls {self._traced.signature.label} with {what} than it was set up for.",
            observed=observed,
            expected=expected,
            todo="Make the inputs' shapes and constants follow from the batch's shapes and plain attributes.",
        )


def _changed_since(before: dict[str, Any] | None) -> dict[str, Any] | None:
    now = rng_state()
    return None if before is None or same_rng(before, now) else now
