"""``FxPipeStrategy``: Lightning's hooks, each a few lines that hand over to the modules above."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_fxpipe import checkpoint as checkpoints
from lightning_fxpipe._compat import (
    batch_counter,
    first_batch,
    init_process_group,
    rng_state,
    set_rank_zero_only,
    set_rng_state,
    subprocess_launcher,
)
from lightning_fxpipe.cost import canonical_fqns
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.failure import failures_reach_every_rank
from lightning_fxpipe.gradients import ParkedGradients, SharedParameters, clip_by_global_norm
from lightning_fxpipe.metrics import ResultChannel, replay
from lightning_fxpipe.microbatch import batch_size, default_num_microbatches, first_microbatch, merge_outputs
from lightning_fxpipe.plan import PartitionPlan
from lightning_fxpipe.planning import plan_region
from lightning_fxpipe.region import StepCall, find_region, holds_any, trains
from lightning_fxpipe.runtime import BatchResult, PipelineRuntime, Topology
from lightning_fxpipe.schedule import ScheduleName
from lightning_fxpipe.shard import drop_other_stages
from lightning_fxpipe.step import Step, StepKind
from lightning_fxpipe.support import check_optimizers, check_trainer, report_batch_norm
from lightning_fxpipe.trace import named_tensors

Broadcast = TypeVar("Broadcast")

_STEPS = {
    TrainerFn.FITTING: StepKind.TRAIN,
    TrainerFn.VALIDATING: StepKind.VALIDATE,
    TrainerFn.TESTING: StepKind.TEST,
    TrainerFn.PREDICTING: StepKind.PREDICT,
}


class FxPipeStrategy(ParallelStrategy):
    """Pipeline parallelism for an unmodified LightningModule.

    The call of the model inside the step is traced, cut into stages with equally many parameters, and each stage lives on a
    device and in a process of its own. Every batch is split into microbatches that flow through the stages.

    Args:
        num_stages: Number of stages, one for each device. ``"auto"``: as many as the Trainer has devices.
        num_microbatches: Microbatches that a batch is split into, along the first dimension of its tensors. ``"auto"``: four
            for each stage where the batch allows it.
        schedule: Order of forward and backward passes in training. ``"1f1b"`` keeps at most ``num_stages`` microbatches alive
            on a stage, and runs as ``"gpipe"`` for a batch with fewer microbatches than stages; ``"gpipe"`` keeps all alive.
        plan: Path of a plan saved as JSON (``python -m lightning_fxpipe plan``, ``PartitionPlan.save``), or a plan object; it
            then decides which stage holds what.
        process_group_backend: Backend of ``torch.distributed``. Default: nccl for CUDA devices, gloo for CPUs.
        timeout_seconds: Seconds after which a rank that waits for another gives up.
    """

    strategy_name = "fxpipe"

    def __init__(
        self,
        num_stages: int | Literal["auto"] = "auto",
        num_microbatches: int | Literal["auto"] = "auto",
        schedule: ScheduleName = "1f1b",
        plan: str | Path | PartitionPlan | None = None,
        process_group_backend: str | None = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        super().__init__()
        for name, value in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
            if value != "auto" and (not isinstance(value, int) or value < 1):
                raise ValueError(f"FxPipeStrategy({name}={value!r}): expected a positive number or 'auto'")
        if schedule not in ("gpipe", "1f1b"):
            raise ValueError(f"FxPipeStrategy(schedule={schedule!r}): expected 'gpipe' or '1f1b'")
        self.num_nodes = 1
        self._num_stages = num_stages
        self._num_microbatches = None if num_microbatches == "auto" else num_microbatches
        self._schedule: ScheduleName = schedule
        self._given_plan = PartitionPlan.load(plan) if isinstance(plan, (str, Path)) else plan
        self._backend = process_group_backend
        self._timeout = timedelta(seconds=timeout_seconds)
        self._seed = 0
        self._topology: Topology | None = None
        self._plan: PartitionPlan | None = None
        self._planned_module: nn.Module | None = None
        self._runtime: PipelineRuntime | None = None
        self._shared: SharedParameters | None = None
        self._channel: ResultChannel | None = None
        self._parked = ParkedGradients()
        self._group_fqns: list[checkpoints.GroupFQNs] = []

    # ------------------------------------------------------------------ environment

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
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
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False

    @property
    def plan(self) -> PartitionPlan:
        """The plan in use, after setup."""
        if self._plan is None:
            raise RuntimeError("The partition plan is made in the strategy's setup; it is not there before.")
        return self._plan

    @property
    def topology(self) -> Topology:
        """This rank's place in its pipeline, once processes have started."""
        if self._topology is None:
            raise RuntimeError("The process groups are made in the strategy's setup_environment; they are not there before.")
        return self._topology

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = subprocess_launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._set_world_ranks(self.cluster_environment)
        init_process_group(self.cluster_environment, self._backend, self.root_device, self._timeout)
        if self._topology is None:
            self._topology = self._make_topology()
            self._channel = ResultChannel(self._topology.control_group, source=0)
        # Lock step: samplers and user code must draw the same numbers on all ranks, seeded or not.
        self._seed, state = self.broadcast((torch.initial_seed(), rng_state()))
        if not self.is_global_zero:
            set_rng_state({key: value for key, value in state.items() if key != "cuda"})

    def _set_world_ranks(self, environment: ClusterEnvironment | None) -> None:
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
        set_rank_zero_only(self.global_rank)

    def _make_topology(self) -> Topology:
        """The last stage lives on rank 0, where progress bar and loggers are, so ranks hold the stages in reverse order."""
        ranks = list(reversed(range(self.world_size)))
        group = dist.new_group(ranks, sort_ranks=False)
        on_cpu = dist.get_backend() == "gloo"
        control = group if on_cpu else dist.new_group(ranks, sort_ranks=False, backend="gloo")
        return Topology(
            group=group,
            control_group=control,
            stage_index=dist.get_rank(group),
            num_stages=self.world_size,
            device=self.root_device,
        )

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            dist.barrier()

    @override
    def broadcast(self, obj: Broadcast, src: int = 0) -> Broadcast:
        if not dist.is_initialized():
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
        if not dist.is_initialized():
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
        # Lightning would seed the workers by global rank; the ranks of a pipeline must load the same data.
        if getattr(dataloader, "worker_init_fn", self) is None:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=0)  # type: ignore[attr-defined]
        return dataloader

    # ------------------------------------------------------------------ setup

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        check_trainer(trainer, self.lightning_module)
        # Lightning advises `sync_dist=True` where several processes log; these log the same values.
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True\)`")
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        with failures_reach_every_rank():
            self._shard_once(trainer)
        if trainer.state.fn is TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        # Lightning clips by the norm of the parameters that it sees; they are one stage's.
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        self.barrier("setup")

    def _shard_once(self, trainer: Trainer) -> None:
        """Plans the stages and drops what other ranks hold, when the module is first seen."""
        module = self.lightning_module
        assert module is not None
        if self._planned_module is module:
            return
        plan = self._make_plan(trainer, module)
        topology = self.topology
        drop_other_stages(module, plan, topology.stage_index, self.root_device)
        for metric in (child for child in module.modules() if isinstance(child, Metric)):
            metric.to(self.root_device)
        self._shared = _share_parameters(module, plan, topology)
        self._plan, self._planned_module = plan, module
        self._runtime = PipelineRuntime(
            module, plan, topology, num_microbatches=self._num_microbatches, schedule=self._schedule
        )
        rank_zero_info(f"\n{plan}\n")
        report_batch_norm(module, self._num_microbatches)

    def _make_plan(self, trainer: Trainer, module: nn.Module) -> PartitionPlan:
        num_stages = self.topology.num_stages
        _check_num_stages(self._num_stages, num_stages)
        if self._given_plan is not None:
            self._given_plan.check_fits({fqn: tuple(p.shape) for fqn, p in module.named_parameters()})
            _check_num_stages(self._given_plan.num_stages, num_stages)
            return self._given_plan
        assert trainer.state.fn is not None
        kind = _STEPS[trainer.state.fn]
        batch = first_batch(trainer)
        if batch is None:
            raise UnsupportedError(
                "There is no batch to trace the model with.",
                observed="no dataloader is defined for this run",
                expected="a dataloader, or a plan made before",
                todo="Pass a dataloader, or FxPipeStrategy(plan=...).",
            )
        count = self._num_microbatches or default_num_microbatches(batch_size(batch), num_stages)
        microbatch, size = first_microbatch(batch, count)
        training = kind is StepKind.TRAIN
        with self._context(kind), torch.set_grad_enabled(training):
            call = StepCall.of_step(getattr(module, kind.value), microbatch)
            region = find_region(module, call, batch_size=size, is_region=trains if training else holds_any)
            plan = plan_region(module, region, num_stages=num_stages, device=self.root_device)
        # Rank 0's plan holds for all: ranks that cut differently would never find each other.
        return self.broadcast(plan)

    @override
    def model_to_device(self) -> None:
        """Nothing to do: sharding has moved each rank's stage to its device."""

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self.optimizers, self.lr_scheduler_configs = [], []
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        check_optimizers(self.optimizers)
        self._group_fqns = [checkpoints.group_fqns(self.lightning_module, optimizer) for optimizer in self.optimizers]
        for optimizer in self.optimizers:
            checkpoints.keep_local_parameters(optimizer)

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        assert self._shared is not None
        parameters = self.precision_plugin.main_params(optimizer)
        clip_by_global_norm(parameters, clip_val, self._shared, self.topology.control_group)

    @override
    def teardown(self) -> None:
        # Not the base class's, which moves the module to the CPU: placeholders cannot be moved.
        assert self.cluster_environment is not None and self.accelerator is not None
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # ------------------------------------------------------------------ steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._shared is not None and self.lightning_module is not None
        trainable = [parameter for parameter in self.lightning_module.parameters() if not parameter.is_meta]
        with self._parked.collect(trainable):
            result = self._run(StepKind.TRAIN, *args, **kwargs)
            self._shared.sum_gradients()
        assert result.loss is not None
        loss = torch.tensor(result.loss, dtype=torch.get_default_dtype(), device=self.root_device)
        output = merge_outputs(result.outputs, result.sizes) if result.outputs else None
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        # The schedule has run backward; what is left are the hooks around it and the gradients' appearance between them.
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self._parked.install()
        return self.precision_plugin.post_backward(closure_loss, self.lightning_module)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(StepKind.VALIDATE, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(StepKind.TEST, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(StepKind.PREDICT, *args, **kwargs)

    def _evaluate(self, kind: StepKind, *args: Any, **kwargs: Any) -> Any:
        result = self._run(kind, *args, **kwargs)
        return merge_outputs(result.outputs, result.sizes) if result.outputs else None

    def _run(self, kind: StepKind, batch: Any, *rest: Any, **kwargs: Any) -> BatchResult:
        """Runs one batch and repeats on every rank what the last stage logged."""
        module, trainer = self.lightning_module, self.lightning_module.trainer  # type: ignore[union-attr]
        assert self._runtime is not None and self._channel is not None and module is not None
        step = Step(
            kind=kind,
            function=partial(getattr(module, kind.value), **kwargs) if kwargs else getattr(module, kind.value),
            rest=rest,
            context=partial(self._context, kind),
            random_key=(self._seed, kind.value, batch_counter(trainer, kind.value), *(r for r in rest if isinstance(r, int))),
            num_accumulated=trainer.accumulate_grad_batches if kind is StepKind.TRAIN else 1,
        )
        with failures_reach_every_rank():
            result = self._runtime.run(step, batch)
            loss, entries = self._channel.share(result.loss, result.entries)
        replay(module, entries, self.root_device)
        return dataclasses.replace(result, loss=loss, entries=entries)

    def _context(self, kind: StepKind) -> AbstractContextManager[Any]:
        plugin = self.precision_plugin
        contexts = {
            StepKind.TRAIN: plugin.train_step_context,
            StepKind.VALIDATE: plugin.val_step_context,
            StepKind.TEST: plugin.test_step_context,
            StepKind.PREDICT: plugin.predict_step_context,
        }
        return contexts[kind]()

    # ------------------------------------------------------------------ checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return checkpoints.module_state(self.lightning_module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.lightning_module is not None
        inner = getattr(optimizer, "optimizer", optimizer)  # Lightning passes its wrapper
        return checkpoints.optimizer_state(self.lightning_module, inner, self._group_fqns[self.optimizers.index(inner)])

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise TypeError("FxPipeStrategy writes checkpoint folders itself and takes no storage_options.")
        checkpoint["lightning_fxpipe"] = {"plan": dataclasses.asdict(self.plan), "rng": checkpoints.portable_rng(rng_state())}
        checkpoints.save_folder(Path(self.broadcast(filepath)), checkpoint)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        path = Path(self.broadcast(checkpoint_path))
        fitting = module.trainer.state.fn is TrainerFn.FITTING
        load = checkpoints.load_folder if path.is_dir() else checkpoints.load_file
        optimizers = list(zip(self.optimizers, self._group_fqns, strict=True)) if fitting else []
        checkpoint = load(path, module, optimizers, strict=module.strict_loading, weights_only=weights_only)
        own = checkpoint.get("lightning_fxpipe")
        if own is not None and fitting:
            set_rng_state(checkpoints.usable_rng(own["rng"]))
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing to do: :meth:`load_checkpoint` has loaded it."""

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing to do: :meth:`load_checkpoint` has loaded it."""


def _check_num_stages(num_stages: int | str, num_devices: int) -> None:
    if num_stages not in ("auto", num_devices):
        more = "more" if isinstance(num_stages, int) and num_devices > num_stages else "fewer"
        raise UnsupportedError(
            f"There are {more} devices than stages.",
            observed=f"{num_stages} stages and {num_devices} devices",
            expected="one stage for each device",
            todo=f"Set Trainer(devices={num_stages}), or num_stages={num_devices}"
            " (a plan made for another number of stages must be made again).",
        )


def _share_parameters(module: nn.Module, plan: PartitionPlan, topology: Topology) -> SharedParameters:
    """Finds the parameters that several stages hold, and makes what every rank holds equal on all."""
    world_size = topology.num_stages
    copies = []
    for fqn, parameter in module.named_parameters():
        stages = plan.stages_of(fqn)
        if len(stages) > 1:
            ranks = tuple(world_size - 1 - stage for stage in stages)
            copies.append((ranks, parameter if topology.stage_index in stages else None))
    shared = SharedParameters(copies)
    names = canonical_fqns(module)
    for _, _, fqn, tensor in named_tensors(module):
        if world_size > 1 and fqn == names[fqn] and not plan.stages_of(fqn):
            dist.broadcast(tensor.data, src=0)
    return shared
