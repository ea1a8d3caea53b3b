"""``FxPipeStrategy``: Lightning's hooks, each a few lines that hand over to the modules above."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fxpipe._compat_lightning import (
    SkippedBatch,
    allow_skipped_batches,
    batch_counter,
    init_process_group,
    set_rank_zero_only,
    share_sigterm,
)
from lightning_fxpipe.checkpointhooks import CheckpointHooks, origin
from lightning_fxpipe.checkpointstrategy import CheckpointStrategy
from lightning_fxpipe.failure import begin_run, end_run, has_failed, noted_connections, terminate_together
from lightning_fxpipe.launching import StartMethod, check_start_method, make_launcher, resolved
from lightning_fxpipe.loading import in_step
from lightning_fxpipe.materialise import Constructions
from lightning_fxpipe.messages import inform
from lightning_fxpipe.metricstates import one_replica
from lightning_fxpipe.optimizers import StageOptimizer
from lightning_fxpipe.options import FunctionPath, PlanFile, PositiveFloat, PositiveInt, check_options
from lightning_fxpipe.plan import PartitionPlan
from lightning_fxpipe.precision import PipelinePrecision, step_context
from lightning_fxpipe.rng import rng_state, set_rng_state
from lightning_fxpipe.runplan import PlanOptions, RunPlans
from lightning_fxpipe.saving import Saver
from lightning_fxpipe.schedule import ScheduleName
from lightning_fxpipe.session import Session, init_context, materials_of
from lightning_fxpipe.sparing import Sparing
from lightning_fxpipe.step import Step, StepKind
from lightning_fxpipe.support import check_converted, check_optimizers, check_torch, check_trainer, report_plan
from lightning_fxpipe.topology import Topology, make_group, make_topology
from lightning_fxpipe.weighting import LossOptions, LossReductionName

Broadcast = TypeVar("Broadcast")


class FxPipeStrategy(CheckpointStrategy):
    """Pipeline parallelism for an unmodified LightningModule.

    The call of the model inside the step is traced, cut into stages with equally many parameters, and each stage lives on a
    device and in a process of its own. Every batch is split into microbatches that flow through the stages.

    Args:
        num_stages: Number of stages, one for each device. ``"auto"``: as many as the Trainer has devices.
        num_microbatches: Microbatches that a batch is split into, along the first dimension of its tensors. ``"auto"``: four
            for each stage where the batch allows it.
        schedule: Order of forward and backward passes in training. ``"gpipe"`` runs all microbatches forward, the rest of the
            step once on the whole batch, and then all backward: any loss is exact. ``"1f1b"`` keeps at most ``num_stages``
            microbatches alive on a stage; the rest of the step runs for each microbatch, too, and the loss must be a sum over
            microbatches, which is checked. ``"auto"`` is ``"gpipe"``.
        plan: Path of a plan saved as JSON (``python -m lightning_fxpipe plan``, ``PartitionPlan.save``), or a plan object; it
            then decides which stage holds what.
        loss_reduction: For ``"1f1b"``: what the loss is over the samples of a batch, ``"mean"``, ``"sum"``, or ``"auto"`` to
            find out on the first training batch.
        loss_weight: For ``"1f1b"``: a function, or its import path, that gives the weight of a batch in a mean over something
            else than samples, such as its number of tokens that are not padding.
        batch_dim: Dimension of the batch's tensors that is the batch; tensors with fewer dimensions have it first.
        process_group_backend: Backend of ``torch.distributed``. Default: nccl for CUDA devices, gloo for CPUs.
        timeout_seconds: Seconds after which a rank that waits for another gives up.
        start_method: How the other processes start where no ``torchrun`` or cluster has started them. ``"popen"`` runs the
            script once more for each, ``"fork"`` copies the running process (for notebooks; on GPUs only before CUDA is used),
            ``"spawn"`` starts new ones. ``"auto"``: ``"fork"`` in an interactive session, else ``"popen"``.
        gather_after_run: Whether every process has the whole module once ``fit``, ``validate``, ``test`` or ``predict`` has
            returned, on the CPU, to call, save or move it as after a run on one device. Without, each process keeps the
            parameters of its stage only. ``"auto"``: where the machine's memory has room for the copies.
        save_distributed_checkpoint: Whether a checkpoint is a folder, into which each rank writes its part. Without, it is one
            file as of one device: rank 0 gets the others' parts, so its machine needs the memory for all of it.
        async_save: Whether training goes on while a checkpoint is written, from a copy in the CPU's memory. The next one,
            loading and the end of the run wait for it, and raise what it failed with.
    """

    strategy_name = "fxpipe"

    def __init__(
        self,
        num_stages: PositiveInt | Literal["auto"] = "auto",
        num_microbatches: PositiveInt | Literal["auto"] = "auto",
        schedule: ScheduleName = "auto",
        plan: PlanFile | PartitionPlan | None = None,
        loss_reduction: LossReductionName = "auto",
        loss_weight: FunctionPath | Callable[[Any], Any] | None = None,
        batch_dim: int = 0,
        process_group_backend: str | None = None,
        timeout_seconds: PositiveFloat = 1800.0,
        start_method: StartMethod = "auto",
        gather_after_run: bool | Literal["auto"] = "auto",
        save_distributed_checkpoint: bool = True,
        async_save: bool = False,
    ) -> None:
        super().__init__(Saver(partial(_saving_group, timedelta(seconds=timeout_seconds))))
        check_options(num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule, batch_dim=batch_dim)
        self.num_nodes = 1
        self._num_microbatches = None if num_microbatches == "auto" else num_microbatches
        self._schedule: ScheduleName = schedule
        self._plans = RunPlans(
            PlanOptions(
                given=PartitionPlan.load(plan) if isinstance(plan, (str, Path)) else plan,
                num_stages=num_stages,
                num_microbatches=self._num_microbatches,
                batch_dim=batch_dim,
            )
        )
        self._loss = LossOptions.of(loss_reduction, loss_weight)
        if self._loss != LossOptions() and schedule != "1f1b":
            warnings.warn(
                'loss_reduction and loss_weight are for schedule="1f1b" only, and do nothing here: the loss is that of the '
                "whole batch, whatever it is.",
                stacklevel=2,
            )
        self._backend = process_group_backend
        self._timeout = timedelta(seconds=timeout_seconds)
        check_start_method(start_method)
        self._start_method: StartMethod = start_method
        self._gather_after_run: bool | Literal["auto"] = gather_after_run
        self._save_distributed_checkpoint = save_distributed_checkpoint
        self._async_save = async_save
        self._topology: Topology | None = None
        self._session: Session | None = None
        self._precision: PipelinePrecision | None = None
        self._stage_optimizers: list[StageOptimizer] = []
        self._patches = ExitStack()
        self._constructions = Constructions()

    # ------------------------------------------------------------------ environment

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this machine, one for each device."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Whether data is distributed, which is what Lightning asks this for: all ranks of one pipeline get the same."""
        return False

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # a rank loads only what its stage holds, which setup decides

    @property
    def plan(self) -> PartitionPlan:
        """The plan in use, after setup."""
        return self.session.plan

    @property
    def session(self) -> Session:
        """The module in its pipeline, after setup."""
        if self._session is None:
            raise RuntimeError("The module is split in the strategy's setup; nothing is there before.")
        return self._session

    @property
    def topology(self) -> Topology:
        """This rank's place in its pipeline, once processes have started."""
        if self._topology is None:
            raise RuntimeError("The process groups are made in the strategy's setup_environment; they are not there before.")
        return self._topology

    @property
    def module(self) -> Any:
        """The user's LightningModule, once the Trainer has connected it."""
        assert self.lightning_module is not None
        return self.lightning_module

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        check_torch(self.num_nodes * self.num_processes)
        starts_none = self.cluster_environment.creates_processes_externally or self.num_nodes * self.num_processes == 1
        method = None if starts_none else resolved(self._start_method)
        self._launcher = make_launcher(self, method, gathers=self._gather_after_run is not False)
        if method not in (None, "popen"):
            self._gather_after_run = True  # the processes end with the run

    def set_world_ranks(self) -> None:
        """Tells the environment this process's rank; the Trainer calls it as soon as it is made, and every run again."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        set_rank_zero_only(self.global_rank)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.cluster_environment is not None
        self.set_world_ranks()
        start = partial(init_process_group, self.cluster_environment, self._backend, self.root_device, self._timeout)
        begin_run(start, self.broadcast, self.cluster_environment.main_address)
        if self._topology is None:
            with noted_connections():
                self._topology = make_topology(self.root_device)
            self._sparing = Sparing(self._topology, inform)
        # Lock step: samplers and user code must draw the same numbers on all ranks, seeded or not.
        self._seed, state = self.broadcast((torch.initial_seed(), rng_state()))
        if not self.is_global_zero:
            set_rng_state({key: value for key, value in state.items() if key != "cuda"})

    @property
    def _others_answer(self) -> bool:
        """Whether there are other ranks, and they have not been told that the run has failed."""
        return dist.is_initialized() and not has_failed()

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._others_answer:
            dist.barrier()

    @override
    def broadcast(self, obj: Broadcast, src: int = 0) -> Broadcast:
        if not self._others_answer:
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        """The value itself: the ranks of one pipeline are one data-parallel replica, and all have the same."""
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if not self._others_answer:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return int(votes) == self.world_size if all else int(votes) > 0

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """The tensor itself, as on one device."""
        return tensor

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = in_step(dataloader, self._sparing)
        # Lightning would seed the workers by global rank; the ranks of a pipeline must load the same data.
        if int(os.environ.get("PL_SEED_WORKERS", 0)) and getattr(dataloader, "worker_init_fn", self) is None:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=0)  # type: ignore[attr-defined]
        return dataloader

    # ------------------------------------------------------------------ setup

    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Any:
        return init_context(self._constructions, self.precision_plugin, self.lightning_module, self.root_device, empty_init)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        terminate_together(partial(share_sigterm, trainer))
        self._patches.close()  # where a run before this one ended without a teardown
        self._patches.enter_context(one_replica())
        check_trainer(trainer, self.module)
        # Lightning advises `sync_dist=True` where several processes log; these log the same values.
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True\)`")
        with self._constructions.changing(self.module):
            self.model = check_converted(self.precision_plugin.convert_module(self.module), self.module)
        if self._session is None or self._session.module is not self.module or not self._session.is_split:
            self._split(trainer)
        self.session.prepare(trainer)
        if trainer.state.fn is TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            allow_skipped_batches(trainer)
        checkpoints = CheckpointHooks(
            self.session,
            self.topology,
            self._stage_optimizers,
            self._saver,
            origin=origin(schedule=self._schedule, num_microbatches=self._num_microbatches),
            as_folder=self._save_distributed_checkpoint,
            in_background=self._async_save,
        )
        self._patches.enter_context(self._begin_saving(trainer, checkpoints))
        self.setup_precision_plugin()
        self._detach_precision()
        self._precision = PipelinePrecision(
            self.precision_plugin, self.topology.control_group, self._clip_grad_by_norm, self.session.hooks.outside
        )
        self.barrier("setup")

    def _split(self, trainer: Trainer) -> None:
        """Begins a session. After the module's last run with this strategy the plan holds on, where it fits."""
        materials = materials_of(self._constructions, self.module)
        with noted_connections():
            plan = self._plans.known(trainer, self.module)
            if plan is None:
                made = self._plans.make(
                    trainer,
                    self.module,
                    num_stages=self.topology.num_stages,
                    device=self.root_device,
                    context=partial(step_context, self.precision_plugin),
                )
                # Rank 0's plan holds for all: ranks that cut differently would never find each other.
                plan = self.broadcast(made)
                report_plan(plan, self.module, self._num_microbatches)
            self._session = Session(
                self.module,
                plan,
                self.topology,
                num_microbatches=self._num_microbatches,
                schedule=self._schedule,
                loss=self._loss,
                sparing=self._sparing,
                materials=materials,
            )

    @override
    def model_to_device(self) -> None:
        """Nothing to do: the session has moved this rank's stage to its device."""

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self.optimizers, self.lr_scheduler_configs = [], []
        super().setup_optimizers(trainer)
        check_optimizers(self.optimizers, self.topology.num_stages)
        self._stage_optimizers = [StageOptimizer(self.module, optimizer) for optimizer in self.optimizers]
        for optimizer in self._stage_optimizers if trainer.checkpoint_callbacks else ():
            optimizer.check_savable()
        self.session.hooks.follow(self._stage_optimizers)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        with self.session.hooks.suspended():
            self.session.clip_gradients(self.precision_plugin.main_params(optimizer), clip_val)

    def _detach_precision(self) -> None:
        if self._precision is not None:
            self._precision.detach()
            self._precision = None

    @override
    def teardown(self) -> None:
        # Not the base class's, which moves the module to the CPU: placeholders cannot be moved.
        assert self.cluster_environment is not None and self.accelerator is not None
        self._end_saving()
        self._detach_precision()
        self._patches.close()
        if self._session is not None:
            self._session.end_run(self._stage_optimizers, num_copies=self.num_processes, gathers=self._gather_after_run)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        end_run()

    # ------------------------------------------------------------------ steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._has_trained = True
        with self.session.hooks.suspended():
            output = self.session.train(self._step(StepKind.TRAIN, args[1:], kwargs), args[0])
        return SkippedBatch() if output is None else output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        with self.session.hooks.suspended():
            plugin, module = self.precision_plugin, self.module
            loss: Tensor = plugin.pre_backward(closure_loss, module)
            self.session.backward(
                lambda: plugin.backward(loss, module, optimizer, *args, **kwargs), retains=bool(kwargs.get("retain_graph"))
            )
            return plugin.post_backward(loss, module)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.session.hooks.suspended():
            return super().optimizer_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(StepKind.VALIDATE, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(StepKind.TEST, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(StepKind.PREDICT, args, kwargs)

    @override
    def on_validation_end(self) -> None:
        self.session.end_evaluation()

    @override
    def on_test_end(self) -> None:
        self.session.end_evaluation()

    @override
    def on_predict_end(self) -> None:
        self.session.end_evaluation()

    def _evaluate(self, kind: StepKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.session.hooks.suspended():
            return self.session.evaluate(self._step(kind, args[1:], kwargs), args[0])

    def _step(self, kind: StepKind, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        """Lightning's call of one of the module's steps, without the batch."""
        trainer = self.module.trainer
        function = getattr(self.module, kind.value)
        return Step(
            kind=kind,
            function=partial(function, **kwargs) if kwargs else function,
            rest=rest,
            context=partial(step_context, self.precision_plugin, kind),
            random_key=(self._seed, kind.value, batch_counter(trainer, kind.value), *(r for r in rest if isinstance(r, int))),
            scale=self._precision.scale / trainer.accumulate_grad_batches
            if kind is StepKind.TRAIN and self._precision
            else 1.0,
        )


def _saving_group(timeout: timedelta) -> dist.ProcessGroup | None:
    with noted_connections():
        return make_group(timeout)
