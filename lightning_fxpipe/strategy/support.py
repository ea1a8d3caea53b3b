"""Refusals, before the first step, of features that a pipeline cannot honour yet, with the reason and the way out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from fsspec.utils import get_protocol
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.plugins import BitsandbytesPrecision, Precision, TransformerEnginePrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer

from lightning_fxpipe._compat.lightning import has_no_optimizer, syncs_batch_norm, takes_loader, validates_by_time
from lightning_fxpipe._compat.roots import in_all_roots, of_root, root_name
from lightning_fxpipe.distributed.topology import Placement, Replicas, Topology
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.metrics.metric_calls import held_metrics
from lightning_fxpipe.microbatch.batch_norms import batch_norms
from lightning_fxpipe.optim.coupling import couples_parameters
from lightning_fxpipe.optim.optimizers import StageOptimizer
from lightning_fxpipe.optim.shards import Shards
from lightning_fxpipe.optim.twins import CannotTryError
from lightning_fxpipe.reporting.messages import warn
from lightning_fxpipe.schedules.by_name import Schedule


def placement_for(
    num_devices: int, schedule: Schedule, *, num_stages: int | Literal["auto"], stages_per_rank: int | Literal["auto"]
) -> Placement:
    """Which rank of a pipeline has which stages. Fewer stages than the devices have room for make several pipelines: replicas.

    Args:
        num_devices: Devices of all replicas.
        schedule: How batches go through the stages.
        num_stages: Of a pipeline, as the user or a given plan says.
        stages_per_rank: As the user says.

    Raises:
        UnsupportedError: The stages cannot be as many on each device, or not with this schedule.
    """
    table = schedule.table
    if table is not None and num_devices % table.num_ranks:
        raise UnsupportedError(
            "The schedule table is for a different number of devices.",
            where=schedule.name,
            observed=f"{table.num_ranks} lines and {num_devices} devices",
            expected="one line per device of a pipeline",
            todo=f"Set Trainer(devices={table.num_ranks}) or a multiple of it, or use a table for {num_devices} devices.",
        )
    if num_stages == "auto":
        count = schedule.stages_per_rank if stages_per_rank == "auto" else stages_per_rank
        num_ranks = num_devices if table is None else table.num_ranks
    else:
        count = _stages_on_each(num_stages, num_devices, schedule, stages_per_rank)
        num_ranks, rest = divmod(num_stages, count)
        if rest or num_devices % num_ranks:
            raise _not_placed(num_stages, stages_per_rank, num_devices)
    if schedule.is_fixed and count != schedule.stages_per_rank:
        raise UnsupportedError(
            f"The schedule {schedule.name!r} does not support this number of stages per device.",
            observed=f"{count * num_ranks} stages and {num_devices} devices",
            expected=f"{schedule.stages_per_rank} per device",
            todo=f"Set num_stages={schedule.stages_per_rank * num_devices}, omit it, or use another schedule. A plan for a "
            "different number of stages must be made again.",
        )
    return Placement(num_ranks=num_ranks, stages_per_rank=count, is_v=schedule.is_v)


def _stages_on_each(num_stages: int, num_devices: int, schedule: Schedule, wanted: int | Literal["auto"]) -> int:
    """How many of a number of stages are on one device: as many as it takes for all devices to be one pipeline, unless the user
    or the schedule says otherwise.
    """
    if wanted != "auto":
        return wanted
    of_one_pipeline = max(1, num_stages // num_devices)
    num_ranks, rest = divmod(num_stages, schedule.stages_per_rank)
    makes_replicas = not rest and num_ranks > 1 and num_devices % num_ranks == 0
    return schedule.stages_per_rank if schedule.is_fixed and makes_replicas else of_one_pipeline


def _not_placed(num_stages: int, stages_per_rank: int | str, num_devices: int) -> UnsupportedError:
    if isinstance(stages_per_rank, int):
        return UnsupportedError(
            "num_stages and stages_per_rank contradict each other.",
            observed=f"num_stages={num_stages} and stages_per_rank={stages_per_rank} on {num_devices} devices",
            expected=f"num_stages={stages_per_rank * num_devices} with that many stages per device, or fewer with several "
            "replicas",
            todo="Omit one of the two. A given plan determines the number of stages.",
        )
    return UnsupportedError(
        "The stages cannot be distributed evenly over the devices.",
        observed=f"{num_stages} stages and {num_devices} devices",
        expected="the same number of stages on each device, or a whole number of replicas with one device per stage",
        todo=f"Set Trainer(devices={num_stages}) or a multiple of it, or set num_stages={num_devices} or a multiple of it. A "
        "plan for a different number of stages must be made again.",
    )


def check_batch_dim(batch_dim: int, of_plan: int) -> None:
    """Raises :class:`UnsupportedError` where a given plan was made for another dimension; the default goes with any."""
    if batch_dim not in (0, of_plan):
        raise UnsupportedError(
            "The plan was made for a different batch dimension.",
            observed=f"FxPipeStrategy(batch_dim={batch_dim}) and a plan with batch_dim={of_plan}",
            todo="Make the plan again with that batch_dim, or omit the option.",
        )


def check_has_batch(batch: Any) -> Any:
    """The batch; raises :class:`UnsupportedError` where there is none to trace the model with."""
    if batch is None:
        raise UnsupportedError(
            "No batch is available to trace the model.",
            observed="no dataloader is defined for this run",
            expected="a dataloader or an existing plan",
            todo="Pass a dataloader, or set FxPipeStrategy(plan=...).",
        )
    return batch


def check_sampler(loader: Any, replicas: Replicas) -> None:
    """Raises :class:`UnsupportedError` where a dataloader's sampler shares the samples out to others than the replicas."""
    samplers = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    for sampler in (*samplers, getattr(samplers[1], "sampler", None)):
        count, index = getattr(sampler, "num_replicas", 1), getattr(sampler, "rank", replicas.index)
        if isinstance(count, int) and count > 1 and (count, index) != (replicas.count, replicas.index):
            raise UnsupportedError(
                "A dataloader yields different samples on each process, but the processes of a pipeline need the same batch.",
                where=type(loader).__name__,
                observed=f"a {type(sampler).__name__} with num_replicas={count} and rank={index}",
                expected=f"a sampler for replica {replicas.index} of {replicas.count}"
                if replicas.are_several
                else "a sampler for one replica",
                todo="Remove the sampler, create it in train_dataloader (val_dataloader, ...), where its defaults refer to "
                f"replicas, or pass num_replicas={replicas.count} and rank={replicas.index} of this replica.",
            )


