"""Choice between the two orders of training batches: all forward first, or forward and backward by turns
(``runtime.one_f_one_b``).

They can where the loss is a sum over microbatches. Where the user has asked for it, that is found out on the first batch before
it runs; a loss that is none is an error. With ``schedule="auto"`` they do where it is worth it: where the activations of all
microbatches would take much of the memory that is left. So the first batch goes through the stages once more, without gradients
and without leaving anything behind.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from lightning_fxpipe.distributed.agreement import any_rank, of_last_stage
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.microbatch.loss_weights import Finding, LossOptions, LossReduction, Verdict
from lightning_fxpipe.planner.load import ADAM_BYTES_PER_BYTE
from lightning_fxpipe.runtime.region_pass import PassSetup
from lightning_fxpipe.runtime.step_tail import StepTail
from lightning_fxpipe.schedules.by_name import Schedule
from lightning_fxpipe.stages.memory import memory_for_rank
from lightning_fxpipe.tracing.trace_log import TraceLog

# Where the step's run on the whole batch is left out, its loss is compared with that of the microbatches every so many batches.
_BATCHES_BETWEEN_LOOKS = 64
# Of the memory that is left, what activations may take before they are worth another schedule.
_TIGHT_SHARE = 0.5
_GIB = 2**30

_logger = logging.getLogger("lightning_fxpipe")


class Interleaving:
    """Decides it. Made by every rank.

    Args:
        schedule: What the user wants, or the plan was chosen for.
        is_chosen: Whether it is the latter: it is worth it, and another will do where the loss does not allow it.
        options: What the user says about the loss.
        topology: This rank's place.
        log: Is told of the choice.
        optimizer_bytes_per_byte: What the optimizer will keep here for each byte of a parameter that trains.

    Attributes:
        may_be: Whether batches run so, or a look at the next one may show that they can.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        is_chosen: bool = False,
        options: LossOptions,
        topology: Topology,
        log: TraceLog,
        optimizer_bytes_per_byte: float = ADAM_BYTES_PER_BYTE,
    ) -> None:
        self._name = "1F1B" if schedule.name in ("auto", "1f1b") else f'schedule="{schedule.name}"'
        self.may_be = schedule.alternates
        self._is_asked_for = self.may_be and schedule.name != "auto" and not is_chosen
        self._is_chosen = is_chosen
        self._options = options
        self._topology = topology
        self._log = log
        self._states_per_byte = 1 + optimizer_bytes_per_byte
        self._finding = Finding(verdict=Verdict.UNCLEAR)
        self._num_batches = 0  # since the last look

    @property
    def is_on(self) -> bool:
        """True if batches run so."""
        return self.may_be and self._finding.verdict is Verdict.FITS

    @property
    def only_logs_loss(self) -> bool:
        """True if the step did nothing with its loss but log it, when a batch was looked at."""
        return self._finding.only_logs_loss

    @property
    def changes_nothing(self) -> bool:
        """True if the step had changed nothing that stays, when a batch was looked at."""
        return self._finding.changes_nothing

    def note_change(self) -> None:
        """The step has changed something after all; on the last stage."""
        self._finding = replace(self._finding, changes_nothing=False)

    def must_look(self) -> bool:
        """Returns True if the next batch must be looked at. Called by every rank, once for a batch that may run so."""
        self._num_batches += 1
        return not self.is_on or (self.only_logs_loss and self._num_batches > _BATCHES_BETWEEN_LOOKS)

    def trained_results(self, setup: PassSetup) -> frozenset[int]:
        """Numbers of the joined results that have gradients, as far as a look at a batch has shown."""
        trained = (number for number, spec in enumerate(setup.joined_specs) if spec.requires_grad)
        return frozenset(trained) - self._finding.unused

    def weights(self, tail: StepTail) -> tuple[float, ...]:
        """Factor of each microbatch's loss in the batch's."""
        reduction = self._options.reduction or self._finding.reduction or LossReduction.MEAN
        return self._options.weights(reduction, tail.microbatches, tail.sizes)

    def decide(
        self,
        setup: PassSetup,
        saved_bytes: int,
        parameters: Sequence[nn.Parameter],
        tail: StepTail | None,
        joined: Sequence[Tensor],
    ) -> None:
        """Decides by what a look at a batch has shown. Called by every rank.

        Args:
            setup: The microbatches.
            saved_bytes: What autograd keeps on this rank for the backward pass of one of them.
            parameters: This rank's.
            tail: On the last stage, the rest of the step.
            joined: On the last stage, what the stages gave.

        Raises:
            UnsupportedError: The user has asked for it, and the loss is not made of those of the microbatches.
        """
        needed = saved_bytes * setup.num_microbatches
        is_wanted = self._is_asked_for or self._is_chosen or self.is_on
        if not is_wanted and not any_rank(self._is_tight(needed, parameters), self._topology):
            self.may_be = False
            _logger.debug('schedule="auto" selected "gpipe": all activations need %.2g GiB', needed / _GIB)
            return
        was_on, were_compared, self._num_batches = self.is_on, not self.only_logs_loss, 0
        found = None
        if tail is not None:
            found = tail.compare(joined, self._options, self.weights(tail), undoes_together=self.changes_nothing)
        finding = of_last_stage(found, self._topology)
        assert finding is not None
        if was_on and finding.verdict is Verdict.UNCLEAR:
            return
        self._finding = finding
        if self._finding.verdict is Verdict.DIFFERS:
            self._refuse(needed, may_go_on=not self._is_asked_for and were_compared)
        elif self.is_on and not (self._is_asked_for or self._is_chosen or was_on):
            self._log.inform(
                f'schedule="auto" selected "1f1b": GPipe would need {needed / _GIB:.2g} GiB of activations on the last stage, '
                "or most of the free memory on another."
            )

    def _is_tight(self, needed: int, parameters: Sequence[nn.Parameter]) -> bool:
        free = memory_for_rank(self._topology.device, self._topology.num_ranks)
        if free is None:
            return False
        # Gradients and the optimizer's states are still to come.
        coming = self._states_per_byte * sum(
            p.numel() * p.element_size() for p in parameters if p.requires_grad and p.grad is None
        )
        return needed > _TIGHT_SHARE * (free - coming)

    def _refuse(self, needed: int, *, may_go_on: bool) -> None:
        observed = self._finding.observed
        if may_go_on and self._is_chosen:
            self.may_be = False
            self._log.warn(
                f"{self._name} was selected, but the loss does not decompose into microbatch losses ({observed}). Training "
                'runs in GPipe order instead, which needs more time and memory. Set FxPipeStrategy(schedule="gpipe") to plan '
                "for that order, or describe the loss with loss_reduction or loss_weight."
            )
            return
        if may_go_on:
            self.may_be = False
            self._log.warn(
                f"The activations of a batch may need most of the free memory ({needed / _GIB:.2g} GiB on the last stage), "
                f"and 1F1B is not possible: the loss does not decompose into microbatch losses ({observed}). If you run out "
                "of memory, use a smaller batch with accumulate_grad_batches, or enable activation checkpointing."
            )
            return
        todo = (
            'Set FxPipeStrategy(schedule="gpipe"), which supports any loss. If the loss is a mean over tokens or other items '
            "instead of samples, set loss_weight to a function that counts them."
        )
        if self._finding.reduction is not None and self._options.reduction is not None:
            todo = f"Set FxPipeStrategy(loss_reduction={self._finding.reduction.value!r}), or omit the option."
        raise UnsupportedError(
            f"{self._name} does not support this loss: it does not decompose into microbatch losses.",
            observed=observed,
            expected="a mean or a sum over samples, or a mean with the weights returned by loss_weight",
            todo=todo,
        )
