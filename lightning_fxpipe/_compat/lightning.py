"""Private names of Lightning; see ``_compat.torch`` for those of torch.

Each has its reason and the versions it was seen in, and a canary in ``tests/_compat/test_lightning.py``. Lightning is imported
inside functions, so that tracing and planning work without it.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from types import FrameType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat.roots import in_all_roots, of_root, root_name
from lightning_fxpipe._compat.torch import patched_attributes

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


# One package under several names.
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


def lightning_class(module: Any) -> Any:
    """Lightning's own class in the bases of a LightningModule; None for another module."""
    bases = (kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")
    return next((kind for kind in bases if kind.__module__.split(".")[0] in LIGHTNING), None)


def own_replaced(module: Any, function: Callable[..., Any], *names: str) -> list[tuple[Any, str, Any]]:
    """Patches of Lightning's class after which a function runs in place of its methods with these names, for this module.

    What a LightningModule has itself under such a name, be it a method, a property or a number, stays. A module that is not
    Lightning's needs no patch.
    """

    def replaced(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self is module else original(self, *args, **kwargs)

        return call

    owner = lightning_class(module)
    return [] if owner is None else [(owner, name, replaced(getattr(owner, name))) for name in names]


def init_process_group(cluster_environment: Any, backend: str | None, device: torch.device, timeout: timedelta) -> None:
    """Lightning's own start of the default process group; it has no public name. Lightning 2.6."""
    from lightning.fabric.utilities.distributed import (
        _get_default_process_group_backend_for_device,
        _init_dist_connection,
    )

    backend = backend or _get_default_process_group_backend_for_device(device)
    device_id = device if device.type != "cpu" else None
    _init_dist_connection(cluster_environment, backend, timeout=timeout, device_id=device_id)


def set_rank_zero_only(global_rank: int) -> None:
    """Tells all of Lightning's ``rank_zero_only`` decorators this process's rank. Lightning 2.6."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only

    for decorator in (*in_all_roots(rank_zero_only), utilities_rank_zero_only):
        decorator.rank = global_rank


def start_processes(cluster_environment: Any, num_processes: int, num_nodes: int) -> list[Any]:
    """Starts ``python script.py`` once more for each further rank of this machine, as every Lightning strategy does.

    Without Lightning's observer of them, which kills this process while it may be telling what happened. Lightning 2.6.
    """
    from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

    launcher = _SubprocessScriptLauncher(cluster_environment, num_processes, num_nodes)
    cluster_environment.validate_settings(num_devices=num_processes, num_nodes=num_nodes)
    launcher._call_children_scripts()
    _set_num_threads_if_needed(num_processes=num_processes)
    return launcher.procs


def note_sigterm(trainer: Any, note: Callable[[], None]) -> None:
    """Calls ``note`` in place of what the Trainer does on SIGTERM.

    The Trainer's own handler has all ranks meet in a broadcast, wherever they are; where not all get the signal they wait for
    each other forever. Lightning 2.6.
    """
    trainer._signal_connector._sigterm_notifier_fn = lambda signum, frame: note()


def stop_after_batch(trainer: Any) -> None:
    """Ends the run when the running batch is over, as the Trainer does on SIGTERM. Lightning 2.6."""
    trainer._signal_connector.received_sigterm = True


def multiprocessing_launcher(strategy: Any, start_method: str) -> Any:
    """Starts a process for each rank, which gives its results back and ends with the run; for notebooks. Lightning 2.6."""
    from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher

    launcher: Any = in_all_roots(_MultiProcessingLauncher)[-1 if root_name(strategy) == "pytorch_lightning" else 0]
    return launcher(strategy, start_method=start_method)


def takes_batch_idx(step: Callable[..., Any]) -> bool:
    """Returns True if the Trainer's loops call a step with the batch's index; the rule has no documented name. Lightning
    2.6.
    """
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    return is_param_in_hook_signature(step, "batch_idx", min_args=2)


def takes_loader(step: Callable[..., Any]) -> bool:
    """Returns True if the Trainer's loops give a step the iterator of the dataloader in place of a batch. Lightning 2.6."""
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    return is_param_in_hook_signature(step, "dataloader_iter", explicit=True)


@contextmanager
def run_state_stood_in(trainer: Trainer, stand_in: Any, set_up_validation: Callable[[], None]) -> Iterator[set[str]]:
    """During the block the Trainer answers what it cannot answer before its loops begin.

    Args:
        trainer: The Trainer.
        stand_in: Stands for optimizers and schedulers that do not exist yet.
        set_up_validation: Sets up the dataloaders of the validation, if the Trainer is asked for them.

    Yields:
        The names of what was asked for and stood in.
    """
    from lightning.pytorch import LightningModule, Trainer

    own: Any = of_root(Trainer, trainer)
    answered: set[str] = set()

    def unless_there(name: str) -> property:
        getter: Any = vars(own)[name].fget

        def read(asked: Any) -> Any:
            value = getter(asked)
            if asked is not trainer or value:
                return value
            answered.add(name)
            return [stand_in]

        return property(read)

    def val_dataloaders(asked: Any) -> Any:
        if asked is trainer:
            set_up_validation()
        return val_getter(asked)

    def optimizers(module: Any, *args: Any, **kwargs: Any) -> Any:
        answered.add("optimizers")
        return original(module, *args, **kwargs) or stand_in

    kind: Any = of_root(LightningModule, trainer.lightning_module)
    original, val_getter = kind.optimizers, vars(own)["val_dataloaders"].fget
    patches = [
        *((own, name, unless_there(name)) for name in ("optimizers", "lr_scheduler_configs")),
        (own, "val_dataloaders", property(val_dataloaders)),
        (kind, "optimizers", optimizers),
    ]
    with patched_attributes(*patches):
        yield answered


def num_optimizers(configured: Any) -> tuple[int, int]:
    """How many optimizers and schedulers ``configure_optimizers`` has returned, in any of its forms. Lightning 2.6."""
    from lightning.pytorch.core.optimizer import _configure_optimizers

    optimizers, schedulers, _ = _configure_optimizers(configured)
    return len(optimizers), len(schedulers)


def has_validation(trainer: Trainer) -> bool:
    """Returns True if a fit validates. The loop's data source has no public name. Lightning 2.6."""
    return bool(trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined()) and trainer.limit_val_batches != 0


@contextmanager
def silenced_loggers(module: Any, note: Callable[[], None] = lambda: None) -> Iterator[None]:
    """During the block the module's loggers take everything and keep nothing; ``note`` is called where one is used. Where they
    write they say as always.

    Public names, but only where a Trainer is.
    """
    trainer: Any = getattr(module, "_trainer", None)  # `trainer` itself raises without one. Lightning 2.6.
    if not getattr(trainer, "loggers", None):
        yield
        return
    before = trainer.loggers
    trainer.loggers = [_noted_logger()(logger, note) for logger in before]
    try:
        yield
    finally:
        trainer.loggers = before


_OF_PLACE = ("log_dir", "save_dir", "root_dir", "name", "version")


@cache
def _noted_logger() -> Any:
    from lightning.pytorch.loggers.logger import DummyLogger

    class NotedLogger(DummyLogger):
        """Calls what it was made with whenever it is used; ``trainer.log_dir`` asks of which kind it is."""

        def __init__(self, logger: Any, note: Callable[[], None]) -> None:
            super().__init__()
            self._logger, self._note = logger, note

        def __getattribute__(self, name: str) -> Any:
            if name in ("_logger", "_note"):
                return object.__getattribute__(self, name)
            if name in _OF_PLACE or name == "__class__":
                return getattr(self._logger, name)
            self._note()
            return super().__getattribute__(name)

    return NotedLogger


@contextmanager
def watched_trainer(
    module: Any, read_as: Callable[[str, Any], Any], read_other_as: Callable[[str, Any, FrameType], Any]
) -> Iterator[None]:
    """Has reads of the Trainer's attributes return what others make of them.

    Args:
        module: The LightningModule; another module has no Trainer.
        read_as: Of the counters, what runs now and how much there is, by name and value; whoever reads them.
        read_other_as: Of all others, but for methods; it gets the frame that reads, too, which may be Lightning's own.
    """
    trainer: Any = getattr(module, "_trainer", None)
    if trainer is None:
        yield
        return
    from lightning.pytorch import Trainer

    own: Any = of_root(Trainer, trainer)

    def watched(name: str) -> property:
        getter: Any = vars(own)[name].fget

        def read(trainer: Any) -> Any:
            return read_as(name, getter(trainer))

        return property(read)

    def read_any(trainer: Any, name: str) -> Any:
        value = object.__getattribute__(trainer, name)
        if name in _RUN_STATE or name.startswith("_") or isinstance(value, MethodType):
            return value
        return read_other_as(name, value, sys._getframe(1))

    with patched_attributes(*((own, name, watched(name)) for name in _RUN_STATE), (own, "__getattribute__", read_any)):
        yield


def trainer_value(name: str, value: Any) -> Any:
    """Returns the part of a Trainer's attribute that is compared: numbers of metrics, the progress of a loop. Lightning 2.6."""
    if name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        return {key: float(metric) for key, metric in value.items() if not isinstance(metric, Tensor) or metric.numel() == 1}
    return _progress_of(value) if _is_loop(value) else value


def _is_loop(value: Any) -> bool:
    from lightning.pytorch.loops.loop import _Loop

    return isinstance(value, in_all_roots(_Loop))


def _progress_of(loop: Any) -> dict[str, Any]:
    """How far a loop is; its ``state_dict`` would ask loaders for their states, too."""
    found: dict[str, Any] = {}
    for name, each in vars(loop).items():
        if name.endswith("_progress"):
            found[name] = each.state_dict()
        elif _is_loop(each):
            found[name] = _progress_of(each)
        elif isinstance(each, int):
            found[name] = each
    return found


_RUN_STATE = (
    *("global_step", "current_epoch", "is_last_batch"),
    *("training", "validating", "testing", "predicting", "evaluating", "sanity_checking"),
    *("num_training_batches", "num_val_batches", "num_sanity_val_batches", "num_test_batches", "num_predict_batches"),
)


def metadata_filename() -> str:
    """Name of the file in a checkpoint folder by which Lightning knows it. Lightning 2.6."""
    from lightning.fabric.utilities.load import _METADATA_FILENAME

    return _METADATA_FILENAME


def batch_counter(trainer: Trainer, kind: str) -> int:
    """Batches that the step has run on so far, restored with a checkpoint. Lightning 2.6."""
    if kind == "training_step":
        return int(trainer.fit_loop.epoch_loop.total_batch_idx)
    return int(trainer.global_step)


def zeroes_gradients(trainer: Trainer) -> bool:
    """Returns True if Lightning sets the gradients to zero between the training step that runs and its backward pass.

    It does where the batch is the first of those that are accumulated. What says so is in a closure. Lightning 2.6.
    """
    loop = trainer.fit_loop.epoch_loop
    optimizes = loop.automatic_optimization
    are_lightnings = all(type(each).__module__.split(".")[0] in LIGHTNING for each in (trainer.fit_loop, loop, optimizes))
    is_first = loop.batch_idx % trainer.accumulate_grad_batches == 0
    return is_first and are_lightnings and trainer.lightning_module.automatic_optimization and not optimizes._skip_backward


def averaged_modules(trainer: Trainer) -> list[nn.Module]:
    """The copies of the module that ``WeightAveraging`` callbacks keep; they have no public name. Lightning 2.6."""
    from lightning.pytorch.callbacks import WeightAveraging

    averaging = _callbacks(trainer, WeightAveraging)
    return [callback._average_model.module for callback in averaging if callback._average_model is not None]


def throughputs(trainer: Trainer) -> list[tuple[Any, Any]]:
    """``ThroughputMonitor`` callbacks and what they count with, which has no public name. Lightning 2.6."""
    from lightning.pytorch.callbacks import ThroughputMonitor

    monitors = _callbacks(trainer, ThroughputMonitor)
    return [(monitor, throughput) for monitor in monitors for throughput in monitor._throughputs.values()]


def _callbacks(trainer: Any, kind: Any) -> list[Any]:
    return [callback for callback in trainer.callbacks if isinstance(callback, in_all_roots(kind))]


def has_no_optimizer(optimizers: Sequence[Any]) -> bool:
    """Returns True if ``configure_optimizers`` has returned None; Lightning then has an optimizer that does nothing.
    Lightning 2.6.
    """
    from lightning.pytorch.core.optimizer import _MockOptimizer

    return len(optimizers) == 1 and isinstance(optimizers[0], in_all_roots(_MockOptimizer))


def validates_by_time(trainer: Trainer) -> bool:
    """Returns True if ``val_check_interval`` is a time; the Trainer keeps it under a private name. Lightning 2.6."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


def syncs_batch_norm(trainer: Trainer) -> bool:
    """Returns True if ``sync_batchnorm=True``; the Trainer gives it to its strategy under a private name. Lightning 2.6."""
    return getattr(trainer.strategy, "_layer_sync", None) is not None


@contextmanager
def checkpoints_in_background(
    trainer: Trainer, is_started: Callable[[str], bool], link: Callable[[str, str], None]
) -> Iterator[None]:
    """``ModelCheckpoint`` callbacks know, during the block, of checkpoints that are still being written.

    They look for a name that no file has yet, which has a public method, and make a link to what they have saved, which has
    none: a link to what is not there yet would hide the last good checkpoint. Lightning 2.6.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    def exists(callback: Any, filepath: str, trainer: Trainer) -> bool:
        return bool(type(callback).file_exists(callback, filepath, trainer)) or is_started(filepath)

    def link_once_saved(trainer: Trainer, filepath: str, linkpath: str) -> None:
        if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
            link(filepath, linkpath)
        trainer.strategy.barrier()

    callbacks = _callbacks(trainer, ModelCheckpoint)
    patches = [(callback, "file_exists", partial(exists, callback)) for callback in callbacks]
    links = [(callback, "_link_checkpoint", link_once_saved) for callback in callbacks]
    with patched_attributes(*patches, *links):
        yield


def checkpoint_folders(trainer: Trainer) -> list[str]:
    """Returns the folders in which the Trainer will search for its last checkpoint, as far as they are known before a run."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    default = os.path.join(trainer.default_root_dir, "checkpoints")
    folders = {str(callback.dirpath or default) for callback in _callbacks(trainer, ModelCheckpoint)}
    folders.add(str(trainer.default_root_dir))
    return sorted(folder for folder in folders if "://" not in folder)


def silence_lightning(*, logs_alike: bool = False) -> None:
    """Ignores warnings about Lightning's own code, and what does not hold for a module in stages.

    Lightning 2.6 asks torch 2.13 for the kind of a leaf in a deprecated way, once in each process and run. torch says that
    values loaded into meta tensors are lost; in hooks they reach the rank of their stage.

    Args:
        logs_alike: True if all ranks log the same, so that the advice to log with ``sync_dist`` does not hold either.
    """
    module = r"(lightning\.pytorch|pytorch_lightning)\.utilities\._pytree"
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`", module=module)
    warnings.filterwarnings("ignore", message=r"for .*: copying from a non-meta parameter in the checkpoint to a meta")
    if logs_alike:
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True\)`")
