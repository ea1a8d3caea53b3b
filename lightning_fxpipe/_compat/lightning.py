"""Private names of Lightning; see ``_compat.torch`` for those of torch.

Each has its reason and the versions it was seen in, and a canary in ``tests/_compat/test_lightning.py``. Lightning is imported
inside functions, so that tracing and planning work without it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_fxpipe._compat.roots import in_all_roots, of_root, root_name
from lightning_fxpipe._compat.torch import patched_attributes, tree_leaves, tree_map
from lightning_fxpipe.rng import isolated_rng, kept_generators

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


_logger = logging.getLogger("lightning_fxpipe")

# One package under several names.
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


def lightning_class(module: Any) -> Any:
    """Lightning's own class in the bases of a LightningModule; None for another module."""
    bases = (kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")
    return next((kind for kind in bases if kind.__module__.split(".")[0] in LIGHTNING), None)


def log_replaced(module: Any, log: Callable[..., Any], *names: str) -> list[tuple[Any, str, Any]]:
    """What to patch so that ``log`` runs in place of Lightning's own methods with these names, called for this module.

    What a LightningModule overrides them with runs on, and ends there. For a module that is not Lightning's it is nothing.
    """

    def replaced(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return log(*args, **kwargs) if self is module else original(self, *args, **kwargs)

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


def first_batch(trainer: Trainer, *, of_validation: bool = False, take: Callable[[Any], Any] = next) -> Any:
    """The first batch of the loop that is about to run, as its step will get it; None where no dataloader is defined.

    With ``of_validation`` it is that of the validation within a fit. ``take`` gets the first batch of an iterator that
    cannot be copied.

    The plan is made before the first step, and Lightning makes its dataloaders only when a loop starts. Asked here, the
    dataloader's own iterator, workers and random numbers are left alone, so the run sees the batches that it would have seen.
    The loops' data sources have no public name. Lightning 2.6.
    """
    from lightning.pytorch.trainer.states import TrainerFn

    names = {TrainerFn.FITTING: "fit", TrainerFn.VALIDATING: "validate", TrainerFn.TESTING: "test"}
    assert trainer.state.fn is not None
    source = getattr(trainer, f"{names.get(trainer.state.fn, 'predict')}_loop")._data_source
    if of_validation:
        source = trainer.fit_loop.epoch_loop.val_loop._data_source
    if not source.is_defined():
        return None
    with isolated_rng():
        one_by_one = of_validation or trainer.state.fn != TrainerFn.FITTING
        batch = first_loader_batch(source.dataloader(), one_by_one=one_by_one, take=take)
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def first_loader_batch(loaders: Any, *, one_by_one: bool = False, take: Callable[[Any], Any] = next) -> Any:
    """First batch of one or several dataloaders, in their structure; of the first that has one, where they run one by one.

    Args:
        loaders: The dataloaders; a ``CombinedLoader`` says itself how they run.
        one_by_one: How others run.
        take: Gets the first batch of an iterator that cannot be copied.
    """
    from lightning.pytorch.utilities import CombinedLoader

    if isinstance(loaders, in_all_roots(CombinedLoader)):
        one_by_one, loaders = loaders._mode == "sequential", loaders.iterables
    with isolated_rng():
        if not one_by_one:
            return tree_map(partial(_first_of_loader, take), loaders)
        for loader in tree_leaves(loaders):
            with suppress(StopIteration):
                return _first_of_loader(take, loader)
        return None


def _first_of_loader(take: Callable[[Any], Any], loader: Any) -> Any:
    """First batch of one dataloader, without starting its workers."""
    from torch.utils.data import DataLoader

    if not isinstance(loader, DataLoader):
        return _first_of_iterable(take, loader)
    owners = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    generators = {id(g): g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)}
    with kept_generators(generators.values()):
        return _first_collated(loader)


def _first_of_iterable(take: Callable[[Any], Any], loader: Any) -> Any:
    """First batch of a loader that may be its own iterator, or know how far it has come."""
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        state = copy.deepcopy(loader.state_dict())
        try:
            return next(iter(loader))
        finally:
            loader.load_state_dict(state)
    if not hasattr(loader, "__next__"):
        return next(iter(loader))
    try:
        copied = copy.deepcopy(loader)
    except Exception as error:  # such as a generator
        _logger.debug("The first batch is taken out of a %s: %s", type(loader).__name__, error)
        return take(loader)
    return next(iter(copied))


def _first_collated(loader: Any) -> Any:
    from torch.utils.data import IterableDataset

    dataset, collate = loader.dataset, loader.collate_fn
    if isinstance(dataset, IterableDataset):
        # A dataset that is its own iterator would lose the samples looked at here.
        samples = iter(copy.deepcopy(dataset) if hasattr(dataset, "__next__") else dataset)
        if loader.batch_size is None:
            return collate(next(samples))
        return collate(list(itertools.islice(samples, loader.batch_size)))
    if loader.batch_sampler is None:
        return collate(dataset[next(iter(loader.sampler))])
    indices = next(iter(loader.batch_sampler))
    many = getattr(dataset, "__getitems__", None)
    return collate(many(indices) if callable(many) else [dataset[index] for index in indices])


def takes_batch_idx(step: Callable[..., Any]) -> bool:
    """Whether the Trainer's loops call a step with the batch's index; the rule has no documented name. Lightning 2.6."""
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    return is_param_in_hook_signature(step, "batch_idx", min_args=2)


def takes_loader(step: Callable[..., Any]) -> bool:
    """Whether the Trainer's loops give a step the iterator of the dataloader in place of a batch. Lightning 2.6."""
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    return is_param_in_hook_signature(step, "dataloader_iter", explicit=True)


@contextmanager
def run_state_stood_in(trainer: Trainer, stand_in: Any) -> Iterator[set[str]]:
    """During the block the Trainer answers what it cannot answer before its loops begin; yields the names of what it was asked.

    Optimizers and schedulers that do not exist yet are ``stand_in``; dataloaders are made, once more, when somebody asks for
    them, and their lengths are those of the loops. The loops' data sources have no public name. Lightning 2.6.
    """
    from lightning.pytorch import LightningModule, Trainer

    own: Any = of_root(Trainer, trainer)
    made: dict[str, Any] = {}
    answered: set[str] = set()

    def loader(name: str, loop: Any) -> Any:
        if name not in made and loop._data_source.is_defined():
            with isolated_rng():
                made[name] = loop._data_source.dataloader()
        return made.get(name)

    def train_loader() -> Any:
        return loader("train", trainer.fit_loop)

    def val_loader() -> Any:
        is_fit = trainer.state.fn is None or trainer.state.fn.value == "fit"
        return loader("val", trainer.fit_loop.epoch_loop.val_loop if is_fit else trainer.validate_loop)

    def num_batches() -> Any:
        limit = trainer.limit_train_batches
        try:
            return min(len(train_loader()), limit if isinstance(limit, int) else 2**62)
        except TypeError:
            return float("inf")

    def steps() -> Any:
        epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else float("inf")
        limit = trainer.max_steps if trainer.max_steps >= 0 else float("inf")
        return min(limit, epochs * -(-num_batches() // trainer.accumulate_grad_batches))

    def unless(name: str, other: Callable[[], Any], is_known: Callable[[Any], bool]) -> property:
        getter: Any = vars(own)[name].fget

        def read(asked: Any) -> Any:
            value = None if name == "estimated_stepping_batches" else getter(asked)  # which would start the loop's loaders
            if asked is not trainer or is_known(value):
                return value
            answered.add(name)
            return other()

        return property(read)

    def is_there(value: Any) -> bool:
        return value is not None

    def optimizers(module: Any, *args: Any, **kwargs: Any) -> Any:
        answered.add("optimizers")
        return original(module, *args, **kwargs) or stand_in

    kind: Any = of_root(LightningModule, trainer.lightning_module)
    original = kind.optimizers
    patches = [
        (own, "optimizers", unless("optimizers", lambda: [stand_in], bool)),
        (own, "lr_scheduler_configs", unless("lr_scheduler_configs", lambda: [stand_in], bool)),
        (own, "train_dataloader", unless("train_dataloader", train_loader, is_there)),
        (own, "val_dataloaders", unless("val_dataloaders", val_loader, is_there)),
        (own, "num_training_batches", unless("num_training_batches", num_batches, lambda n: n < 2**62)),
        (own, "estimated_stepping_batches", unless("estimated_stepping_batches", steps, is_there)),
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
    """Whether a fit validates. The loop's data source has no public name. Lightning 2.6."""
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
def watched_trainer_counters(module: Any, note: Callable[[str, Any], None]) -> Iterator[None]:
    """Reports each reading of what the Trainer says of where the run is: its counters, what runs now, and how much there is."""
    trainer: Any = getattr(module, "_trainer", None)
    if trainer is None:
        yield
        return
    from lightning.pytorch import Trainer

    own: Any = of_root(Trainer, trainer)

    def watched(name: str) -> property:
        getter: Any = vars(own)[name].fget

        def read(trainer: Any) -> Any:
            value = getter(trainer)
            note(name, value)
            return value

        return property(read)

    with patched_attributes(*((own, name, watched(name)) for name in _RUN_STATE)):
        yield


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
    """Whether Lightning sets the gradients to zero between the training step that runs and its backward pass.

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
    """Whether ``configure_optimizers`` has returned None; Lightning then has an optimizer that does nothing. Lightning 2.6."""
    from lightning.pytorch.core.optimizer import _MockOptimizer

    return len(optimizers) == 1 and isinstance(optimizers[0], in_all_roots(_MockOptimizer))


def validates_by_time(trainer: Trainer) -> bool:
    """Whether ``val_check_interval`` is a time; the Trainer keeps it under a private name. Lightning 2.6."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


def syncs_batch_norm(trainer: Trainer) -> bool:
    """Whether ``sync_batchnorm=True``; the Trainer gives it to its strategy under a private name. Lightning 2.6."""
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
    """Where the Trainer looks for its last checkpoint, as far as that is known before a run."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    default = os.path.join(trainer.default_root_dir, "checkpoints")
    folders = {str(callback.dirpath or default) for callback in _callbacks(trainer, ModelCheckpoint)}
    folders.add(str(trainer.default_root_dir))
    return sorted(folder for folder in folders if "://" not in folder)
