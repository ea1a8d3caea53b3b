"""The passes of the running batch through the stages, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe.distributed.commands import Command, Commands, as_bits, from_bits
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.metrics.step_log import LogEntry
from lightning_fxpipe.recording.recorder import Recorder
from lightning_fxpipe.runtime.batch_gradients import BatchGradients, ParkedLoss
from lightning_fxpipe.runtime.known_numbers import KnownNumbers
from lightning_fxpipe.runtime.one_f_one_b import InterleavedPass
from lightning_fxpipe.runtime.pass_setup import PassSetups
from lightning_fxpipe.runtime.region_pass import PassSetup, RegionPass
from lightning_fxpipe.runtime.schedule_choice import Interleaving
from lightning_fxpipe.runtime.stage_changes import StageChanges
from lightning_fxpipe.runtime.stage_trace import StageTrace
from lightning_fxpipe.runtime.step_tail import StepTail
from lightning_fxpipe.user_code.members import Members
from lightning_fxpipe.user_code.step import Step, loss_of
from lightning_fxpipe.user_code.undo import undo_after


class BatchPasses:
    """Makes them, and runs their backward passes when the last stage asks for them. Made by every rank of the pipeline.

    Args:
        root: The LightningModule, with this rank's stage on its device.
        members: Its members, listed anew for each batch.
        topology: This rank's place.
        setups: Makes the stages.
        interleaving: Whether a batch goes forward and backward by turns.
        commands: What the last stage tells the others.
        recorder: Notes what runs.

    Attributes:
        has_ended_step: On the last stage, whether the region was all there is to run of the step.
    """

    def __init__(
        self,
        root: nn.Module,
        members: Members,
        topology: Topology,
        setups: PassSetups,
        interleaving: Interleaving,
        commands: Commands,
        recorder: Recorder,
    ) -> None:
        self._recorder = recorder
        self._root = root
        self._members = members
        self._topology = topology
        self._setups = setups
        self._interleaving = interleaving
        self._commands = commands
        self._forward: RegionPass | None = None
        self._interleaved: InterleavedPass | None = None
        self._installed: list[float] = []  # by which factor the gradients of the latter count, where a backward pass says so
        self._numbers = KnownNumbers()  # of that backward pass
        self.has_ended_step = False
        self._changes_nothing = False  # the step's tail, and what else runs beside it; as the batch after a look has shown

    @property
    def have_run(self) -> bool:
        """True if the batch has been through the stages."""
        return self._forward is not None or self._interleaved is not None

    @property
    def gradients_are_in_place(self) -> bool:
        """True if the batch's gradients are there already, before its backward pass."""
        return self._interleaved is not None and self._interleaved.gradients.are_in_place

    # ------------------------------------------------------------------ forward

    def run(
        self, setup: PassSetup, values: list[Tensor | None], step: Step, trace: StageTrace, tail: StepTail | None
    ) -> tuple[bool, tuple[Tensor, ...] | None]:
        """The region's call in the running batch: forward, or forward and backward at once. Called by every rank.

        Args:
            setup: The stage and the microbatches.
            values: The region's inputs and draws.
            step: The step.
            trace: What is called.
            tail: On the last stage, the rest of the step, where :meth:`may_interleave`.

        Returns:
            Whether it counts, and on the last stage the joined results. It does not count where a try shows that samples
            notice each other: the batch is not cut any more. There are no results where the step is over, see
            :attr:`has_ended_step`.
        """
        self._commands.expect()
        step.drop_outdated()
        if self._must_look(step, setup, trace) and not self._look(setup, values, step, trace, tail):
            return False, None
        if self.may_interleave(step) and self._interleaving.is_on and setup.can_be_interleaved:
            return True, self._run_interleaved(setup, values, step, tail)
        return self._run_forward(setup, values, step, trace)

    def may_interleave(self, step: Step) -> bool:
        """Returns True if a batch may run forward and backward at once."""
        return step.is_training and self._interleaving.may_be

    def _must_look(self, step: Step, setup: PassSetup, trace: StageTrace) -> bool:
        """Returns True if a look at a batch is to show, before it runs, whether it can; the same on every rank."""
        if not self.may_interleave(step) or not setup.can_be_interleaved:
            return False
        return self._interleaving.must_look() or not self._setups.is_proven(trace, setup)

    def _look(
        self, setup: PassSetup, values: list[Tensor | None], step: Step, trace: StageTrace, tail: StepTail | None
    ) -> bool:
        """The region's call in the running batch once more, without gradients and undone. Called by every rank.

        Returns:
            Whether samples do not notice each other; otherwise the batch is not cut any more.
        """
        tries = None if self._setups.is_proven(trace, setup) else StageChanges(self._root)
        changed_nothing, self._changes_nothing = self._changes_nothing, False
        one = RegionPass(setup, values, random_key=step.random_key, training=False, tries=tries, measures=True)
        with self._recorder.undivided("check a batch"), undo_after(self._root), torch.no_grad():
            joined = one.run_forward()
            buffers = [] if tries is None else tries.changed()
        if tries is not None and not self._setups.prove(trace, one.obstacle, buffers):
            return False
        self._interleaving.decide(setup, one.saved_bytes, self._members.own_parameters(), tail, joined or ())
        # What has shown so once shows it again with each batch, where one look at the end of it shows any change.
        self._changes_nothing = changed_nothing and self._interleaving.changes_nothing
        return True

    def _run_interleaved(
        self, setup: PassSetup, values: list[Tensor | None], step: Step, tail: StepTail | None
    ) -> tuple[Tensor, ...] | None:
        """The region's call in the running batch, forward and backward. Called by every rank.

        Raises:
            UnsupportedError: The stage changes something in this batch only.
        """
        may_end = self._interleaving.only_logs_loss
        must_look = self._interleaving.changes_nothing and not self._changes_nothing
        before = tail.state() if tail is not None and must_look else None
        self._interleaved = InterleavedPass(
            setup=setup,
            values=values,
            random_key=step.random_key,
            gradients=BatchGradients(self._members.own_parameters(), may_stay=step.gradients_may_stay),
            tail=tail,
            weights=() if tail is None else self._interleaving.weights(tail),
            scale=1.0 if tail is None else step.scale(),
            results=self._interleaving.trained_results(setup),
            keeps_results=not may_end,
            undoes_together=self._changes_nothing,
        )
        joined = self._interleaved.run()
        if before is not None:
            self._changes_nothing = before.is_current()
        elif self._interleaved.has_assigned:
            self._changes_nothing = False
            self._interleaving.note_change()
        self.has_ended_step = may_end and setup.is_last and not self._interleaved.does_more
        if setup.is_last and not self.has_ended_step:
            self._interleaved.gradients.park()  # the step's code goes on
        # The look at the end of the batch cannot tell the step's changes from the model's, and has undone both.
        is_late = self._interleaved.has_assigned
        lacks_results = joined is None and not self.has_ended_step
        if not self._runs_again(lacks_results or is_late):
            return joined
        again = RegionPass(setup, values, random_key=step.random_key, training=False)
        with self._recorder.undivided("repeat forward"), undo_after(self._root), torch.no_grad():
            before = None if tail is None else tail.state()
            results = again.run_forward()
            if before is not None and not before.is_current():
                raise _changes_late(step, before.changed_names())
        return results if joined is None else joined

    def _runs_again(self, must: bool) -> bool:
        """Returns True if the batch runs forward again, as the last stage says. Called by every rank."""
        if not self._topology.is_last:
            return self._commands.hears_of(Command.FORWARD)
        if must:
            self._commands.tell(Command.FORWARD)
        return must

    def _run_forward(
        self, setup: PassSetup, values: list[Tensor | None], step: Step, trace: StageTrace
    ) -> tuple[bool, tuple[Tensor, ...] | None]:
        """The region's call in the running batch, forward. Called by every rank.

        Returns:
            Whether it counts, and the joined results. It does not where a first try shows that samples notice each other.
        """
        tries = None if self._setups.is_proven(trace, setup) else StageChanges(self._root)
        one = self._forward = RegionPass(
            setup,
            values,
            random_key=step.random_key,
            training=step.is_training,
            announce=lambda retains, results: self._commands.tell(Command.BACKWARD, retains, *as_bits(results)),
            tries=tries,
        )
        joined = one.forward()
        if tries is not None and not self._setups.prove(trace, one.obstacle, tries.changed()):
            self._forward = None
            tries.restore()
            return False, None
        return True, joined

    # ------------------------------------------------------------------ backward

    @property
    def losses(self) -> list[float | Tensor]:
        """Losses of the microbatches, to be read, if the batch has run forward and backward; on the last stage."""
        return [] if self._interleaved is None else self._interleaved.losses

    def with_parked_loss(self, step: Step, output: Any, value: float, losses: Sequence[float]) -> Any:
        """Returns the step's result; if the batch has run forward and backward, with a loss that brings the gradients.

        Args:
            step: The step.
            output: What it returned.
            value: The value of the loss in it.
            losses: :attr:`losses`, which have been read.

        Raises:
            UnsupportedError: The loss is not made of those of the microbatches.
        """
        loss = loss_of(output)
        assert loss is not None
        if self._interleaved is None:
            return output
        self._interleaved.check(value, losses, loss.dtype, step)
        parked = self._park(loss, self._interleaved)
        return {**output, "loss": parked} if isinstance(output, dict) else parked

    def logged_loss(self) -> tuple[Tensor, float, list[LogEntry]]:
        """The loss of a step that has ended with the region, which brings the gradients; its value; and what it logs."""
        assert self._interleaved is not None
        loss, value, entries = self._interleaved.logged_loss()
        return self._park(loss, self._interleaved), value, entries

    def _park(self, loss: Tensor, interleaved: InterleavedPass) -> Tensor:
        def install(gradient: Tensor) -> None:
            factor = self._numbers.read(gradient) / interleaved.scale
            self._installed.append(factor)
            interleaved.gradients.install(factor)

        anchor = torch.zeros((), requires_grad=True)
        parked: Tensor = ParkedLoss.apply(anchor, loss.detach(), install)  # type: ignore[no-untyped-call]
        return parked

    def lead_backward(self, run: Callable[[], None], *, retains: bool) -> None:
        """Runs ``run``, which calls backward on the batch's loss. Called on the last stage, and :meth:`follow` on the others.

        Args:
            run: Calls backward.
            retains: Whether what the stages saved is kept for another backward pass.
        """
        if self._forward is not None:
            self._forward.retains = retains
        self._installed, self._numbers = [], KnownNumbers()
        follows = self._interleaved is not None and self._topology.device != torch.device("cpu")
        with self._numbers if follows else nullcontext():
            run()
        self._commands.tell(Command.DONE, *self._installed[:1])

    def follow(self) -> None:
        """Runs the backward passes that the last stage asks for, until it asks for no more. Called on the other stages."""
        while True:
            command, numbers = self._commands.hear()
            if command is Command.DONE:
                for factor in numbers:
                    assert self._interleaved is not None
                    self._interleaved.gradients.install(factor)
                return
            assert self._forward is not None
            self._forward.retains = bool(numbers[0])
            self._commands.expect()
            self._forward.backward(from_bits(numbers[1:]))

    def end_batch(self) -> None:
        """Drops what the batch's passes have kept."""
        self._forward = self._interleaved = None
        self.has_ended_step = False


def _changes_late(step: Step, names: Sequence[str]) -> UnsupportedError:
    return UnsupportedError(
        "The model's forward changes a value in this batch that it did not change in earlier batches, which 1F1B does not "
        "support.",
        where=getattr(step.function, "__qualname__", step.kind.value),
        observed=", ".join(names),
        expected="changes to the same values as in earlier batches, or to attributes of the running module",
        todo='Set FxPipeStrategy(schedule="gpipe").',
    )
