"""The strategy's constructor, which documents and checks its options."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from lightning_fxpipe.deferred_init.materialise import Constructions
from lightning_fxpipe.launch.launching import StartMethod
from lightning_fxpipe.microbatch.loss_weights import LossOptions, LossReductionName
from lightning_fxpipe.optim.precision import PipelinePrecision
from lightning_fxpipe.planner.cut_rule import BalanceName
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.planner.recompute_rule import ActivationCheckpointing
from lightning_fxpipe.recording.options import Recording
from lightning_fxpipe.schedules.by_name import ScheduleName
from lightning_fxpipe.schedules.own_table import wanted_schedule
from lightning_fxpipe.strategy.checkpoint_hooks import CheckpointHooks
from lightning_fxpipe.strategy.options import (
    FunctionPath,
    OwnTable,
    PlanFile,
    PositiveFloat,
    PositiveInt,
    check_options,
    duration_of,
    refuses_unknown_names,
)
from lightning_fxpipe.strategy.replica_strategy import ReplicaStrategy
from lightning_fxpipe.strategy.run_optimizers import RunOptimizers
from lightning_fxpipe.strategy.run_plan import PlanOptions, RunPlans
from lightning_fxpipe.strategy.run_recording import RunRecording
from lightning_fxpipe.strategy.session import Session


class ConfiguredStrategy(ReplicaStrategy):
    """Pipeline parallelism for an unmodified LightningModule.

    The call of the model inside the step is traced and cut into stages, which live on devices and in processes of their own.
    Every batch is split into microbatches that flow through the stages.

    Args:
        num_stages: Number of stages, the same on each of the Trainer's devices. ``"auto"``: as ``stages_per_rank`` says. With
            fewer stages than devices there are several replicas of the pipeline, which train on different batches as under DDP:
            ``devices=8`` and ``num_stages=2`` are four.
        stages_per_rank: Stages on each device, or on a single one. ``"auto"``: two where the schedule wants several, else one.
        num_microbatches: Microbatches that a batch is split into, along the first dimension of its tensors. ``"auto"``: four
            for each of several devices where the batch allows it, one for a single device, or as many as a table has.
        schedule: Order of forward and backward passes in training. ``"gpipe"`` runs all microbatches forward, the rest of the
            step once on the whole batch, and then all backward: any loss is exact; ``"looped_bfs"`` does so with two stages
            on each device. ``"1f1b"`` keeps at most ``num_stages`` microbatches alive on a stage; the rest of the step runs
            for each microbatch, too, and the loss must be a sum over these, which is checked. ``"auto"`` takes it where the
            loss allows it and activations would take more than half of the memory that is left, and else ``"gpipe"``. All
            others idle less: ``"interleaved_1f1b"`` with several stages on each device; ``"zb_h1"``, ``"zb_h2"``,
            ``"zero_bubble"`` and ``"interleaved_zero_bubble"`` compute gradients of weights later; ``"zbv_zero_bubble"``,
            ``"zero_bubble_v"``, ``"dualpipev"``, ``"v_half"`` and ``"v_min"`` place two stages on each device in a V. Or a
            table of your own: a CSV file or an ``ActionTable``, with a line of actions for each device.
        balance: What is equal on all stages, as far as it can be: ``"parameters"``; ``"flops"``, forward and backward; or
            ``"memory"``: parameters, gradients, Adam's states, and the activations that a stage keeps; or ``"seconds"`` on
            this device, for which layers are timed. ``"auto"`` chooses what is fastest and fits the memory, with it
            whatever of ``schedule``, ``stages_per_rank`` and ``num_microbatches`` is left at ``"auto"``.
        split_points: Paths of the modules that the stages after the first begin with, as ``model.layers.12``, instead of a
            balance. The number of stages follows from them.
        stage_of: Patterns of modules' paths, as ``model.embed*``, and the stage that each has to be in; -1 is the last one.
        device_speeds: How fast each device is, in proportion to the others, from rank 0 on, which has the last stage.
        device_memory_gib: What each device has for its stages: one number, or one for each from rank 0 on, or ``"auto"``, nine
            tenths of what is left. The stages fit, with gradients, Adam's states and activations, or there is an error.
        activation_checkpointing: Modules whose activations are recomputed in the backward pass instead of being stored:
            ``True`` for all blocks, such as a transformer's layers; ``"auto"`` for as few blocks as the memory requires; a
            module class; a pattern of module paths, as ``"model.layers.*"``; or a list or set of classes and patterns.
        compile: Whether the modules that a stage calls as a whole, such as layers, are compiled by ``torch.compile`` when they
            first run. Not with schedules that split backward passes.
        plan: Path of a plan saved as JSON (``python -m lightning_fxpipe plan``, ``PartitionPlan.save``), or a plan object; it
            then decides which stage holds what.
        shard_optimizer_state: If True, each replica keeps the optimizer state of its share of the parameters and updates them
            for the other replicas (ZeRO stage 1). If False, every replica keeps the whole state.
        loss_reduction: For ``"1f1b"``: what the loss is over samples, ``"mean"``, ``"sum"``, or ``"auto"`` to find out.
        loss_weight: For ``"1f1b"``: a function, or its import path, that gives the weight of a batch in a mean over something
            else than samples, such as its number of tokens that are not padding.
        batch_dim: Dimension of the batch's tensors that is the batch; tensors with fewer dimensions have it first.
        process_group_backend: Backend of ``torch.distributed``. Default: nccl for CUDA devices, gloo for CPUs.
        timeout: How long a rank waits for another before it raises an error: seconds, or a ``timedelta``.
        heartbeat_timeout: How long a rank may be silent before the others give it up: seconds, or a ``timedelta``. A rank is
            silent if its process is stopped or its machine is unreachable. ``None`` waits for ``timeout`` instead, as for a
            debugger that stops the whole process. The first run of a process decides.
        start_method: How the other processes start where no ``torchrun`` or cluster has started them. ``"popen"`` runs the
            script once more for each, ``"fork"`` copies the running process (for notebooks; on GPUs only before CUDA is used),
            ``"spawn"`` starts new ones. ``"auto"``: ``"fork"`` in an interactive session, else ``"popen"``.
        gather_after_run: Whether every process has the whole module after a run, on the CPU, as after one on one device; else
            it keeps its stage's parameters only. ``"auto"``: where the machine's memory has room for the copies.
        save_distributed_checkpoint: Whether a checkpoint is a folder, into which each rank writes its part, or one file as of
            one device, which ``torch.load`` reads: rank 0 gets the others' parts, so its machine needs the memory for all of
            it. ``"auto"``: a file if there is that memory when a run saves first, else folders, and a warning.
        async_save: Whether training goes on while a checkpoint is written, from a copy in the CPU's memory. (For one file, rank
            0 gets the others' parts before.) What follows waits for it, and raises what it failed with.
        record: Folder for what each rank does when in steps 3 to 7, or a ``Recording`` that chooses them; loggers get it, too.
    """

    strategy_name = "fxpipe"

    @refuses_unknown_names
    def __init__(
        self,
        num_stages: PositiveInt | Literal["auto"] = "auto",
        stages_per_rank: PositiveInt | Literal["auto"] = "auto",
        num_microbatches: PositiveInt | Literal["auto"] = "auto",
        schedule: ScheduleName | OwnTable = "auto",
        balance: BalanceName | Literal["auto"] = "parameters",
        split_points: list[str] | None = None,
        stage_of: dict[str, int] | None = None,
        device_speeds: list[PositiveFloat] | None = None,
        device_memory_gib: PositiveFloat | list[PositiveFloat] | Literal["auto"] | None = None,
        activation_checkpointing: ActivationCheckpointing = False,
        compile: bool = False,
        plan: PlanFile | PartitionPlan | None = None,
        shard_optimizer_state: bool = False,
        loss_reduction: LossReductionName = "auto",
        loss_weight: FunctionPath | Callable[[Any], Any] | None = None,
        batch_dim: int = 0,
        process_group_backend: str | None = None,
        timeout: PositiveFloat | timedelta = 1800.0,
        heartbeat_timeout: PositiveFloat | timedelta | None = 120.0,
        start_method: StartMethod = "auto",
        gather_after_run: bool | Literal["auto"] = "auto",
        save_distributed_checkpoint: bool | Literal["auto"] = "auto",
        async_save: bool = False,
        record: str | Path | Recording | None = None,
    ) -> None:
        super().__init__()
        self._schedule = wanted_schedule(schedule, num_microbatches)
        self._num_microbatches = self._schedule.num_microbatches if num_microbatches == "auto" else num_microbatches
        options = PlanOptions(
            given=PartitionPlan.load(plan) if isinstance(plan, (str, Path)) else plan,
            num_stages=num_stages,
            stages_per_rank=stages_per_rank,
            num_microbatches=self._num_microbatches,
            batch_dim=batch_dim,
            balance=balance,
            split_points=split_points or (),
            stage_of=stage_of or {},
            device_speeds=device_speeds or (),
            device_memory_gib=device_memory_gib,
            schedule=self._schedule,
            activation_checkpointing=activation_checkpointing,
            compile=compile,
            shard_optimizer_state=shard_optimizer_state,
        )
        self._loss = LossOptions.of(loss_reduction, loss_weight)
        check_options(options, self._loss, num_microbatches, start_method)
        self._plans = RunPlans(options)
        self._backend = process_group_backend
        self._timeout = duration_of("timeout", timeout)
        self._heartbeat = None if heartbeat_timeout is None else duration_of("heartbeat_timeout", heartbeat_timeout)
        self._start_method: StartMethod = start_method
        self._gather_after_run: bool | Literal["auto"] = gather_after_run
        self._session: Session | None = None
        self._run_optimizers = RunOptimizers(shards=shard_optimizer_state)
        self._checkpoints = CheckpointHooks(
            self._timeout,
            options={"schedule": self._schedule.name, "num_microbatches": self._num_microbatches},
            as_folder=save_distributed_checkpoint,
            in_background=async_save,
        )
        self._vote: Callable[[int, bool], None] | None = None
        self._precision: PipelinePrecision | None = None
        self._patches = ExitStack()
        self._constructions = Constructions()
        self._recording = RunRecording(record)