def seeded_alike(loader: Any, replicas: Replicas) -> Any:
    """The loader, whose workers draw the same numbers on every rank of a pipeline, where Lightning would seed them by the
    global rank.
    """
    if int(os.environ.get("PL_SEED_WORKERS", 0)) and getattr(loader, "worker_init_fn", loader) is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=replicas.index)
    return loader


def check_one_root(trainer: Trainer, module: LightningModule) -> None:
    """Raises :class:`UnsupportedError` where objects of ``lightning`` and of ``pytorch_lightning`` come together."""
    expected = root_name(trainer)
    things = [trainer.strategy, module, getattr(trainer, "datamodule", None), *getattr(trainer, "callbacks", ())]
    other_classes = [type(thing).__name__ for thing in things if root_name(thing) not in (None, expected)]
    if other_classes:
        other = "lightning" if expected == "pytorch_lightning" else "pytorch_lightning"
        raise UnsupportedError(
            "The run mixes `lightning` and `pytorch_lightning`, whose classes are incompatible.",
            observed=f"a Trainer of {expected} and {', '.join(other_classes)} of {other}",
            todo=f"Import all of them from one of the two packages. The strategy for {expected} is strategy='fxpipe'"
            + (", or lightning_fxpipe.pl.FxPipeStrategy." if expected == "pytorch_lightning" else ", or FxPipeStrategy."),
        )


def check_trainer(trainer: Trainer, module: LightningModule) -> None:
    """Raises :class:`UnsupportedError` with everything in this run that a pipeline cannot honour."""
    check_one_root(trainer, module)
    faults = [*_module_faults(module), *_trainer_faults(trainer), *_step_faults(trainer, module)]
    if faults:
        raise UnsupportedError(
            "strategy='fxpipe' does not support this configuration.",
            where=type(module).__name__,
            observed="; ".join(observed for observed, _ in faults),
            todo="; ".join(todo for _, todo in faults),
        )


def check_converted(converted: nn.Module, module: nn.Module) -> nn.Module:
    """The module after its conversion by the precision plugin; raises :class:`UnsupportedError` if that made another one."""
    if converted is not module:
        raise UnsupportedError(
            "The precision plugin replaces the LightningModule with another module.",
            where="convert_module",
            observed=f"a {type(converted).__name__}",
            expected="the same module, with other dtypes or layers",
            todo="Convert the module in place.",
        )
    return module


