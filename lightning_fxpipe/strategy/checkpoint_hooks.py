"""What Lightning asks a strategy for when it saves or restores a run, for a module in stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning.pytorch.trainer.states import TrainerStatus
from torch.optim import Optimizer

from lightning_fxpipe._compat.lightning import batch_counter, weights_only_of_run
from lightning_fxpipe.checkpoint.atomic import is_linked, link, recover, remove
from lightning_fxpipe.checkpoint.locations import Location, check_seen_by_all
from lightning_fxpipe.checkpoint.saving import Saver, folder_writer
from lightning_fxpipe.checkpoint.single_file import file_writer, save_file_at, save_folder_at, whole_checkpoint
from lightning_fxpipe.checkpoint.stage_state import (
    ENTRY,
    load_model,
    load_optimizers,
    module_state,
    portable_rng,
    read_checkpoint,
    taken_parts,
    usable_rng,
    without_foreign_extras,
)
from lightning_fxpipe.distributed.agreement import any_rank, check_agreement
from lightning_fxpipe.distributed.failure import has_failed, have_all_stopped_at
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.optim.optimizers import StageOptimizer, text_of
from lightning_fxpipe.rng import rng_state, set_rng_state
from lightning_fxpipe.strategy.session import Session
from lightning_fxpipe.strategy.support import report_unsaved


def origin(*, schedule: str, num_microbatches: int | None) -> dict[str, Any]:
    """What a checkpoint says of the run that has written it."""
    versions = {name: version_of_package(name) for name in ("lightning-fxpipe", "torch", "lightning")}
    return {"versions": versions, "schedule": schedule, "num_microbatches": num_microbatches}


def version_of_package(name: str) -> str:
    """The installed version, or that it is unknown: a source tree that is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


