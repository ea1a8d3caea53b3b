"""Hooks of a strategy that save or restore a run, for a module in stages."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch.distributed.distributed_c10d as dist
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.optim import Optimizer

from lightning_fxpipe._compat.lightning import batch_counter, checkpoints_in_background
from lightning_fxpipe._compat.roots import in_all_roots
from lightning_fxpipe.checkpoint.atomic import is_linked, link, recover, remove
from lightning_fxpipe.checkpoint.locations import Location, check_seen_by_all
from lightning_fxpipe.checkpoint.pickles import Reading
from lightning_fxpipe.checkpoint.saving import Saver, folder_writer, on_every_rank
from lightning_fxpipe.checkpoint.single_file import file_writer, save_file_at, save_folder_at, whole_checkpoint
from lightning_fxpipe.checkpoint.stage_state import (
    ENTRY,
    checkpoint_of,
    entry_of,
    is_folder,
    load_model,
    load_optimizers,
    portable_rng,
    read_checkpoint,
    taken_parts,
    usable_rng,
    version_of,
    without_foreign_extras,
)
from lightning_fxpipe.distributed.agreement import any_rank, check_agreement, of_last_stage
from lightning_fxpipe.distributed.failure import has_failed, have_all_stopped_at, noted_connections
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.errors import FxPipeError, UnsupportedError
from lightning_fxpipe.optim.optimizers import StageOptimizer, text_of
from lightning_fxpipe.planner.load import ADAM_BYTES_PER_BYTE
from lightning_fxpipe.reporting.messages import inform, warn
from lightning_fxpipe.rng import rng_state, set_rng_state
from lightning_fxpipe.stages.memory import has_room
from lightning_fxpipe.strategy.run_optimizers import RunOptimizers
from lightning_fxpipe.strategy.session import Session
from lightning_fxpipe.strategy.support import report_unsaved

_LAST_SECONDS = 2.0  # that a checkpoint in the background still has when the run has failed


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Contents of a checkpoint: a module in its pipeline, on this rank, and the run's optimizers."""

    session: Session
    topology: Topology
    run_optimizers: RunOptimizers

    @property
    def optimizers(self) -> list[StageOptimizer]:
        """The present ones."""
        return [*self.run_optimizers]


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Source from which a run is restored.

    Attributes:
        location: Where it is.
        reading: How it is read.
        version: Of what was there when it began to be read.
    """

    location: Location
    reading: Reading
    version: str


class CheckpointHooks:
    """The checkpoint hooks of a strategy's runs, and what they tell each other. Made by every rank.

    Args:
        timeout: How long a rank waits for another while it writes in the background.
        options: Options of the run that a checkpoint tells of, beside the plan.
        as_folder: Whether checkpoints are folders, into which each rank writes its part, or single files; ``"auto"``: single
            files if rank 0's machine has the memory for them.
        in_background: Whether training goes on while a checkpoint is written.

    Attributes:
        seed: From which the stages' random numbers derive; once a run is restored, that of the run that goes on.
        has_trained: Whether the run has; what is restored then is no resumed run, but a trial that is over.
    """

    def __init__(
        self, timeout: timedelta, *, options: Mapping[str, Any], as_folder: bool | Literal["auto"], in_background: bool
    ) -> None:
        self._timeout = timeout
        self._options = options
        self._form = as_folder
        self._in_background = in_background
        self.seed = 0
        self._begin_saving()
        self.forget_run()

    def copy(self) -> CheckpointHooks:
        """Returns the hooks of another strategy with the same options, which has not run."""
        return CheckpointHooks(self._timeout, options=self._options, as_folder=self._form, in_background=self._in_background)

    def forget_run(self) -> None:
        """Called before each run, whose module is not in stages yet."""
        self._run: _Run | None = None
        self.has_trained = False
        self._restored_from: _Source | None = None
        self._restored_rng: dict[str, Any] | None = None  # until the first batch
        self._linked: list[Path] = []  # to be removed
        self._as_folder = None if self._form == "auto" else self._form  # None: until the first checkpoint of the run

    def begin_run(
        self, trainer: Trainer, session: Session, topology: Topology, optimizers: RunOptimizers
    ) -> AbstractContextManager[None]:
        """Called once the module is in stages; returns a context for the rest of the run.

        Raises:
            UnsupportedError: A plugin is to write checkpoints in a form that is none of a single device.
        """
        option = "save_distributed_checkpoint=True" if self._form is True else "async_save=True" if self._in_background else ""
        if option and (plugin := plugin_of(trainer)) is not None:
            raise UnsupportedError(
                "Checkpoint plugins write single files, as on one device.",
                observed=f"the plugin {type(plugin).__name__} and {option}",
                expected="a plugin, or checkpoints that the strategy writes",
                todo="Remove the plugin or the option.",
            )
        self._run = _Run(session=session, topology=topology, run_optimizers=optimizers)
        return checkpoints_in_background(trainer, lambda path: self._saver.is_started(Path(path)), self._link)

    def begin_training(self) -> None:
        """Called once a run's dataloaders have been made, before its first batch."""
        loop = self._now.session.module.trainer.fit_loop
        if self._restored_rng is not None and loop.restarted_mid_epoch and not loop.epoch_loop.batch_progress.is_last_batch:
            # The iterator over the rest of the epoch has drawn numbers, and that of the whole epoch had done so before.
            set_rng_state(self._restored_rng)
        self._restored_rng = None

    def end_training(self) -> None:
        """Waits for what is being written. Called by every rank."""
        self._saver.wait()
        self._remove_linked()

    def end_run(self) -> None:
        """Called by every rank that comes to the end of the run; after a failure not every one does."""
        if has_failed():
            self._saver.abandon(_LAST_SECONDS)
        elif self._run is not None:
            self.end_training()
            if self._group is not None:
                dist.destroy_process_group(self._group)
        self._begin_saving()

    def _begin_saving(self) -> None:
        """From here on checkpoints are saved by a new saver, whose background has a process group for itself."""
        self._group: dist.ProcessGroup | None = None
        self._has_group = False
        self._saver = Saver(self._background_group)

    def _background_group(self) -> dist.ProcessGroup | None:
        return self._group

    def _make_group(self) -> None:
        """Makes the group of the ranks that write in the background, those of the first replica. Called by every rank.

        Not by these alone: torch then names a group by how many others a process has, which need not be as many on all.
        """
        if not self._has_group and dist.get_world_size() > 1:
            with noted_connections():
                found = dist.new_group([*range(self._now.topology.num_ranks)], self._timeout, backend="gloo")
            self._group = found if isinstance(found, dist.ProcessGroup) else None
        self._has_group = True

    @property
    def _now(self) -> _Run:
        if self._run is None:
            raise RuntimeError("Checkpoints are only available after the strategy's setup has split the module into stages.")
        return self._run

    @property
    def are_of_a_run(self) -> bool:
        """True once the running Trainer's module is in stages."""
        return self._run is not None

    @property
    def saves_nothing(self) -> bool:
        """True if a run ends with an exception before model and optimizers are in stages, and a hook wants a checkpoint."""
        return not self._is_set_up and sys.exc_info()[0] is not None

    @property
    def _is_set_up(self) -> bool:
        if self._run is None:
            return False
        trains = self._run.session.module.trainer.state.fn == TrainerFn.FITTING
        return not trains or self._run.run_optimizers.are_followed

    # ------------------------------------------------------------------ saving

    def module_state(self) -> dict[str, Any]:
        """The module's state: tensors of this rank's part, and for the rest placeholders, for which hooks see values."""
        if self.saves_nothing:
            return {}
        hooks = self._now.session.hooks
        with hooks.together("save_checkpoint"):
            state: dict[str, Any] = self._now.session.module.state_dict()
        hooks.show_state(state)
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part of an optimizer's state."""
        if self.saves_nothing:
            return {}
        inner = getattr(optimizer, "optimizer", optimizer)  # Lightning may pass its wrapper
        with self._now.session.hooks.suspend():
            return next((mine.state_dict() for mine in self._now.optimizers if mine.optimizer is inner), {})

    def save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Writes a checkpoint. Called by every rank with the same path.

        Args:
            checkpoint: Lightning's checkpoint, with this rank's part of the states of model and optimizers.
            path: A path or URL.
            storage_options: For the file system of a URL.
        """
        with self._now.session.hooks.together("save_checkpoint"):
            self._save(checkpoint, path, storage_options)

    def _save(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None) -> None:
        topology, module = self._now.topology, self._now.session.module
        shares_out = any(mine.is_shared_out for mine in self._now.optimizers)
        ranks = topology.everyone if shares_out else topology.control_group
        if has_failed() and not have_all_stopped_at(module.trainer.global_step, ranks):
            # Hooks that run on an exception ask for it; the others are on their way out, each at another place of the step.
            report_unsaved(path, module.trainer.global_rank)
            return
        plugin = plugin_of(module.trainer)
        location = None if plugin is not None else Location.of(path, storage_options)
        is_running = module.trainer.state.status == TrainerStatus.RUNNING
        in_background = self._in_background and location is not None and location.path is not None
        in_background = in_background and is_running and not has_failed()
        if in_background:
            self._make_group()
        for mine, state in zip(self._now.optimizers, checkpoint.get("optimizer_states", []), strict=False):
            mine.collect_shards(state)
        if not topology.replicas.is_first:
            return  # it has the same
        self._remove_linked()
        names = list(module.state_dict())
        checkpoint = without_foreign_extras(checkpoint, module)
        checkpoint[ENTRY] = self._entry()
        self._check_common(checkpoint)
        if plugin is not None:
            self._save_by_plugin(plugin, whole_checkpoint(checkpoint, names, topology), path, storage_options)
            return
        assert location is not None
        check_seen_by_all(location, topology.num_ranks)
        if self._as_folder is None:
            self._as_folder = self._needs_folder()
        if self._as_folder:
            checkpoint = self._folder_like(checkpoint)
        if location.path is None:
            self._saver.wait()
            save = save_folder_at if self._as_folder else save_file_at
            save(location, checkpoint, names, topology)
            return
        if self._as_folder:
            parts = taken_parts(checkpoint, names)
            write = folder_writer(parts, checkpoint, copied=in_background)
        else:
            write = file_writer(whole_checkpoint(checkpoint, names, topology), copied=in_background)
        if in_background:
            self._saver.start(location.path, write, moment=batch_counter(module.trainer, "training_step"))
        else:
            self._saver.save(location.path, write, topology.control_group)

    def _save_by_plugin(
        self, plugin: CheckpointIO, whole: dict[str, Any] | None, path: str | Path, storage_options: Any | None
    ) -> None:
        """The checkpoint of one device, which rank 0 has; called by every rank."""

        def write() -> None:
            if whole is not None:
                plugin.save_checkpoint(whole, path, storage_options=storage_options)

        on_every_rank(self._now.topology.control_group, write)

    def _needs_folder(self) -> bool:
        """True if rank 0's machine lacks the memory for the whole checkpoint of this run. Called by every rank of a replica."""
        module, topology = self._now.session.module, self._now.topology
        num_bytes = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
        # Before the first step the states are yet to come; all checkpoints of a run have one form.
        num_bytes += int(ADAM_BYTES_PER_BYTE * sum(p.nbytes for p in module.parameters() if p.requires_grad))
        num_bytes *= 2 if self._in_background else 1  # it is written from a copy
        needs_folder = topology.num_ranks > 1 and not of_last_stage(has_room(num_bytes), topology)
        if needs_folder:
            warn(
                "Checkpoints of this run are folders into which each rank writes its part; torch.load cannot read them. A "
                f"single file would need {num_bytes / 2**30:.1f} GiB on rank 0's machine, which does not have enough free "
                "memory. Set FxPipeStrategy(save_distributed_checkpoint=True) to silence this warning, or False to write "
                "files anyway."
            )
        return needs_folder

    def _entry(self) -> dict[str, Any]:
        """Returns a checkpoint's entry about the run that writes it, from which the stages' random numbers derive."""
        versions = {name: _version_of_package(name) for name in ("lightning-fxpipe", "torch", "lightning")}
        plan = dataclasses.asdict(self._now.session.plan)
        return {"versions": versions, **self._options, "plan": plan, "rng": portable_rng(rng_state()), "seed": self.seed}

    def _check_common(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuses what an optimizer keeps beside the states of its parameters where it differs between the stages."""
        states = checkpoint.get("optimizer_states", [])
        common = [mine.common_state(state) for mine, state in zip(self._now.optimizers, states, strict=False)]
        check_agreement(
            self._now.topology.control_group,
            [{key: text_of(value) for key, value in entries.items()} for entries in common],
            UnsupportedError(
                "The optimizer state cannot be saved: entries that belong to no parameter differ between stages.",
                where=", ".join(type(mine.optimizer).__name__ for mine in self._now.optimizers),
                expected="counters and similar entries that do not depend on the optimizer's parameters",
                todo="Store them in the state of the parameters (optimizer.state[parameter]).",
            ),
        )

    def _folder_like(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint as a folder can have it."""
        if any_rank(any(mine.get("state") for mine in checkpoint.get("optimizer_states", [])), self._now.topology):
            return checkpoint
        # A folder has no empty dicts, and torch wants one: such states lie beside the tensors.
        states = checkpoint.pop("optimizer_states", [])
        return {**checkpoint, **{f"optimizer_{index}": state for index, state in enumerate(states)}}

    # ------------------------------------------------------------------ restoring

    def load(self, path: str | Path, *, weights_only: bool | None) -> dict[str, Any]:
        """Reads a checkpoint but for the optimizers' states. Called by every rank with the same path."""
        with self._now.session.hooks.together("load_checkpoint"):
            return self._load(path, weights_only)

    def _load(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        session = self._now.session
        self._saver.wait()
        plugin = plugin_of(session.module.trainer)
        if plugin is not None and not (os.path.isdir(path) and is_folder(Location.of(path))):
            self._restored_from = None
            return checkpoint_of(plugin.load_checkpoint(path, weights_only=weights_only), str(path), session.module)
        location, rank, num_ranks = Location.of(path), self._now.topology.rank, self._now.topology.num_ranks
        check_seen_by_all(location, num_ranks)
        if location.path is not None:
            recover(location.path)
        reading = Reading(weights_only=weights_only, is_checked=lambda number: number % num_ranks == rank)
        self._restored_from = _Source(location=location, reading=reading, version=version_of(location))
        checkpoint = read_checkpoint(location, session.module, reading, into=session.overwritable())
        self._check_version(self._restored_from)
        return checkpoint

    def _check_version(self, source: _Source) -> None:
        """Called by every rank that has read from a checkpoint.

        Raises:
            FxPipeError: It is not the one with which each rank has begun: another run has saved one with its name meanwhile.
        """
        replaced = FxPipeError(
            "The checkpoint was replaced while it was being read: another run saves under the same name.",
            where=source.location.text,
            observed=version_of(source.location),
            expected=f"the same checkpoint on every rank, with {source.version}",
            todo="Use a separate folder for each run.",
        )
        if version_of(source.location) != source.version:
            raise replaced
        check_agreement(self._now.topology.control_group, source.version, replaced)

    def load_model(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Restores the module from what was read."""
        session = self._now.session
        with session.hooks.suspend():
            load_model(session.module, checkpoint["state_dict"], strict=strict)
            session.complete_values(checkpoint["state_dict"].keys(), draws=ENTRY not in checkpoint)

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores the optimizers and, where a run goes on, the random generators and :attr:`seed`."""
        if (source := self._restored_from) is None:  # a plugin has read it whole
            for optimizer, state in zip(self._now.optimizers, checkpoint.get("optimizer_states") or (), strict=False):
                optimizer.load(state, copies=True)
        else:
            load_optimizers(source.location, source.reading, checkpoint, self._now.optimizers)
            self._check_version(source)
        entry = entry_of(checkpoint)
        if "rng" not in entry or self.has_trained:  # a converted checkpoint may have our entry, but not this
            return
        before, now = len((entry.get("plan") or {}).get("stages", ())), self._now.session.plan.num_stages
        if before not in (0, now):
            inform(f"Resumed a checkpoint of {before} {'stage' if before == 1 else 'stages'} with {now}.")
        # A resumed run shuffles and draws as the uninterrupted one would have.
        self._restored_rng = usable_rng(entry["rng"])
        set_rng_state(self._restored_rng)
        self.seed = entry.get("seed", self.seed)

    # ------------------------------------------------------------------ what becomes of checkpoints

    def remove(self, path: str | Path, otherwise: Callable[[], None]) -> None:
        """Removes a checkpoint, once those that were started before are written. Called by rank 0.

        One that a link leads to stays until the link leads elsewhere or the next checkpoint: the link may be the last one.

        Args:
            path: A path or URL.
            otherwise: Removes one that is no folder or file of this machine, is a plugin's, or of no module in stages.
        """
        if self._run is None or "://" in str(path) or plugin_of(self._run.session.module.trainer) is not None:
            self._saver.when_saved(otherwise)
        elif is_linked(Path(path)):
            self._linked.append(Path(path))
        else:
            self._saver.when_saved(partial(remove, Path(path)))

    def _link(self, target: str | Path, path: str | Path) -> None:
        """Makes a link to a checkpoint, once it is written. Called by rank 0."""
        self._saver.when_saved(partial(link, Path(target), Path(path)))
        self._remove_linked()

    def _remove_linked(self) -> None:
        paths, self._linked = self._linked, []
        for path in paths:
            self._saver.when_saved(partial(remove, path))


def plugin_of(trainer: Trainer) -> CheckpointIO | None:
    """Returns the plugin that the user has given for reading and writing checkpoints; None for Lightning's own."""
    plugin = trainer.strategy.checkpoint_io
    return None if type(plugin) in in_all_roots(TorchCheckpointIO) else plugin


@cache
def _version_of_package(name: str) -> str:
    """The installed version, or that it is unknown: a source tree that is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