def check_optimizers(optimizers: Sequence[Optimizer], num_stages: int) -> list[Optimizer]:
    """The optimizers that a stage cannot step without the others' parameters, of which the user is told.

    Raises:
        UnsupportedError: There is none, or one of which that cannot be found out.
    """
    if not optimizers:
        raise UnsupportedError(
            "configure_optimizers returned no optimizer.",
            where="configure_optimizers",
            observed="an empty list",
            todo="Return an optimizer, or None if the step trains nothing.",
        )
    coupled = [optimizer for optimizer in optimizers if num_stages > 1 and _is_coupled(optimizer)]
    for name in dict.fromkeys(type(optimizer).__name__ for optimizer in coupled):
        warn(
            f"{name} needs all parameters at once, so every rank steps it for the whole model: each step gathers the other "
            "stages' parameters and gradients on each rank, and every rank stores the full optimizer state. An optimizer that "
            "treats each parameter separately, such as AdamW, needs only a stage's share."
        )
    return coupled


def stage_optimizers(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    topology: Topology,
    *,
    dropped: Mapping[int, Tensor],
    shards: bool,
    is_saved: bool,
) -> list[StageOptimizer]:
    """The optimizers over this rank's parameters. Called by every rank.

    Args:
        module: The module, in stages.
        optimizers: The Trainer's, in a run that trains.
        topology: This rank's place.
        dropped: As for :class:`StageOptimizer`.
        shards: Whether replicas share them out.
        is_saved: Whether checkpoints are written.

    Raises:
        UnsupportedError: One cannot train a stage, or cannot be saved.
    """
    if optimizers and has_no_optimizer(optimizers):
        return []
    shards = shards and topology.replicas.are_several
    coupled = {id(optimizer) for optimizer in check_optimizers(optimizers, topology.num_ranks)}
    whole = coupled
    if shards:
        whole = {id(one) for one in optimizers if id(one) in coupled or (topology.num_ranks == 1 and _is_coupled(one))}
        for name in dict.fromkeys(type(one).__name__ for one in optimizers if id(one) in whole):
            warn(
                f"shard_optimizer_state=True has no effect for {name}: it needs all parameters at once, so every replica "
                "keeps the full optimizer state."
            )
    found = [
        StageOptimizer(
            module,
            one,
            dropped,
            is_coupled=id(one) in coupled,
            shards=Shards(one, topology.replicas) if shards and id(one) not in whole else None,
        )
        for one in optimizers
    ]
    for optimizer in found:
        optimizer.spread_states(topology)
        if is_saved:
            optimizer.check_savable()
    return found


def _is_coupled(optimizer: Optimizer) -> bool:
    if isinstance(optimizer, LBFGS):
        return True
    try:
        return couples_parameters(optimizer)
    except CannotTryError as error:
        raise UnsupportedError(
            "The optimizer cannot be verified to train a stage the same way as within the whole model.",
            where="configure_optimizers",
            observed=f"{type(optimizer).__name__} does not run on trial parameters: {error}",
            expected="an optimizer that stores per-parameter tensors in optimizer.state[parameter], and holds no other "
            "tensors or modules",
            todo="Store such tensors in optimizer.state, average weights in a callback such as EMAWeightAveraging, or use "
            "another optimizer.",
        ) from error


def report_unsaved(path: object, rank: int) -> None:
    """Says that a checkpoint which is asked for after a failure is not written."""
    print(f"[rank {rank}] no checkpoint saved to {path}, because the run failed", file=sys.stderr, flush=True)


def report_batch_norm(module: nn.Module, num_microbatches: int | None) -> None:
    """Warns where BatchNorm would normalise over microbatches instead of the batch, which changes what is trained."""
    found = [path for path, _ in batch_norms(module)]
    if found and num_microbatches != 1:
        one, several = f"{found[0]} (BatchNorm) normalises", f"{len(found)} BatchNorm layers ({found[0]}, ...) normalise"
        warn(
            f"{several if len(found) > 1 else one} over one microbatch, not the whole batch, as with gradient accumulation; "
            "running statistics are those of the whole batch. To normalise as on one device, set "
            "FxPipeStrategy(num_microbatches=1)."
        )


Fault = tuple[str, str]


def _module_faults(module: LightningModule) -> Iterator[Fault]:
    held = {name: metric for name, metric in held_metrics(module).items() if any(True for _ in metric.parameters())}
    if held:
        yield (
            f"metrics that contain a model ({', '.join(list(held)[:4])}), whose parameters would belong to no stage",
            "pass the metric a function that calls a model outside the LightningModule, or compute the metric after the run",
        )
    spread = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
    if spread:
        yield (
            f"parameters that are already sharded over devices ({', '.join(spread[:4])})",
            "remove fully_shard and parallelize_module: each stage holds a part of the model, and shard_optimizer_state=True "
            "shards the optimizer state over replicas",
        )
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        yield (
            f"uninitialised lazy layers ({', '.join(lazy[:4])})",
            "run the model once under torch.no_grad() in configure_model or setup: the plan needs their sizes",
        )
        return
    unusual = [f"{name}: {type(tensor).__name__}" for name, tensor in tensors if _has_own_storage(tensor)]
    if unusual:
        yield (
            "parameters or buffers of tensor subclasses with their own storage, as in quantised layers "
            f"({', '.join(unusual[:4])})",
            "quantise the model after training, or keep the quantised values in plain buffers that forward computes with",
        )