class CheckpointHooks:
    """The checkpoint hooks of one run, and what they tell each other.

    Args:
        session: The module in its pipeline.
        topology: This rank's place.
        optimizers: The run's optimizers.
        saver: Saves.
        origin: What a checkpoint says of the run that has written it, beside the plan.
        as_folder: Whether checkpoints are folders, into which each rank writes its part; else single files.
        in_background: Whether training goes on while a checkpoint is written.
    """

    def __init__(
        self,
        session: Session,
        topology: Topology,
        optimizers: Sequence[StageOptimizer],
        saver: Saver,
        *,
        origin: Mapping[str, Any],
        as_folder: bool,
        in_background: bool,
    ) -> None:
        self._session = session
        self._topology = topology
        self._optimizers = optimizers
        self._saver = saver
        self._origin = origin
        self._as_folder = as_folder
        self._in_background = in_background
        self._restored_from: Location | None = None
        self._rng: dict[str, Any] | None = None  # of the run that goes on
        self._linked: list[Path] = []  # to be removed

    def module_state(self) -> dict[str, Any]:
        """This rank's part of the module's state."""
        with self._session.hooks.suspend():
            return module_state(self._session.module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part of an optimizer's state."""
        inner = getattr(optimizer, "optimizer", optimizer)  # Lightning may pass its wrapper
        with self._session.hooks.suspend():
            return next((mine.state_dict() for mine in self._optimizers if mine.optimizer is inner), {})

    def save(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Mapping[str, Any] | None = None, *, seed: int
    ) -> None:
        """Writes a checkpoint. Called by every rank with the same path.

        Args:
            checkpoint: Lightning's checkpoint, with this rank's part of the states of model and optimizers.
            path: A path or URL.
            storage_options: For the file system of a URL.
            seed: From which the stages' random numbers derive.
        """
        module, group = self._session.module, self._topology.control_group
        if has_failed() and not have_all_stopped_at(module.trainer.global_step, group):
            # Hooks that run on an exception ask for it; the others are on their way out, each at another place of the step.
            report_unsaved(path, module.trainer.global_rank)
            return
        self._remove_linked()
        location = Location.of(path, storage_options)
        check_seen_by_all(location, self._topology.num_stages)
        plan = dataclasses.asdict(self._session.plan)
        with self._session.hooks.suspend():
            names = list(module.state_dict())
            checkpoint = without_foreign_extras(checkpoint, module)
            checkpoint[ENTRY] = {**self._origin, "plan": plan, "rng": portable_rng(rng_state()), "seed": seed}
            self._check_common(checkpoint)
            if self._as_folder:
                checkpoint = self._folder_like(checkpoint)
            if location.path is None:
                self._saver.wait()
                save = save_folder_at if self._as_folder else save_file_at
                save(location, checkpoint, names, self._topology)
                return
            in_background = self._in_background and not has_failed() and module.trainer.state.status == TrainerStatus.RUNNING
            if self._as_folder:
                parts = taken_parts(checkpoint, names)
                write = folder_writer(parts, checkpoint, copied=in_background)
            else:
                write = file_writer(whole_checkpoint(checkpoint, names, self._topology), copied=in_background)
        if in_background:
            self._saver.start(location.path, write, moment=batch_counter(module.trainer, "training_step"))
        else:
            self._saver.save(location.path, write, group)

    def _check_common(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuses what an optimizer keeps beside the states of its parameters where it differs between the stages."""
        states = checkpoint.get("optimizer_states", [])
        common = [mine.common_state(state) for mine, state in zip(self._optimizers, states, strict=False)]
        check_agreement(
            self._topology.control_group,
            [{key: text_of(value) for key, value in entries.items()} for entries in common],
            UnsupportedError(
                "The optimizer's state cannot be saved: what belongs to no parameter is not the same on all stages.",
                where=", ".join(type(mine.optimizer).__name__ for mine in self._optimizers),
                expected="counters and the like, which are the same whatever parameters an optimizer has",
                todo="Keep it in the state of the parameters (optimizer.state[parameter]).",
            ),
        )

    def _folder_like(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint as a folder can have it."""
        if any_rank(any(mine.get("state") for mine in checkpoint.get("optimizer_states", [])), self._topology):
            return checkpoint
        # A folder has no empty dicts, and torch wants one: such states lie beside the tensors.
        states = checkpoint.pop("optimizer_states", [])
        return {**checkpoint, **{f"optimizer_{index}": state for index, state in enumerate(states)}}

    def load(self, path: str | Path, *, weights_only: bool | None) -> dict[str, Any]:
        """Reads a checkpoint but for the optimizers' states. Called by every rank with the same path."""
        self._saver.wait()
        self._restored_from = Location.of(path)
        check_seen_by_all(self._restored_from, self._topology.num_stages)
        if self._restored_from.path is not None:
            recover(self._restored_from.path)
        if weights_only is None:
            weights_only = weights_only_of_run()
        with self._session.hooks.suspend():
            into = self._session.overwritable()
            return read_checkpoint(self._restored_from, self._session.module, weights_only=weights_only, into=into)

    def load_model(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Restores the module from what was read."""
        with self._session.hooks.suspend():
            load_model(self._session.module, checkpoint["state_dict"], strict=strict)
            self._session.materialise_rest(checkpoint["state_dict"].keys(), draws=ENTRY not in checkpoint)

    def load_optimizers(self, checkpoint: Mapping[str, Any], *, is_resumed: bool) -> int | None:
        """Restores the optimizers.

        Args:
            checkpoint: What was read.
            is_resumed: Whether a run goes on; else a trial is over, and the run begins.

        Returns:
            The seed that the run goes on with; None where the checkpoint has none, or no run goes on.
        """
        assert self._restored_from is not None
        module = self._session.module
        self._session.restore_groups(module.trainer)
        load_optimizers(self._restored_from, checkpoint, self._optimizers)
        entry = checkpoint.get(ENTRY, {})
        if "rng" not in entry or not is_resumed:  # a converted checkpoint may have our entry, but not this
            return None
        # A resumed run shuffles and draws as the uninterrupted one would have.
        self._rng = usable_rng(entry["rng"])
        set_rng_state(self._rng)
        seed: int | None = entry.get("seed")
        return seed

    def begin_training(self) -> None:
        """Called once a run's dataloaders have been made, before its first batch."""
        loop = self._session.module.trainer.fit_loop
        if self._rng is not None and loop.restarted_mid_epoch and not loop.epoch_loop.batch_progress.is_last_batch:
            # The iterator over the rest of the epoch has drawn numbers, and that of the whole epoch had done so before.
            set_rng_state(self._rng)
        self._rng = None

    # ------------------------------------------------------------------ what becomes of checkpoints

    def is_started(self, path: str | Path) -> bool:
        """Whether a checkpoint may still be being written; the same on every rank."""
        return self._saver.is_started(Path(path))

    def remove(self, path: Path) -> None:
        """Removes a checkpoint, once those that were started before are written. Called by rank 0.

        One that a link leads to stays until the link leads elsewhere or the next checkpoint: the link may be the last one.
        """
        if is_linked(path):
            self._linked.append(path)
        else:
            self._saver.when_saved(partial(remove, path))

    def link(self, target: str | Path, path: str | Path) -> None:
        """Makes a link to a checkpoint, once it is written. Called by rank 0."""
        self._saver.when_saved(partial(link, Path(target), Path(path)))
        self._remove_linked()

    def end(self) -> None:
        """Waits for what is being written. Called by every rank."""
        self._saver.wait()
        self._remove_linked()

    def _remove_linked(self) -> None:
        paths, self._linked = self._linked, []
        for path in paths:
            self._saver.when_saved(partial(remove, path))
