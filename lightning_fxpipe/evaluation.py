"""Validation, test and prediction: stages work on microbatches, the step's own code on the whole batch, once.

Without a backward pass nothing ties the step's code to a microbatch. So the last stage keeps what the region gives for each of
them, and the step then runs once, as on one device, with all of it put together: whatever it computes, logs, counts, appends or
returns is one device's. Where that cannot be (microbatches of several lengths, an output that cannot be computed for the whole
batch), the step runs on each microbatch with what the region gave for it, and its results are put together as in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_fxpipe._compat import version_of
from lightning_fxpipe.exchange import remembered_generators
from lightning_fxpipe.lru import LruCache
from lightning_fxpipe.metrics import StepLog
from lightning_fxpipe.plan import PartitionPlan
from lightning_fxpipe.step import BatchRun
from lightning_fxpipe.wholebatch import NotJoinable, WholeBatch, WholeTraces

# Graphs of whole batches, where the microbatches are of one sample.
_MAX_TRACES = 8


class Evaluation:
    """The step's own code on batches that are not trained on. Used on the last stage.

    Args:
        plan: Which stage holds what.
    """

    def __init__(self, plan: PartitionPlan) -> None:
        self._plan = plan
        self._traces: WholeTraces = LruCache(_MAX_TRACES)

    @contextmanager
    def region_only(self, run: BatchRun) -> Iterator[None]:
        """In the block microbatches run through the region and no further; what the step does before it is undone."""
        start = _Start(run, self._plan)
        log, run.log = run.log, StepLog(run.log.calls.metrics)
        run.kept, run.leaves_after_region = {}, True
        try:
            with run.log.capture(run.root):
                yield
        finally:
            run.log, run.leaves_after_region = log, False
            start.restore()

    def run_step(self, run: BatchRun, batch: Any) -> None:
        """Runs the step, after :meth:`region_only`, with what the region gave."""
        assert run.kept is not None
        if not run.kept:
            _in_one_piece(run, batch)
            with run.log.capture(run.root):
                run.run_without_model()
            return
        start = _Start(run, self._plan)
        microbatches, sizes = run.microbatches, run.sizes
        try:
            self._run_whole(run, batch)
        except NotJoinable:
            run.microbatches, run.sizes = microbatches, sizes
            start.restore()
            run.randomness.restart()
            some = next(iter(run.kept.values()))
            with run.log.capture(run.root):
                for index in range(len(sizes)):
                    run.run_with_outputs(index, run.kept.get(index, some))

    def _run_whole(self, run: BatchRun, batch: Any) -> None:
        outputs = WholeBatch(run, batch, self._plan, self._traces)
        if len(run.kept or ()) < len(run.sizes) or not outputs.is_of_one_trace:
            raise NotJoinable("the model is called in another way for some microbatches")
        log = StepLog(run.log.calls.metrics)  # what is logged before the step cannot go on counts for nothing
        _in_one_piece(run, batch)
        run.begin_whole(log)
        with (
            log.capture(run.root),
            run.step.context(),
            run.randomness.in_one_piece(),
            outputs.in_place_of_region(must_be_complete=True),
        ):
            result = run.step.function(batch, *run.step.rest)
        run.end_whole(result)
        run.log = log


def _in_one_piece(run: BatchRun, batch: Any) -> None:
    run.microbatches, run.sizes = [batch], [sum(run.sizes)]


class _Start:
    """What a step may change before it calls the model, as it is before the batch."""

    def __init__(self, run: BatchRun, plan: PartitionPlan) -> None:
        self._run = run
        self._rewind_generators = remembered_generators(run.root)
        buffers = (buffer for fqn, buffer in run.root.named_buffers() if not plan.stages_of(fqn))
        self._buffers = [(buffer, version_of(buffer), buffer.clone()) for buffer in buffers]

    def restore(self) -> None:
        """Undoes the changes."""
        self._rewind_generators()
        self._run.forget_results()
        for buffer, version, values in self._buffers:
            if version_of(buffer) != version:
                buffer.copy_(values)
