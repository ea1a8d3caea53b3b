"""The rest of a step after the model's call (its *tail*), run for single microbatches.

A microbatch can go back through the stages before the others have come forward only where the batch's loss is a sum over
microbatches. Then the tail runs once for each microbatch, for its gradient only: it is a dry run, which leaves nothing behind,
draws its part of what the whole batch draws, and reads values of the batch as they are for the whole (``runtime.batch_reads``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.independence.division import cut
from lightning_fxpipe.metrics.step_log import LogEntry, StepLog
from lightning_fxpipe.microbatch.draws import BatchDraws
from lightning_fxpipe.microbatch.loss_weights import (
    Finding,
    LossOptions,
    Verdict,
    compare,
    loss_weights,
)
from lightning_fxpipe.pytree.sizes import held_number, plain_numbers
from lightning_fxpipe.reporting.wording import error_words
from lightning_fxpipe.rng import rng_state, same_rng, set_rng_state
from lightning_fxpipe.runtime.attributes import StepAttributes
from lightning_fxpipe.runtime.batch_reads import BatchReads
from lightning_fxpipe.runtime.region_in_place import region_in_place
from lightning_fxpipe.runtime.region_pass import Leg, PassSetup
from lightning_fxpipe.runtime.result_gradients import ResultGradients
from lightning_fxpipe.tracing.prelude import dry_run
from lightning_fxpipe.tracing.trace import TracedRegion
from lightning_fxpipe.user_code.for_microbatch import NeedsWholeBatch, for_microbatch
from lightning_fxpipe.user_code.frames import raising_source
from lightning_fxpipe.user_code.members import Members
from lightning_fxpipe.user_code.snapshot import Snapshot, user_state
from lightning_fxpipe.user_code.step import Step, loss_of
from lightning_fxpipe.user_code.step_code import may_differ_between_batches
from lightning_fxpipe.user_code.undo import UndoneRuns, undo_after


class FillsInPlace(NeedsWholeBatch):
    """Code before the model's call writes to a tensor that the model reads, for which the stages keep gradients' graphs."""

    does = "writes in place, before the model's call, to a tensor that the model reads"


class FailsForMicrobatch(NeedsWholeBatch):
    """A loss may need a sample of each class, which a batch has and its microbatches do not."""

    does = "fails for a microbatch"


@dataclass(frozen=True, kw_only=True)
class TailRun:
    """Findings of a dry run of the step.

    Attributes:
        loss: Its loss; None where it returns none.
        value: The value of its loss, to be read later.
        log: What it logs.
        num_samples: How many it ran for.
        does_more: Whether it does anything else.
        has_changed_any: Whether it has changed anything that stays.
    """

    loss: Tensor | None
    value: float | Tensor
    log: StepLog
    num_samples: int
    does_more: bool
    has_changed_any: bool

    def logged_losses(self, value: float, logged: Sequence[float]) -> tuple[LogEntry, ...] | None:
        """Returns the logged values without the loss, if the step does nothing but log; else None.

        Args:
            value: The value of its loss.
            logged: What it has logged.
        """
        entries = self.log.entries_with(logged)
        if self.does_more or self.loss is None or not all(self._is_of_loss(entry, value) for entry in entries):
            return None
        # What is left is the same for each part of a batch, and for the whole.
        return tuple(replace(e, value=0.0, num_samples=None if e.num_samples is None else 0) for e in entries)

    def _is_of_loss(self, entry: LogEntry, value: float) -> bool:
        is_loss = entry.metric is None and (entry.value == value or entry.value != entry.value and value != value)
        return is_loss and entry.num_samples in (None, self.num_samples)


def read_runs(runs: Sequence[TailRun]) -> list[tuple[float, tuple[LogEntry, ...] | None]]:
    """Returns for each run the value of its loss, and the result of :meth:`TailRun.logged_losses`."""
    values, *logged = plain_numbers([run.value for run in runs], *(run.log.values for run in runs))
    return [(value, run.logged_losses(value, own)) for run, value, own in zip(runs, values, logged, strict=True)]


@dataclass(frozen=True, kw_only=True)
class StepTail:
    """Runs the step on single microbatches, whose region has run. Used on the last stage.

    Attributes:
        root: The LightningModule.
        log: Collects what the step logs; its runs here have logs of their own.
        step: The step.
        batch: The batch.
        batch_sizes: Values of the region's symbols for it.
        microbatches: The batch, split.
        traced: The region.
        setup: How it is cut.
        values: Its inputs and draws for the whole batch.
        rng_at_start: State of the generators when the step began.
        rng_after_prelude: State of the generators when it came to the region.
        draws: Makes what the step draws.
        attributes: What the step can change, as it was when the step began.
        members: The LightningModule's, listed when the step came to the region.
        versions: How often tensors that the model reads had been written to then.
    """

    root: nn.Module
    log: StepLog
    step: Step
    batch: Any
    batch_sizes: Mapping[Any, int]
    microbatches: Sequence[Any]
    traced: TracedRegion
    setup: PassSetup
    values: Sequence[Tensor | None]
    rng_at_start: dict[str, Any]
    rng_after_prelude: dict[str, Any]
    draws: BatchDraws
    attributes: StepAttributes | None
    members: Members
    versions: Mapping[str, int]

    @cached_property
    def prelude_draws(self) -> bool:
        """True if the step draws before it comes to the region; a microbatch's, where the batch's has not, does more."""
        return not same_rng(self.rng_at_start, self.rng_after_prelude)

    @cached_property
    def sizes(self) -> list[int]:
        """Samples in each microbatch."""
        return [leg.part.size for leg in self.setup.legs for _ in range(leg.part.count)]

    @cached_property
    def _places(self) -> list[tuple[Leg, int, int]]:
        """Lists for each microbatch its leg, its number there, and its first sample."""
        legs = [(leg, index) for leg in self.setup.legs for index in range(leg.part.count)]
        starts = accumulate(self.sizes, initial=0)
        return [(leg, index, start) for (leg, index), start in zip(legs, starts, strict=False)]

    def state(self) -> Snapshot:
        """Returns a snapshot of all that the runs may change, except attributes of submodules."""
        return user_state(self.root, self.step.function, enters_modules=False)

    def undone_runs(self) -> UndoneRuns:
        """Undoes all runs of a batch."""
        before = None if self.attributes is None else self.attributes.still()
        return UndoneRuns(self.members, self.root, self.step.function, before=before)

    def run(self, number: int, results: Sequence[Tensor], runs: UndoneRuns | None = None) -> TailRun:
        """The step on a microbatch, as a dry run.

        Args:
            number: Of the microbatch in the batch.
            results: What the last stage gave for it.
            runs: Undoes it; None: it is undone by itself, whatever it changes.
        """
        leg, index, start = self._places[number]

        def region() -> list[Tensor]:
            return self.setup.run_tail(results, lambda i: self._cut_input(i, leg, index))

        return self._run(self.microbatches[number], leg.sizes, (start, leg.part.size), region, runs, is_first=number == 0)

    def compare(
        self, joined: Sequence[Tensor], options: LossOptions, weights: Sequence[float], *, undoes_together: bool = False
    ) -> Finding:
        """Finds out whether the batch's loss is a sum over its microbatches, and if the step does more; nothing is left behind.

        Args:
            joined: What the last stage gave for the batch.
            options: What the user says about the loss.
            weights: Factor of each microbatch's loss.
            undoes_together: Whether the step has changed nothing so far: one look at the end shows that it still does not.
        """
        gradients = ResultGradients(joined, self.setup.joined_specs)
        try:
            with torch.enable_grad():
                joined = gradients.given(joined)
                whole, *parts = (undoes_together and self._runs_that_change_nothing(joined)) or self._runs(joined, None)
        except NeedsWholeBatch as error:
            why = f", {error.observed}" if error.observed else ""
            return Finding(verdict=Verdict.DIFFERS, observed=f"the step {error.does} in {error.where}{why}")
        if whole.loss is None:  # the step skips the batch
            return Finding(verdict=Verdict.UNCLEAR)
        (value, logged), *of_parts = read_runs([whole, *parts])
        found = compare(value, [loss for loss, _ in of_parts], self.sizes, options, weights, whole.loss.dtype)
        if found.verdict is Verdict.FITS and gradients.are_looked_at:
            assert found.reduction is not None
            factors = weights if options.weight is not None else loss_weights(found.reduction, self.sizes)
            if differs := gradients.difference(whole.loss, [part.loss for part in parts], factors):
                found = replace(found, verdict=Verdict.DIFFERS, observed=differs)
        only_logs = logged is not None and all(own == logged for _, own in of_parts)
        return replace(
            found,
            only_logs_loss=only_logs and not may_differ_between_batches(self.root, self.step.function),
            changes_nothing=not any(run.has_changed_any for run in (whole, *parts)),
            unused=gradients.unused(whole.loss),
        )

    def _runs_that_change_nothing(self, joined: Sequence[Tensor]) -> list[TailRun] | None:
        """Runs like :meth:`_runs`; returns None if a run has changed anything, which later ones have then met."""
        with undo_after(self.root, self.step.function) as undone, self.undone_runs() as runs:
            found = self._runs(joined, runs)
        has_changed_any = undone.has_changed_any or runs.has_assigned or any(run.has_changed_any for run in found)
        return None if has_changed_any else found

    def _runs(self, joined: Sequence[Tensor], runs: UndoneRuns | None) -> list[TailRun]:
        """The step on the whole batch, and on each microbatch; ``runs`` as for :meth:`run`."""
        samples = (0, sum(self.sizes))
        region = partial(self.setup.run_tail, joined, self.values.__getitem__)
        whole = self._run(self.batch, self.batch_sizes, samples, region, runs, is_first=True)
        return [whole, *(self._part(number, self._cut(joined, number), runs) for number in range(len(self.sizes)))]

    def _part(self, number: int, results: Sequence[Tensor], runs: UndoneRuns | None) -> TailRun:
        """Runs the step as :meth:`run`, after the whole batch. Raises :class:`FailsForMicrobatch`."""
        try:
            return self.run(number, results, runs)
        except FxPipeError:
            raise
        except Exception as error:
            raise FailsForMicrobatch(
                "The step fails for a microbatch, but not for the whole batch.",
                where=raising_source(error),
                observed=error_words(error),
            ) from error

    def _cut_input(self, position: int, leg: Leg, index: int) -> Tensor | None:
        value = self.values[position]
        return value if value is None else cut(value, self.setup.input_dims[position], leg.row(index), leg.rows)

    def _cut(self, joined: Sequence[Tensor], number: int) -> list[Tensor]:
        leg, index, _ = self._places[number]
        return [
            cut(tensor, dim, leg.row(index), leg.rows, num_rows=self.setup.num_rows)
            for tensor, dim in zip(joined, self.setup.joined_dims, strict=True)
        ]

    def _run(
        self,
        batch: Any,
        sizes: Mapping[Any, int],
        samples: tuple[int, int],
        outputs: Callable[[], list[Tensor]],
        runs: UndoneRuns | None,
        *,
        is_first: bool,
    ) -> TailRun:
        """The step for a part of the batch, as a dry run.

        Args:
            batch: The part.
            sizes: Values of the region's symbols for it.
            samples: Where it begins in the batch, and how many it has.
            outputs: Gives the region's for it.
            runs: Undoes it; None: it is undone by itself.
            is_first: Whether what it draws begins with what the step draws.
        """
        at_region: dict[str, Any] | None = None

        def region(_: Sequence[Tensor]) -> list[Tensor]:
            nonlocal at_region
            at_region = self.rng_at_start
            if self.prelude_draws:
                if is_first:
                    set_rng_state(self.rng_after_prelude)
                at_region = rng_state()
            if self.traced.held.versions() != self.versions:
                raise FillsInPlace(
                    f"The {self.step.kind.value} {FillsInPlace.does}.",
                    where=getattr(self.step.function, "__qualname__", self.step.kind.value),
                    observed="the step runs again for each microbatch, whose backward pass needs the original tensor",
                    expected="a new tensor instead of an in-place change",
                    todo='Assign a new tensor, or set FxPipeStrategy(schedule="gpipe").',
                )
            return outputs()

        function, log = self.step.function, self.log.like()
        undoing = None if runs is None else runs.one()
        with dry_run(
            self.root, function, (batch, *self.step.rest), {}, undoing=undoing, logging=self.log.redirected(log)
        ) as again:
            with unwatched_torch():
                set_rng_state(self.rng_at_start)
            self.draws.begin_microbatch(*samples)
            in_place = region_in_place(
                self.root,
                self.traced,
                sizes,
                device_type=self.setup.device.type,
                arguments=(again.args[0], again.args[2:]),
                draws=self.draws,
                inputs=lambda args, kwargs: [],
                run=region,
            )
            reads = nullcontext() if batch is self.batch else BatchReads(again.args[0], self.batch)
            with self.step.context(), reads, in_place as watch, for_microbatch():
                result = function(*again.args)
            with unwatched_torch():
                draws = at_region is not None and not same_rng(at_region, rng_state())
        loss = None if result is None else loss_of(result)
        gives_more = isinstance(result, dict) and len(result) > 1
        return TailRun(
            loss=loss,
            value=float("nan") if loss is None else held_number(loss),
            log=log,
            num_samples=samples[1],
            does_more=draws or gives_more or watch.has_read_values or again.has_changed_any or again.has_spoken,
            has_changed_any=again.has_changed_any,
        )
