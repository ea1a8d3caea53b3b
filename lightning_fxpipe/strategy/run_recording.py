"""The recording of a run: which steps are noted, what becomes of them, and what of it reaches the user's loggers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from lightning_fxpipe._compat.loggers import logged_step
from lightning_fxpipe.distributed.agreement import of_last_stage
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.pictures.chrome_trace import trace_of
from lightning_fxpipe.pictures.html_page import html_of
from lightning_fxpipe.pictures.page import page_of_timelines
from lightning_fxpipe.pictures.replica_grid import ReplicaGrid
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.recording.expected import simulated
from lightning_fxpipe.recording.files import check_writable, write_recording
from lightning_fxpipe.recording.options import Recording
from lightning_fxpipe.recording.recorder import Recorder
from lightning_fxpipe.recording.steps import MeasuredStep, gathered
from lightning_fxpipe.reporting.messages import inform, warn
from lightning_fxpipe.simulation.timeline import Timeline

_NOTHING = nullcontext()
PAGE, TRACE = "index.html", "trace.json"
_NOTES = (
    "Below each measured step is a simulation of its schedule in which each action takes the median time of its kind and "
    "everything else takes no time.",
)

_FIRST_REPLICA = (
    "These are the ranks of replica 0. A gradient average includes the wait for the other replicas; its time is measured, not "
    "simulated."
)


class RunRecording:
    """Records the runs of a strategy. Made by every rank.

    What a step has shown is put together when the next one begins, or the run has ended well: nothing is sent within a step,
    and nothing at all for steps that are neither recorded nor logged.

    Args:
        given: What the user says.

    Attributes:
        recorder: Notes what this rank does.
    """

    def __init__(self, given: Recording | str | Path | None) -> None:
        self.recorder = Recorder()
        self._options = Recording.of(given)
        self._trainer: Any = None  # while a run of `fit` is on
        self._topology: Topology | None = None
        self._plan: PartitionPlan | None = None
        self._grid: ReplicaGrid | None = None
        self._num_steps = 0  # that have begun
        self._logged_step = 0  # the number of the running one to loggers
        self._measured: list[MeasuredStep] = []  # on the last stage's rank
        self._is_written = False

    def __deepcopy__(self, memo: dict[int, Any]) -> RunRecording:
        """One with the same options that has recorded nothing."""
        return RunRecording(self._options)

    # ------------------------------------------------------------------ a run

    def begin_run(
        self, trainer: Trainer, topology: Topology, plan: PartitionPlan | None = None, ranks_per_machine: int | None = None
    ) -> None:
        """Called by every rank before each run. Of several replicas the first is recorded.

        Args:
            trainer: The Trainer.
            topology: This rank's place.
            plan: Which stage holds what, for the page.
            ranks_per_machine: How many ranks are on each machine, for the page; None if unknown.

        Raises:
            UnsupportedError: The folder cannot be written; on every rank.
        """
        self.recorder.is_on = False
        self._trainer = None
        if self._options is None or trainer.state.fn != TrainerFn.FITTING or not topology.replicas.is_first:
            return
        problem = of_last_stage(check_writable(self._options.folder) if topology.is_last else None, topology)
        if problem is not None:
            raise UnsupportedError(
                "Cannot write the recording of the run.",
                where=str(self._options.folder),
                observed=problem,
                expected="a folder that rank 0, the process with the last stage, can create and write to",
                todo="Set FxPipeStrategy(record=...) to another folder.",
            )
        self._trainer, self._topology, self._plan = trainer, topology, plan
        count = topology.replicas.count
        grid = ReplicaGrid(num_replicas=count, placement=topology.placement, ranks_per_machine=ranks_per_machine)
        self._grid = grid if topology.replicas.are_several else None
        self._num_steps, self._measured, self._is_written = 0, [], False

    def begin_step(self) -> None:
        """Called by every rank before each training batch."""
        if self._trainer is None or self._topology is None:
            return
        self._end_step()
        self._logged_step = logged_step(self._trainer)
        self._num_steps += 1
        if self._is_chosen or self._may_be_logged:
            self.recorder.begin(self._topology.device)

    def during(self, words: str, *, trains: bool = True) -> AbstractContextManager[None]:
        """In the block this rank does a part of a step.

        Args:
            words: What it does.
            trains: Whether the step trains; no other is recorded.
        """
        return self.recorder.during(words) if trains and self.recorder.is_on else _NOTHING

    def end_run(self) -> None:
        """Writes what is not yet written. Called by every rank after a run that ended well; after another one, not every rank
        may come here, and the step that ran is lost.
        """
        if self._trainer is None or self._options is None:
            return
        ended_well = self._trainer.state.status == TrainerStatus.RUNNING
        if ended_well:
            self._end_step()
        self.recorder.is_on = False
        self._write()
        if ended_well and not self._is_written and self._topology is not None and self._topology.is_last:
            warn(
                f"Nothing was recorded: the run had {self._num_steps} steps, but the first step to record is "
                f"{self._options.first_step}, counted from 0. Set FxPipeStrategy(record=Recording(folder, first_step=...)) to "
                "an earlier step."
            )
        self._trainer = self._topology = None

    # ------------------------------------------------------------------ a step

    @property
    def _is_chosen(self) -> bool:
        """True if the step that runs is to be recorded."""
        return self._options is not None and self._num_steps - 1 in self._options.steps

    @property
    def _may_be_logged(self) -> bool:
        """True if loggers get something of the step that runs, if the optimizer steps in it; the same on every rank."""
        every: int = self._trainer.log_every_n_steps
        return every > 0 and (self._logged_step + 1) % every == 0

    def _end_step(self) -> None:
        """Puts together what the ranks have done, of a step that is recorded or logged. Called by every rank."""
        if not self.recorder.is_on or self._topology is None or self._options is None:
            return
        own = self.recorder.end()
        has_stepped = logged_step(self._trainer) != self._logged_step
        if not self._is_chosen and not has_stepped:
            return
        number = self._num_steps - 1
        step = gathered(own, self._topology, f"step {number}, measured")
        if step is None:
            return
        if has_stepped:
            self._log(step)
        if self._is_chosen:
            self._measured.append(step)
        if number == self._options.steps[-1]:
            self._write()

    def _log(self, step: MeasuredStep) -> None:
        found = {"fxpipe/peak_bytes": float(step.peak_bytes)}
        if step.bubble_fraction is not None:
            found["fxpipe/bubble_fraction"] = step.bubble_fraction
        for logger in self._trainer.loggers:
            logger.log_metrics(found, step=self._logged_step)

    def _write(self) -> None:
        """Writes the steps that are put together; a run does not end because that fails."""
        if self._options is None or not self._measured:
            return
        timelines, folder = [step.timeline for step in self._measured], self._options.folder
        expected = simulated(timelines)
        error = max(step.clock_error_seconds for step in self._measured)
        self._measured, self._is_written = [], True
        try:
            write_recording(
                [*timelines, *([expected] if expected else [])],
                folder,
                clock_error_seconds=error,
                pictures=_pictures(timelines, expected, self._plan, self._grid),
            )
        except OSError as reason:
            warn(f"The recording of the run cannot be written to {folder}: {reason}")
        else:
            inform(f"{len(timelines)} recorded steps are in {folder}: open {Path(folder) / PAGE} in a browser.")


def _pictures(
    measured: Sequence[Timeline], expected: Timeline | None, plan: PartitionPlan | None, grid: ReplicaGrid | None
) -> dict[str, str]:
    """Contents of the files that show a recording, by name: each measured step above the simulated one."""
    simulated_ones = [expected] if expected else []
    page = page_of_timelines(
        "Recorded steps",
        {timeline.label: [timeline, *simulated_ones] for timeline in measured},
        plan=plan,
        notes=_NOTES if grid is None else (*_NOTES, _FIRST_REPLICA),
        replicas=grid,
    )
    return {PAGE: html_of(page), TRACE: json.dumps(trace_of([*measured, *simulated_ones]))}
