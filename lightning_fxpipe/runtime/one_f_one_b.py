"""One forward, one backward: each stage holds the activations of a few microbatches, not of all.

A microbatch can go back through the stages before the others have come forward only where the batch's loss is a sum over
microbatches. Then the step's code after the region runs once for each microbatch (``runtime.step_tail``). What the step logs,
counts and returns comes from its one run on the whole batch, which goes on, without gradient, when the schedule is done. Its
loss is compared with that of the microbatches every time. Where the step only logs its loss, as most language models do, the
microbatches have told all there is to know: that run is left out, and the results of the whole batch are not kept for it.

Whether the loss is such a sum, and the step such a one, is found out before the first batch runs
(``runtime.schedule_choice``).

The schedule is 1F1B of PipeDream-Flush (Narayanan et al. 2021), or another in which microbatches go back by turns; none leaves
a batch half-way or needs second weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.metrics.step_log import LogEntry
from lightning_fxpipe.microbatch.loss_weights import (
    tolerance,
    weighted_sum,
)
from lightning_fxpipe.rng import isolated_rng
from lightning_fxpipe.runtime.batch_gradients import BatchGradients
from lightning_fxpipe.runtime.region_pass import Leg, PassSetup, StageRun
from lightning_fxpipe.runtime.step_tail import StepTail, TailRun, read_runs
from lightning_fxpipe.schedules.split_backward import HookWatch
from lightning_fxpipe.schedules.stage_graph import StageGraph, StageGraphs
from lightning_fxpipe.simulation.actions import FORWARD, WEIGHT_BACKWARD, Action
from lightning_fxpipe.stages.shared_casts import sharing_casts
from lightning_fxpipe.tracing.gradient_flow import reached_by_gradients
from lightning_fxpipe.user_code.step import Step
from lightning_fxpipe.user_code.undo import UndoneRuns


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
        results: Numbers of the results that have gradients.
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
    results: frozenset[int]
    keeps_results: bool
    undoes_together: bool

    def __post_init__(self) -> None:
        self._run = StageRun(self.setup, self.values, self.random_key)
        self._runs: UndoneRuns | None = None
        self._results = self.setup.joining()
        self._done: dict[int, TailRun] = {}  # on the last stage, by number of the microbatch
        self._reached: set[int] | None = None  # on the last stage, numbers of the results that the losses depend on
        self.has_assigned = False

    def run(self) -> tuple[Tensor, ...] | None:
        """Runs all microbatches. Called by every rank of the pipeline.

        Returns:
            On the last stage the joined results, without gradient; None where they are not kept.

        Raises:
            UnsupportedError: The losses do not depend on one of :attr:`results`.
        """
        norms, casts = self.setup.norms.deferring(), sharing_casts(self.setup.device)
        with self.gradients.computing(), norms, casts, isolated_rng(), self._undone_runs():
            for leg in self.setup.legs:
                assert leg.interleaved is not None
                executor = leg.interleaved(self.results)
                watch = HookWatch() if executor.splits_backward else None
                executor.step(partial(self._compute, leg, StageGraphs(), watch))
        if self._reached is not None and (unused := self.results - self._reached):
            raise _unused_results(unused, self.setup)
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
        values, logged = zip(*read_runs(self._in_order()), strict=True)
        is_all = not self.has_assigned and all(own == logged[0] for own in logged)
        return list(values), logged[0] if is_all else None

    def _in_order(self) -> list[TailRun]:
        return [self._done[number] for number in sorted(self._done)]

    @property
    def losses(self) -> list[float | Tensor]:
        """Losses of the microbatches, to be read together with other values; on the last stage, after a run."""
        known = vars(self).get("_read")
        return [run.value for run in self._in_order()] if known is None else known[0]

    @property
    def does_more(self) -> bool:
        """True if a microbatch has shown that the step does more than to log its loss; on the last stage, after a run."""
        return self._read[1] is None

    def _compute(
        self, leg: Leg, graphs: StageGraphs, watch: HookWatch | None, action: Action, received: tuple[Tensor, ...]
    ) -> Sequence[Tensor]:
        """One action of a stage: a microbatch forward, or back.

        Args:
            leg: The microbatches of its size.
            graphs: Those of the forward actions so far.
            watch: Notes hooks on gradients, where graphs are run in two halves.
            action: The action.
            received: What has come for it.
        """
        of, results = action.stage, self.results
        if action.kind is not FORWARD:
            is_end = of == self.setup.last_stage or action.kind is WEIGHT_BACKWARD  # to which no gradient comes
            gradients = received if is_end else leg.arrived(of, received, results)
            return graphs.backward(action, gradients, leg.returned(of, results))
        received = leg.leaves(of, received)
        with nullcontext() if watch is None else watch.watching():
            outputs, _ = self._run.compute(leg, self.setup.stages[of], action.microbatch, received, state=None, training=True)
            if of == self.setup.last_stage:
                loss = self._weighted_loss(leg, action.microbatch, outputs)
        splits = watch is not None and not watch.has_seen_any
        if of != self.setup.last_stage:
            graphs.put(action, StageGraph.of(received, leg.trained(of, outputs)), splits=splits)
            return [output.detach() for output in outputs]
        graphs.put(action, StageGraph.of(received, (loss,)), splits=splits, gradient=torch.ones_like(loss))
        return ()

    def _weighted_loss(self, leg: Leg, index: int, outputs: tuple[Tensor, ...]) -> Tensor:
        """Runs the step for a microbatch; returns its share of what is differentiated for the batch.

        Args:
            leg: The microbatches of its size.
            index: The microbatch's number among them.
            outputs: What the last stage has computed.
        """
        number = leg.number(index)
        assert self.tail is not None
        if self.keeps_results:  # as they are before the step, which may change its own in place
            given = tuple(output.detach() for output in outputs)
            self._results.put(given, leg.row(index), leg.rows)
        done = self.tail.run(number, outputs, self._runs)
        loss, weight = done.loss, self.weights[number]
        self._done[number] = done if loss is None else replace(done, loss=loss.detach())
        if loss is None or not weight:  # the loss may be nan, and nan times zero is nan
            return torch.zeros((), device=self.setup.device)
        self._reached = {*(self._reached or ()), *reached_by_gradients([loss], outputs)}
        return loss.reshape(()) * (weight * self.scale)

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


def _unused_results(numbers: frozenset[int], setup: PassSetup) -> UnsupportedError:
    shapes = ", ".join(str(tuple(setup.joined_specs[number].shape)) for number in sorted(numbers))
    return UnsupportedError(
        "The loss no longer depends on a result of the model that it has depended on before.",
        observed=f"no gradient for a result of shape {shapes}, in any microbatch",
        expected="a loss that depends on the same results in every batch: weight decay and momentum would move parameters "
        "whose gradient is zero, and do not if there is none",
        todo='Set FxPipeStrategy(schedule="gpipe"), or multiply the term by zero instead of leaving it out.',
    )
