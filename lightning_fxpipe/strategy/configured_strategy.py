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
    reads_options,
)
from lightning_fxpipe.strategy.replica_strategy import ReplicaStrategy
from lightning_fxpipe.strategy.run_optimizers import RunOptimizers
from lightning_fxpipe.strategy.run_plan import PlanOptions, RunPlans
from lightning_fxpipe.strategy.run_recording import RunRecording
from lightning_fxpipe.strategy.session import Session


class ConfiguredStrategy(ReplicaStrategy):
    """Pipeline parallelism for an unmodified LightningModule.

    Traces the model call inside the step and cuts it into stages, which run on separate devices in separate processes. Splits
    each batch into microbatches that flow through the stages.

    An option that is None, null in a config, has its default; only for ``heartbeat_timeout`` it means something else.

    Options by purpose:

    - Stages and cuts: ``num_stages``, ``stages_per_rank``, ``balance``, ``split_points``, ``stage_of``, ``device_speeds``,
      ``plan``
    - Schedule and microbatches: ``schedule``, ``num_microbatches``, ``batch_dim``, ``loss_reduction``, ``loss_weight``
    - Memory and speed: ``activation_checkpointing``, ``device_memory_gib``, ``compile``
    - Data parallel: ``shard_optimizer_state``
    - Processes: ``process_group_backend``, ``start_method``, ``gather_after_run``
    - Failures and time-outs: ``timeout``, ``heartbeat_timeout``
    - Checkpoints: ``save_distributed_checkpoint``, ``async_save``
    - Recording: ``record``

    Args:
        num_stages: Number of stages. Every device holds the same number of stages. With fewer stages than devices, the pipeline
            is replicated, and the replicas train on different batches as with DDP: ``devices=8`` and ``num_stages=2`` are four
            replicas. ``"auto"``: ``stages_per_rank`` stages for each device.
        stages_per_rank: Number of stages on each device; several stages also form a pipeline on a single device. ``"auto"``:
            two if the schedule requires several, else one.
        balance: What to balance across stages: ``"parameters"``; ``"flops"`` of forward and backward passes; ``"memory"``,
            which is parameters, gradients, Adam's states and stored activations; or ``"seconds"``, for which layers are timed
            on this device. ``"auto"`` searches for the fastest plan that fits into memory, and also chooses whichever of
            ``schedule``, ``stages_per_rank`` and ``num_microbatches`` is ``"auto"``.
        split_points: Paths of the modules that begin the second and each later stage, such as ``["model.layers.12"]``. Replaces
            ``balance`` and determines the number of stages.
        stage_of: Stage of each module whose path matches a pattern: ``{"model.embed*": 0, "model.head": -1}``; -1 is the last
            stage. ``balance`` places the other modules.
        device_speeds: Relative speed of each device of a pipeline, in the order of the ranks. Rank 0 holds the last stage.
            Default: all are equal.
        plan: Partition plan to use instead of a new one: a ``PartitionPlan``, or the path of one saved as JSON (by
            ``PartitionPlan.save``, or ``python -m lightning_fxpipe plan --output``).
        schedule: Order of forward and backward passes in training. ``"gpipe"`` runs all forward passes, then the rest of the
            step once on the whole batch, then all backward passes: any loss is exact. ``"1f1b"`` stores the activations of at
            most ``num_stages`` microbatches, but runs the rest of the step for each microbatch: the loss must be a sum over
            microbatches, which is checked. ``"auto"``: ``"1f1b"`` if the loss allows it and activations would take more than
            half of the free memory, else ``"gpipe"``. The other schedules idle less: ``"looped_bfs"`` (as ``"gpipe"``) and
            ``"interleaved_1f1b"`` place several stages on each device; ``"zb_h1"``, ``"zb_h2"``, ``"zero_bubble"`` and
            ``"interleaved_zero_bubble"`` delay the gradients of weights; ``"zbv_zero_bubble"``, ``"zero_bubble_v"``,
            ``"dualpipev"``, ``"v_half"`` and ``"v_min"`` place two stages on each device in a V. Torch's names, such as
            ``"Interleaved1F1B"``, are accepted in any case. A custom schedule is an ``ActionTable``, or the path of a CSV file
            with one line of actions for each device.
        num_microbatches: Number of microbatches that a batch is split into. ``"auto"``: four for each device of a pipeline, or
            fewer so that each has at least two samples; the number of a custom schedule; one on a single device, or if the
            number of samples is unknown.
        batch_dim: Batch dimension of the batch's tensors. Tensors with fewer dimensions are split along their first one.
        loss_reduction: How the loss combines samples: ``"mean"``, ``"sum"``, or ``"auto"`` to detect it. Only for schedules
            that compute the loss for each microbatch, which are all but ``"gpipe"`` and ``"looped_bfs"``.
        loss_weight: Function, or its import path, that returns the weight of a batch in a mean loss, such as its number of
            tokens without padding. For the same schedules. Default: the number of samples.
        activation_checkpointing: Modules whose activations are recomputed in the backward pass instead of being stored:
            ``True`` for all blocks, such as a transformer's layers; ``"auto"`` for as few blocks as the memory requires; a
            module class; a pattern of module paths, as ``"model.layers.*"``; or a list or set of classes and patterns.
        device_memory_gib: Memory budget of each device in GiB, for parameters, gradients, Adam's states and activations: one
            number, or one for each device of a pipeline in the order of the ranks. Rank 0 holds the last stage. ``"auto"``:
            nine tenths of the free memory. Planning fails if no partition fits. Default: no limit.
        compile: If True, modules that a stage calls as a whole, such as layers, are compiled by ``torch.compile`` when they
            first run. Not with schedules that split backward passes.
        shard_optimizer_state: If True, each replica keeps the optimizer state of its share of the parameters and updates them
            for the other replicas (ZeRO stage 1). If False, every replica keeps the whole state.
        process_group_backend: Backend of ``torch.distributed``. Default: nccl for CUDA devices, gloo for CPUs.
        start_method: How to start the other processes, unless ``torchrun`` or a cluster starts them. ``"popen"`` runs the
            script again for each process; ``"fork"`` copies the running process, for notebooks (on GPUs, only before CUDA is
            used); ``"spawn"`` starts new interpreters. ``"auto"``: ``"fork"`` in an interactive session, else ``"popen"``.
        gather_after_run: If True, every process holds the whole module on the CPU after a run; if False, only its stages'
            parameters. ``"auto"``: True if the memory of the machine has room for the copies.
        timeout: How long a rank waits for another before it raises an error: seconds, or a ``timedelta``.
        heartbeat_timeout: How long a rank may be silent before the others end the run: seconds, or a ``timedelta``. A rank is
            silent if its process is stopped or its machine is unreachable. ``None`` waits for ``timeout`` instead, as for a
            debugger that stops the whole process. The first run of a process decides.
        save_distributed_checkpoint: If True, a checkpoint is a folder into which each rank writes its part. If False, it is a
            single file as from one device, which ``torch.load`` reads; rank 0 gathers it, so its machine needs memory for the
            whole checkpoint. ``"auto"``: a file if that memory is free at a run's first save, else a folder, with a warning.
        async_save: If True, training continues while a checkpoint is written from a copy in CPU memory; rank 0 gathers a single
            file before. The next save, loading, and the end of training wait for it, and raise its error.
        record: Folder for a timeline of training steps 3 to 7, or a ``Recording`` that selects other steps. Loggers receive the
            idle time and the peak memory of these steps.
    """

    strategy_name = "fxpipe"

    @reads_options
    def __init__(
        self,
        num_stages: PositiveInt | Literal["auto"] = "auto",
        stages_per_rank: PositiveInt | Literal["auto"] = "auto",
        balance: BalanceName | Literal["auto"] = "parameters",
        split_points: list[str] | None = None,
        stage_of: dict[str, int] | None = None,
        device_speeds: list[PositiveFloat] | None = None,
        plan: PlanFile | PartitionPlan | None = None,
        schedule: ScheduleName | OwnTable = "auto",
        num_microbatches: PositiveInt | Literal["auto"] = "auto",
        batch_dim: int = 0,
        loss_reduction: LossReductionName = "auto",
        loss_weight: FunctionPath | Callable[[Any], Any] | None = None,
        activation_checkpointing: ActivationCheckpointing = False,
        device_memory_gib: PositiveFloat | list[PositiveFloat] | Literal["auto"] | None = None,
        compile: bool = False,
        shard_optimizer_state: bool = False,
        process_group_backend: str | None = None,
        start_method: StartMethod = "auto",
        gather_after_run: bool | Literal["auto"] = "auto",
        timeout: PositiveFloat | timedelta = 1800.0,
        heartbeat_timeout: PositiveFloat | timedelta | None = 120.0,
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