def _has_own_storage(tensor: Tensor) -> bool:
    """True if a tensor's values lie elsewhere than in its memory, or change when it is moved."""
    kind = type(tensor)
    if isinstance(tensor, DTensor) or kind in (Tensor, nn.Parameter):
        return False
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ or kind.to is not Tensor.to:
        return True
    return any(isinstance(value, Tensor) for value in vars(tensor).values())


_STEPS = {
    TrainerFn.FITTING: ("training_step", "validation_step"),
    TrainerFn.VALIDATING: ("validation_step",),
    TrainerFn.TESTING: ("test_step",),
    TrainerFn.PREDICTING: ("predict_step",),
}


def _step_faults(trainer: Trainer, module: LightningModule) -> Iterator[Fault]:
    for name in _STEPS[trainer.state.fn or TrainerFn.FITTING]:
        if is_overridden(name, module, of_root(LightningModule, module)) and takes_loader(getattr(module, name)):
            yield (
                f"{name}(dataloader_iter): each rank would draw batches from the iterator separately",
                f"change {name} to accept the batch instead of the iterator",
            )


def _precision_faults(trainer: Trainer) -> Iterator[Fault]:
    plugin = trainer.precision_plugin
    kind = type(plugin)
    if isinstance(plugin, (*in_all_roots(TransformerEnginePrecision), *in_all_roots(BitsandbytesPrecision))):
        yield (
            f"{kind.__name__}, which replaces layers with ones that cannot be traced",
            "use precision='bf16-mixed', 'bf16-true', '16-mixed', '32-true' or '64-true'",
        )
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and not isinstance(scaler, GradScaler):
        yield f"a gradient scaler of type {type(scaler).__name__}", "use torch.amp.GradScaler or a subclass"
    own = of_root(Precision, plugin)
    if kind.backward is not own.backward:
        yield (
            f"{kind.__name__}.backward, which would run on the last stage only",
            "scale the loss in the plugin's pre_backward instead",
        )
    if kind.clip_grad_by_norm is not own.clip_grad_by_norm and trainer.gradient_clip_val:
        yield (
            f"{kind.__name__}.clip_grad_by_norm, which has access to the gradients of one stage only",
            "let the strategy clip by norm, or clip by value",
        )


def _trainer_faults(trainer: Trainer) -> Iterator[Fault]:
    yield from _precision_faults(trainer)
    if not isinstance(trainer.accelerator, (*in_all_roots(CPUAccelerator), *in_all_roots(CUDAAccelerator))):
        yield f"the accelerator {type(trainer.accelerator).__name__}", "use accelerator='gpu' with CUDA devices, or 'cpu'"
    for callback in trainer.checkpoint_callbacks:
        folder = getattr(callback, "dirpath", None) or trainer.default_root_dir
        if getattr(trainer.strategy, "num_processes", 1) > 1 and get_protocol(str(folder)) == "memory":
            yield (
                f"checkpoints in {folder}, in the memory of one process",
                "save to a local path, a file:// URL or an object store",
            )
    replicas = getattr(trainer.strategy, "replicas", Replicas())
    if syncs_batch_norm(trainer) and replicas.are_several:
        yield (
            "sync_batchnorm, which would synchronise each microbatch with the other replicas",
            "disable it: BatchNorm then normalises over a microbatch of its replica",
        )
    if validates_by_time(trainer):
        yield (
            "val_check_interval as a time, which each rank would measure with its own clock",
            "set val_check_interval to a number of batches or a fraction of the epoch",
        )
    for callback in getattr(trainer, "callbacks", ()):
        for kind, (reason, todo) in _REFUSED_CALLBACKS.items():
            if isinstance(callback, in_all_roots(kind)):
                yield f"the callback {kind.__name__}, {reason}", todo


_REFUSED_CALLBACKS: dict[type, Fault] = {
    StochasticWeightAveraging: (
        "which stores a full copy of the model in its part of the checkpoint",
        "use WeightAveraging or EMAWeightAveraging, or average checkpoints afterwards",
    ),
    BatchSizeFinder: (
        "which increases the batch size until one rank runs out of memory, after which the others cannot continue",
        "choose the batch size by hand",
    ),
    ModelPruning: (
        "which replaces parameters while the model is split into stages",
        "prune the model on one device before or after training",
    ),
}
