"""One forward, one backward: each stage holds the activations of a few microbatches, not of all.

A microbatch can go back through the stages before the others have come forward only where the batch's loss is a sum over
microbatches. Then the step's code after the region (the *tail* of the step) runs once for each microbatch, for its gradient
only: it is a dry run, which leaves nothing behind, draws its part of what the whole batch draws, and reads values of the batch
as they are for the whole (``runtime.batch_reads``). What the step logs, counts
and returns comes from its one run on the whole batch, which goes on, without gradient, when the schedule is done. Its loss is
compared with that of the microbatches every time. Where the step only logs its loss, as most language models do, the
microbatches have told all there is to know: that run is left out, and the results of the whole batch are not kept for it.

Whether the loss is such a sum, and the step such a one, is found out before the first batch runs
(``runtime.schedule_choice``).

The schedule is 1F1B of PipeDream-Flush (Narayanan et al. 2021), which leaves no batch half-way and needs no second weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe.errors import FxPipeError, UnsupportedError
from lightning_fxpipe.independence.division import cut
from lightning_fxpipe.metrics.step_log import LogEntry, StepLog
from lightning_fxpipe.microbatch.draws import BatchDraws
from lightning_fxpipe.microbatch.loss_weights import (
    Finding,
    LossOptions,
    Verdict,
    compare,
    loss_weights,
    reaches,
    tolerance,
    weighted_sum,
    without_gradient,
)
from lightning_fxpipe.pytree.sizes import held_number, plain_numbers
from lightning_fxpipe.reporting.wording import error_words
from lightning_fxpipe.rng import isolated_rng, rng_state, same_rng, set_rng_state
from lightning_fxpipe.runtime.attributes import StepAttributes
from lightning_fxpipe.runtime.batch_gradients import BatchGradients
from lightning_fxpipe.runtime.batch_reads import BatchReads
from lightning_fxpipe.runtime.region_in_place import region_in_place
from lightning_fxpipe.runtime.region_pass import Leg, PassSetup, StageRun
from lightning_fxpipe.runtime.result_gradients import ResultGradients
from lightning_fxpipe.stages.shared_casts import sharing_casts
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
    """What a dry run of the step has shown.

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
        """What it logs, without the loss, where that is all it does; else None.

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


def _read(runs: Sequence[TailRun]) -> list[tuple[float, tuple[LogEntry, ...] | None]]:
    """Of each run the value of its loss, and what :meth:`TailRun.logged_losses` gives."""
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
        """Whether the step draws before it comes to the region; a microbatch's, where the batch's has not, does more."""
        return not same_rng(self.rng_at_start, self.rng_after_prelude)

    @cached_property
    def sizes(self) -> list[int]:
        """Samples in each microbatch."""
        return [leg.part.size for leg in self.setup.legs for _ in range(leg.part.count)]

    @cached_property
    def _places(self) -> list[tuple[Leg, int, int]]:
        """Of each microbatch its leg, its number there, and its first sample."""
        legs = [(leg, index) for leg in self.setup.legs for index in range(leg.part.count)]
        starts = accumulate(self.sizes, initial=0)
        return [(leg, index, start) for (leg, index), start in zip(legs, starts, strict=False)]

    def state(self) -> Snapshot:
        """What its runs may change, but for attributes of submodules."""
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
            with torch.set_grad_enabled(gradients.are_looked_at):
                joined = gradients.given(joined)
                whole, *parts = (undoes_together and self._runs_that_change_nothing(joined)) or self._runs(joined, None)
        except NeedsWholeBatch as error:
            why = f", {error.observed}" if error.observed else ""
            return Finding(verdict=Verdict.DIFFERS, observed=f"the step {error.does} in {error.where}{why}")
        if whole.loss is None:  # the step skips the batch
            return Finding(verdict=Verdict.UNCLEAR)
        (value, logged), *of_parts = _read([whole, *parts])
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
        )

    def _runs_that_change_nothing(self, joined: Sequence[Tensor]) -> list[TailRun] | None:
        """As :meth:`_runs`; None where they have changed anything, so that some have met what others had changed."""
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


@dataclass(kw_only=True, eq=False)
class InterleavedPass:
    """The region's one call in a training batch, forward and backward at once. Made by every rank.

    Attributes:
        setup: The stage and the microbatches.
        values: The region's inputs and draws for the whole batch.
        random_key: Identifies the batch within the run.
        gradients: Those of this rank's parameters.
        tail: On the last stage, the rest of the step.
        weights: On the last stage, the factor of each microbatch's loss in the batch's loss.
        scale: On the last stage, by which the loss is multiplied for its backward pass.
        keeps_results: Whether the step goes on with the results of the whole batch.
        undoes_together: Whether the step has shown that it changes nothing, nor does what else runs meanwhile: then one look
            at the end of the batch shows whether that is still so.
        has_assigned: After a run, whether it was not so; it is undone.
    """

    setup: PassSetup
    values: Sequence[Tensor | None]
    random_key: tuple[int | str, ...]
    gradients: BatchGradients
    tail: StepTail | None
    weights: Sequence[float]
    scale: float
    keeps_results: bool
    undoes_together: bool

    def __post_init__(self) -> None:
        self._run = StageRun(self.setup, self.values, self.random_key)
        self._runs: UndoneRuns | None = None
        self._results = self.setup.joining()
        self._done: dict[int, TailRun] = {}  # on the last stage, by number of the microbatch
        self.has_assigned = False

    def run(self) -> tuple[Tensor, ...] | None:
        """Runs all microbatches. Called by every rank of the pipeline.

        Returns:
            On the last stage the joined results, without gradient; None where they are not kept.
        """
        norms, casts = self.setup.norms.deferring(), sharing_casts(self.setup.device)
        with self.gradients.computing(), norms, casts, isolated_rng(), self._undone_runs():
            for leg in self.setup.legs:
                assert leg.interleaved is not None
                leg.interleaved().step(partial(self._one, leg))
        return self._results.take() if self.setup.is_last and self._results.are_complete else None

    @contextmanager
    def _undone_runs(self) -> Iterator[None]:
        if self.tail is None or not self.undoes_together:
            yield
            return
        with self.tail.undone_runs() as self._runs:
            yield
        self.has_assigned = self._runs.has_assigned
        self._runs = None

    @cached_property
    def _read(self) -> tuple[list[float], tuple[LogEntry, ...] | None]:
        """The losses, and what the step logs where it does no more than to log them; else None."""
        values, logged = zip(*_read(self._in_order()), strict=True)
        is_all = not self.has_assigned and all(own == logged[0] for own in logged)
        return list(values), logged[0] if is_all else None

    def _in_order(self) -> list[TailRun]:
        return [self._done[number] for number in sorted(self._done)]

    @property
    def losses(self) -> list[float | Tensor]:
        """Those of the microbatches, to be read together with what else there is to read; on the last stage, after a run."""
        known = vars(self).get("_read")
        return [run.value for run in self._in_order()] if known is None else known[0]

    @property
    def does_more(self) -> bool:
        """Whether a microbatch has shown that the step does more than to log its loss; on the last stage, after a run."""
        return self._read[1] is None

    def _one(self, leg: Leg, of: int, index: int, received: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """One microbatch through the stage ``of`` this index."""
        outputs, _ = self._run.compute(leg, self.setup.stages[of], index, received, state=None, training=True)
        if of != self.setup.last_stage:
            return tuple(output.contiguous() for output in outputs)
        number = leg.number(index)
        assert self.tail is not None
        if self.keeps_results:  # as they are before the step, which may change its own in place
            given = tuple(output.detach() for output in outputs)
            self._results.put(given, leg.row(index), leg.rows)
        trained = [output for output in outputs if output.requires_grad]
        ends = [get_gradient_edge(output) for output in trained]
        done = self.tail.run(number, outputs, self._runs)
        loss, weight = done.loss, self.weights[number]
        self._done[number] = done if loss is None else replace(done, loss=loss.detach())
        if loss is None or not weight:
            return without_gradient(trained, self.setup.device)
        weighted = loss.reshape(()) * (weight * self.scale)
        # Each output gets a gradient: the stage before waits for those of what it has sent.
        unused = [output for output, is_used in zip(trained, reaches(loss, ends), strict=True) if not is_used]
        return weighted + without_gradient(unused, self.setup.device) if unused or not trained else weighted

    def logged_loss(self) -> tuple[Tensor, float, list[LogEntry]]:
        """The batch's loss by its microbatches, its value, and what the step logs, where that is all that the step does."""
        losses, logged = self._read
        last = self._in_order()[-1].loss
        assert last is not None
        assert logged is not None
        total = weighted_sum(losses, self.weights)
        value = float(torch.full((), total, dtype=last.dtype, device="cpu"))  # rounded as the loss is
        num_samples = sum(self.tail.sizes) if self.tail is not None else 0
        entries = [replace(e, value=value, num_samples=None if e.num_samples is None else num_samples) for e in logged]
        return torch.full_like(last, total), value, entries

    def check(self, value: float, losses: Sequence[float], dtype: torch.dtype, step: Step) -> None:
        """Compares the whole batch's loss with that of its microbatches. Called on the last stage.

        Args:
            value: The whole batch's loss.
            losses: Those of the microbatches.
            dtype: Type of the losses.
            step: The step.

        Raises:
            UnsupportedError: They differ.
        """
        total = weighted_sum(losses, self.weights)
        scale = max(abs(value), abs(total), max(map(abs, losses), default=0.0), 1e-6)
        if abs(total - value) <= tolerance(dtype) * scale or (total != total and value != value):
            return
        raise UnsupportedError(
            "The loss of this batch does not decompose into the losses of its microbatches, unlike the first batch.",
            where=getattr(step.function, "__qualname__", step.kind.value),
            observed=f"{value:.7g} for the whole batch, {total:.7g} from its {len(losses)} microbatches",
            expected="a mean or a sum over samples, as 1F1B requires",
            todo='Set FxPipeStrategy(schedule="gpipe"), which supports any loss.',
        )
