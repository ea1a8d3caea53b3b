"""A module in its pipeline: all that lives from the strategy's setup to the end of its runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from torch import Tensor, nn

from lightning_fxpipe._compat.lightning import averaged_modules, throughputs
from lightning_fxpipe._compat.torch import return_memory
from lightning_fxpipe.data.skip_loading import Sparing
from lightning_fxpipe.deferred_init.materialise import Materials
from lightning_fxpipe.distributed.commands import Commands
from lightning_fxpipe.distributed.decisions import Decisions
from lightning_fxpipe.distributed.replica import Replica
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.distributed.values import broadcast_tensor
from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.hooks.old_gradients import OldGradients
from lightning_fxpipe.hooks.user_hooks import Hooks
from lightning_fxpipe.hooks.whole_model import WholeModel
from lightning_fxpipe.metrics.metric_calls import held_metrics
from lightning_fxpipe.metrics.metric_states import MetricStates, belong_to_replicas, take_over_states
from lightning_fxpipe.metrics.step_log import ResultChannel, replay
from lightning_fxpipe.microbatch.loss_weights import LossOptions
from lightning_fxpipe.optim.optimizers import StageOptimizer
from lightning_fxpipe.planner.cost import canonical_fqns
from lightning_fxpipe.planner.load import ADAM_BYTES_PER_BYTE
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.planning import Planned
from lightning_fxpipe.planner.step_plan import must_run_jointly
from lightning_fxpipe.recording.recorder import Recorder
from lightning_fxpipe.reporting.messages import inform, telling, warn
from lightning_fxpipe.rng import set_rng_state
from lightning_fxpipe.runtime.attributes import AttributesOfSteps, StepAttributes, SubmoduleAttributes, take_over
from lightning_fxpipe.runtime.batch_result import BatchResult, StepNews
from lightning_fxpipe.runtime.batch_run import PipelineRuntime
from lightning_fxpipe.runtime.joint_step import JointSteps
from lightning_fxpipe.runtime.whole_step import WholeSteps
from lightning_fxpipe.schedules.by_name import Schedule
from lightning_fxpipe.stages.gather import gather, has_room_for_copies
from lightning_fxpipe.stages.gradients import SharedParameters, clip_by_global_norm
from lightning_fxpipe.stages.replicas import Replicated
from lightning_fxpipe.stages.shard import check_is_as_split, drop_other_stages
from lightning_fxpipe.strategy.example_run import ExampleRuns
from lightning_fxpipe.strategy.first_values import hooks_change_checkpoints
from lightning_fxpipe.tracing.parameter_use import check_none_exchanged
from lightning_fxpipe.tracing.signals import CannotFollow, StepFailed
from lightning_fxpipe.tracing.trace_log import TraceLog
from lightning_fxpipe.user_code.exchange import named_tensors
from lightning_fxpipe.user_code.files import writing
from lightning_fxpipe.user_code.inference_mode import without_inference_modes
from lightning_fxpipe.user_code.members import Members
from lightning_fxpipe.user_code.step import Step, StepKind
from lightning_fxpipe.user_code.undo import Remembered

_STEPS: dict[RunningStage | None, StepKind] = {
    RunningStage.TRAINING: StepKind.TRAIN,
    RunningStage.SANITY_CHECKING: StepKind.VALIDATE,
    RunningStage.VALIDATING: StepKind.VALIDATE,
    RunningStage.TESTING: StepKind.TEST,
    RunningStage.PREDICTING: StepKind.PREDICT,
}


class Session:
    """Splits the module by the plan and runs steps through it. Made by every rank.

    Args:
        module: The LightningModule, whole; afterwards this rank has its own stage's tensors only.
        plan: Which stage holds what.
        topology: This rank's place.
        replica: What user code sees of the ranks.
        num_microbatches: Microbatches of a batch; None chooses by the batch's size.
        schedule: Schedule for training.
        loss: What the user says about the loss.
        sparing: Knows the ranks that do not load data.
        materials: Values for the tensors that have no data.
        recorder: Notes what runs.
        compiles: Whether modules inside of stages are compiled.
        optimizer_bytes_per_byte: What the optimizer will keep here for each byte of a parameter that trains.

    Attributes:
        is_split: Whether the module is in pieces; where :meth:`end_run` makes it whole again, the session is over.
        dropped: The placeholders of parameters that this rank has dropped, by the parameter's identity.
        replicated: This rank's part as one of several replicas.
    """

    def __init__(
        self,
        module: Any,
        plan: PartitionPlan,
        topology: Topology,
        *,
        replica: Replica,
        num_microbatches: int | None,
        schedule: Schedule,
        loss: LossOptions,
        sparing: Sparing,
        materials: Materials | None = None,
        recorder: Recorder,
        compiles: bool = False,
        optimizer_bytes_per_byte: float = ADAM_BYTES_PER_BYTE,
    ) -> None:
        self.module = module
        self.plan = plan
        self._topology = topology
        self.is_split = True
        self._dropped = drop_other_stages(module, plan, topology.stages, topology.device, materials)
        self._materials = materials
        belong_to_replicas(held_metrics(module).values(), topology.replicas)
        self._shared = _share_parameters(module, plan, topology)
        self.dropped: Mapping[int, Tensor] = {id(entry.parameter): entry.placeholder for entry in self._dropped}
        self.hooks = Hooks(module, WholeModel(module, plan, topology, self.dropped), topology, replica)
        self._commands = Commands(topology.control_group, source=topology.last_rank, waiting=recorder.waiting)
        self._channel = ResultChannel(self._commands)
        self.trace_log = TraceLog(inform, warn, told=telling)
        self.decisions = Decisions.among(topology)
        self._submodules = SubmoduleAttributes(module)
        self._whole_steps = WholeSteps(module, plan, topology, warn, self._submodules)
        self._ran: set[StepKind] = set()  # steps that have run for a batch of the loop that runs
        self._is_tried = False  # whether the running batch may show that its step cannot run in stages
        self._members = Members(module)
        self._split_names = frozenset(self._members.parameters)
        self._checked: Mapping[str, nn.Parameter] | None = None  # parameters that were there when it was split
        self.replicated = Replicated(
            topology.replicas,
            lambda: self._members.parameters.values(),
            lambda: self._members.buffers.values(),
            noted=lambda: recorder.during("gradient average"),
        )
        self.replicated.begin()
        self._runtime = PipelineRuntime(
            module,
            self._members,
            plan,
            topology,
            num_microbatches=num_microbatches,
            schedule=schedule,
            loss=loss,
            commands=self._commands,
            trace_log=self.trace_log,
            decisions=self.decisions,
            sparing=sparing,
            no_placeholders=lambda: self._whole_steps.no_placeholders() if self._is_tried else nullcontext(),
            recorder=recorder,
            compiles=compiles,
            optimizer_bytes_per_byte=optimizer_bytes_per_byte,
        )
        self._joint_steps = JointSteps(
            module,
            plan,
            topology,
            hooks=self.hooks,
            replica=replica,
            shared=self._shared,
            num_microbatches=num_microbatches,
            log=self.trace_log,
            decisions=self.decisions,
            recorder=recorder,
        )
        self._joint = self._joint_steps if plan.joint_reason or must_run_jointly(module) else None  # in training
        self._jointly_evaluated: set[StepKind] = set()
        self._sparing = sparing
        self._attributes = AttributesOfSteps(module, self._members, plan)
        self._old_gradients: OldGradients | None = None

    def begin_with(self, kind: StepKind, planned: Planned) -> None:
        """Makes this rank's stage of the graph that the plan was made of. Called by every rank, before the first run.

        Args:
            kind: Which step it is of.
            planned: What this rank has planned.
        """
        if self._joint is None:
            self._runtime.stage_traces.begin_with(kind, planned)

    def prepare(self, trainer: Trainer) -> None:
        """Makes the Trainer's callbacks and hooks ready for a module in stages. Called by every rank before each run."""
        for copy in averaged_modules(trainer):
            if not any(parameter.is_meta for parameter in copy.parameters()):
                # What is averaged with this rank's stage; the rest would cost the memory of the whole model.
                drop_other_stages(copy, self.plan, self._topology.stages, self._topology.device)
        for monitor, throughput in throughputs(trainer):
            # The whole pipeline is the device that works on a batch.
            throughput.available_flops = monitor.available_flops and monitor.available_flops * self._topology.num_ranks
        self.replicated.begin_run(trains=trainer.state.fn == TrainerFn.FITTING)
        self.hooks.install(trainer)
        if self._old_gradients is not None:
            self._old_gradients.release()  # where the run before ended in a step
        self._old_gradients = None
        if self._topology.num_ranks > 1:
            self.hooks.patch(*ExampleRuns(self.module, self.hooks, self._topology).patches(trainer))
        self._sparing.watch(
            running_step=lambda: None if self.hooks.are_running else _STEPS.get(trainer.state.stage),
            free_ranks=self._runtime.batch_traces.free_ranks,
            is_seen_by_hooks=lambda kind: self.hooks.readers.see_batches(kind.value),
        )

    def overwritable(self) -> frozenset[str]:
        """Names of this rank's tensors, if a checkpoint may be read into them: no code reads them before it is loaded."""
        mine = frozenset(fqn for *_, fqn, tensor in named_tensors(self.module) if not tensor.is_meta)
        return frozenset() if hooks_change_checkpoints(self.module) else mine

    def complete_values(self, loaded: Collection[str] = (), *, draws: bool = True) -> None:
        """Initialises tensors that have no data yet, unless a checkpoint has brought them. Called by every rank.

        Args:
            loaded: Names of the tensors that it has brought.
            draws: Whether random numbers are drawn that a whole construction would have drawn.
        """
        if self._materials is not None:
            self._materials.finish(loaded, draws=draws)
            self._materials = None
            self._members.renewed()
            self.replicated.begin()

    def train(self, step: Step, batch: Any, *, averages: bool) -> Any:
        """Runs a training batch up to its loss. Called by every rank.

        Args:
            step: The step.
            batch: The batch.
            averages: Whether replicas average their gradients after it, and do not go on to accumulate them.

        Returns:
            What the step returned; on the other stages the value of its loss, in a dict with whatever else hooks are to see.
            None if the step returned None, which skips the batch.
        """
        self._begin_batch()
        self.check_parameters()
        is_manual = not self.module.automatic_optimization
        with self.replicated.step(trains=True, averages=averages, is_manual=is_manual):
            return self._train(step, batch)

    def check_parameters(self) -> None:
        """Refuses parameters that user code has made or removed since the module was split. Called by every rank.

        No stage has them: each rank would keep its own.
        """
        parameters = self._members.renewed().parameters
        if parameters is self._checked or self._topology.num_ranks == 1:
            return
        holds_any, stages_of = self._topology.holds_any, self.plan.stages_of
        elsewhere = [fqn for fqn, p in parameters.items() if not p.is_meta and stages_of(fqn) and not holds_any(stages_of(fqn))]
        late = [*(fqn for fqn in parameters if fqn not in self._split_names), *elsewhere]
        check_is_as_split(late, sorted(self._split_names - parameters.keys()))
        self._checked = parameters

    def _train(self, step: Step, batch: Any) -> Any:
        before = self._members.parameters  # a module's forward may give them other memory
        try:
            output = self._train_in_stages(step, batch) if self._joint is None else self._joint.run(step, batch)
        except CannotFollow as signal:  # nothing has run: the step has other calls than the plan was made for
            self._joint = self._joint_steps.instead_of_stages(signal.reason)
            output = self._joint.run(step, batch)
        check_none_exchanged(before, self._members.renewed().parameters)
        return output

    def _train_in_stages(self, step: Step, batch: Any) -> Any:
        if self._old_gradients is None:
            self._old_gradients = OldGradients(self.module.trainer, self.module)
        outdated = self._old_gradients.parameters()
        may_stay = bool(outdated) and self._old_gradients.new_may_stay and not self._shared.are_held
        loss, output = self._run(replace(step, outdated=outdated, gradients_may_stay=may_stay), batch)
        if loss is None:
            self._runtime.passes.end_batch()
            return None
        if self._runtime.passes.gradients_are_in_place:
            self._old_gradients.keep_new(self.hooks.outside)
        if self._topology.is_last:
            return output
        with step.context():  # in which the default dtype is that of the precision plugin
            value = torch.full((), loss, dtype=torch.get_default_dtype(), device=self._topology.device)
        return {**output, "loss": value} if isinstance(output, Mapping) else value

    @contextmanager
    def around_step(self, kind: StepKind) -> Iterator[None]:
        """In the block a step runs: to its end on the last stage, whose rank writes its files. Called by every rank."""
        # An evaluation may run in Lightning's own inference mode, which recordings have to leave.
        modes = without_inference_modes() if kind is StepKind.TRAIN else nullcontext()
        with self.hooks.together(kind.value), writing(is_real=self._topology.is_last), modes:
            yield

    def around_backward(self) -> AbstractContextManager[Any]:
        """In the block a backward pass runs. Called by every rank."""
        if self._old_gradients is not None:
            self._old_gradients.release()
        if self._joint is None:
            return self.hooks.together("backward")
        return self._joint.user_code()  # a module may have a backward of its own

    @contextmanager
    def around_optimizer_step(self, optimizer: StageOptimizer | None) -> Iterator[None]:
        """In the block an optimizer steps: this rank's parameters, or all where it needs them. Called by every rank."""
        with self.hooks.together("optimizer_step"):
            if optimizer is not None and optimizer.is_coupled:
                optimizer.know_others(self._topology.control_group)
                with self.hooks.running(self.module.trainer, "optimizer_step", is_joint=True):
                    yield
                return
            try:
                with self.hooks.around_optimizers(self.module.trainer):
                    yield
            finally:
                if optimizer is not None:
                    optimizer.end_step()

    def backward(self, run: Callable[[], None], *, retains: bool, averages: bool) -> None:
        """The backward pass of the batch that has run. Called by every rank.

        Args:
            run: Calls backward on the loss; runs on the last stage, and on every rank where all run the step.
            retains: Whether another backward pass may follow.
            averages: Whether replicas average their gradients after it, and do not go on to accumulate them.
        """
        with self.replicated.backward(averages=averages):
            if self._joint is not None:
                run()
                return
            with self._shared.summed_gradients():
                if self._topology.is_last:
                    self._runtime.passes.lead_backward(run, retains=retains)
                else:
                    self._runtime.passes.follow()
        if not retains:
            self._runtime.passes.end_batch()

    def evaluate(self, step: Step, batch: Any) -> Any:
        """Runs a batch forward; on the last stage returns what the step would have returned for it, elsewhere None."""
        self._begin_batch()
        with self.replicated.step(trains=False, averages=False):
            if step.kind in self._jointly_evaluated:
                return self._evaluate_jointly(step, batch)
            return self._run(step, batch)[1]

    def _evaluate_jointly(self, step: Step, batch: Any) -> Any:
        output = self._joint_steps.run(step, batch)
        return output if self._topology.is_last or self.hooks.readers.sendable_output(step.kind.value, output) else None

    def clip_gradients(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Clips by the norm over all stages; returns the norm."""
        return clip_by_global_norm(parameters, max_norm, self._shared, self._topology)

    def end_run(self, optimizers: Iterable[StageOptimizer], *, num_copies: int, gathers: bool | Literal["auto"]) -> None:
        """Makes the module whole after a run that ended well; after another one, not every rank may come here.

        Args:
            optimizers: The run's optimizers, which follow the module.
            num_copies: Ranks on this machine.
            gathers: Whether the module is made whole; ``"auto"``: where there is memory for it, and else it stays split.
        """
        if self.module.trainer.interrupted:
            self.hooks.uninstall()  # otherwise hooks are still to come
        ended_well = self.module.trainer.state.status == TrainerStatus.RUNNING
        if ended_well:
            self._commands.settle()
        if self.is_split and ended_well and gathers is not False:
            self._make_whole(num_copies, must=gathers is True)
        for optimizer in optimizers:
            optimizer.end_run()
        self._attributes.forget()

    def _make_whole(self, num_copies: int, *, must: bool) -> None:
        """Ends the session, and gives every rank the whole module, on the CPU. Called by every rank."""
        num_bytes = sum(t.numel() * t.element_size() for t in (*self.module.parameters(), *self.module.buffers()))
        is_whole = self._topology.num_ranks == 1
        if not must and not is_whole and not has_room_for_copies(num_bytes, num_copies, self._topology):
            warn(
                f"The module stays sharded: {num_copies} copies of {num_bytes / 2**30:.1f} GiB do not fit in the free memory. "
                "The same Trainer can continue with it; for any other use, load a checkpoint. Set "
                "FxPipeStrategy(gather_after_run=True) to gather anyway, or False to silence this warning."
            )
            return
        if not is_whole:
            if unsent := self._submodules.share(self._topology.control_group):
                warn(
                    "Attributes of submodules that the run has changed cannot be pickled, so each rank keeps its own: "
                    f"{', '.join(unsent)}. Where a forward sets them, store tensors or plain values instead."
                )
            return_memory()  # of activations, where there will be weights
            gather(self.module, self.plan, self._topology, self._dropped)
        self.module.cpu()
        self.is_split = False
        self._runtime.forget()
        self._joint_steps.setups.forget()

    def _run(self, step: Step, batch: Any) -> tuple[float | None, Any]:
        """Runs one batch, and repeats on every rank what the last stage logged and set on the module.

        Returns:
            The loss, and what the step would have returned for the whole batch; on other stages None unless a hook needs it.
        """
        is_last = self._topology.is_last
        metrics = held_metrics(self.module, self._members)
        # The first batch of a loop is tried: later ones pay for no watch.
        is_tried = not step.is_training and step.kind not in self._ran and not self._whole_steps.takes(step.kind)
        start = Remembered(self.module) if is_tried else None
        self._is_tried = is_tried and is_last
        before = self._attributes.now(step) if is_last else None
        states = MetricStates(metrics) if is_last else None
        try:
            result = self._run_once(step, batch, metrics, before)
        except CannotFollow as error:
            if step.is_training:
                raise
            return self._run_whole(step, batch, error.reason, start)
        output = result.output
        news = None if before is None or states is None else self._news(step, result, before, states)
        loss, entries, news = self._channel.share(result.loss, result.entries, news)
        if loss is not None:
            self._commands.expect()  # of the backward pass
        if news is not None and news.failure is not None:
            return self._run_whole(step, batch, news.failure, start)
        self._ran.add(step.kind)
        if news is not None and not is_last:
            output = self._take_over(step, metrics, news)
        self._runtime.share_left(() if news is None else news.attributes)
        replay(self.module, entries, metrics, self._topology.device)
        return loss, output

    def _news(self, step: Step, result: BatchResult, before: StepAttributes, states: MetricStates) -> StepNews | None:
        """On the last stage what the others must know of the step; None where there is nothing, which is usual."""
        if result.failure is not None:  # what the step has done so far will be undone
            return StepNews(failure=result.failure)
        news = StepNews(
            rng=result.rng,
            attributes=tuple(before.changes(self._runtime.stage_traces.iterators)),
            metric_states=tuple(states.changes()),
            output=self.hooks.readers.sendable_output(step.kind.value, result.output),
            should_stop=self.module.trainer.should_stop,
            buffers=result.buffers,
        )
        return None if news == StepNews() else news

    def _take_over(self, step: Step, metrics: Mapping[str, nn.Module], news: StepNews) -> Any:
        """Makes of this rank what the last stage's has become; returns what hooks are to see of the step's output."""
        self.module.trainer.should_stop = news.should_stop
        self._whole_steps.change_buffers(news.buffers)
        if news.rng is not None:
            set_rng_state(news.rng)
        made = self._runtime.stage_traces.iterators
        take_over(self.module, news.attributes, self._topology.device, step.function, made=made)
        take_over_states(metrics, news.metric_states, self._topology.device)
        return news.output[0] if news.output else None

    def _begin_batch(self) -> None:
        self._members.renewed()

    def _run_once(
        self, step: Step, batch: Any, metrics: Mapping[str, nn.Module], attributes: StepAttributes | None
    ) -> BatchResult:
        """Runs one batch, in stages or without."""
        if self._whole_steps.takes(step.kind):
            return self._whole_steps.run(step, batch, metrics, attributes)
        try:
            return self._runtime.run(step, batch, metrics, attributes)
        except StepFailed as error:
            if not self._is_tried:
                raise error.reason from error.reason.__cause__
            return BatchResult(failure=error.reason)

    def _run_whole(self, step: Step, batch: Any, reason: FxPipeError, start: Remembered | None) -> tuple[float | None, Any]:
        """Runs a batch again, which cannot run in stages, and the later ones of the same step. Called by every rank.

        What the stages have changed in the first attempt is what it was at its ``start`` then; without one, it ran nothing.
        """
        if start is not None:
            start.restore()
        self._members.renewed()
        if self._whole_steps.take(step.kind, reason):
            return self._run(step, batch)
        self._jointly_evaluated.add(step.kind)
        return None, self._evaluate_jointly(step, batch)

    def end_evaluation(self) -> None:
        """After the last batch of a loop that trains nothing. Called by every rank."""
        self._ran.clear()
        self._whole_steps.give_back()


def _share_parameters(module: nn.Module, plan: PartitionPlan, topology: Topology) -> SharedParameters:
    """Finds what several ranks hold, and makes it equal on all holders, as well as what every rank holds."""
    copies = []
    for fqn, tensor in (*module.named_parameters(), *module.named_buffers()):
        ranks = topology.ranks_of(plan.stages_of(fqn))
        if len(ranks) > 1:
            copies.append((ranks, tensor if topology.holds_any(plan.stages_of(fqn)) else None))
    shared = SharedParameters(copies, topology)
    names = canonical_fqns(module)
    for _, _, fqn, tensor in named_tensors(module):
        if topology.num_ranks > 1 and fqn == names[fqn] and not plan.stages_of(fqn):
            broadcast_tensor(tensor, 0)
    return shared
