"""The region in place of the step's calls of the model, for one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_fxpipe._compat.modes import function_mode_removed
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.metrics.step_log import StepLog
from lightning_fxpipe.microbatch.draws import BatchDraws
from lightning_fxpipe.microbatch.split import split_batch
from lightning_fxpipe.pytree.structure import describe
from lightning_fxpipe.rng import rng_state, set_rng_state
from lightning_fxpipe.runtime.attributes import StepAttributes
from lightning_fxpipe.runtime.batch_passes import BatchPasses
from lightning_fxpipe.runtime.region_in_place import region_in_place
from lightning_fxpipe.runtime.region_pass import PassSetup
from lightning_fxpipe.runtime.stage_trace import StageTrace
from lightning_fxpipe.runtime.step_tail import StepTail
from lightning_fxpipe.tracing.number_arguments import numbers_on
from lightning_fxpipe.tracing.region import Leaving, StageExit
from lightning_fxpipe.user_code.members import Members
from lightning_fxpipe.user_code.step import Step


@dataclass(kw_only=True, eq=False)
class RegionRun:
    """Runs the region in place of the step's calls of the model, for one batch. Made by every rank.

    Attributes:
        root: The LightningModule, with this rank's stage on its device.
        passes: Sends the batch through the stages.
        step: The step.
        batch: The batch.
        log: Collects what the step logs.
        batch_dim: The batch's dimension of samples.
        trace: What the step calls.
        sizes: Values of the trace's symbols for the batch.
        make_setup: Makes the microbatches; anew where the batch turns out not to be cut.
        draws: Makes what the step draws.
        attributes: What the step can change, as it was when the step began; on the last stage.
        members: The LightningModule's, listed when the step began.
        watch: Watches the step's own code, and not what runs in the region.
        has_run: Whether all ranks have done their part.
        leaving: How the step has left the region.
        rng_before_region: State of the generators when the step had come to the region.
    """

    root: nn.Module
    passes: BatchPasses
    step: Step
    batch: Any
    log: StepLog
    batch_dim: int
    trace: StageTrace
    sizes: Mapping[Any, int]
    make_setup: Callable[[], PassSetup]
    draws: BatchDraws
    attributes: StepAttributes | None
    members: Members
    watch: TorchFunctionMode | None = None
    has_run: bool = False
    leaving: Leaving = field(default_factory=Leaving)
    rng_before_region: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._setup = self.make_setup()
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = (), {}  # of the region, where it is a call
        self._rng_at_start = rng_state() if self.passes.may_interleave(self.step) else None

    def in_place(self) -> AbstractContextManager[Any]:
        """In the block, the step on the batch, the region is pipelined.

        Raises:
            StageExit: The region has run, and this is not the last stage.
        """
        return region_in_place(
            self.root,
            self.trace.traced,
            self.sizes,
            device_type=self._setup.device.type,
            arguments=(self.batch, self.step.rest[1:]),
            draws=self.draws,
            inputs=self._inputs,
            run=self.leaving.noting_errors(self._run_unwatched),
            written=None if self.attributes is None else self.attributes.written,
        )

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        inputs = self.trace.traced.input_tensors(args, kwargs)
        if inputs is None:
            raise self._varying("other arguments", describe((args, kwargs)), "the same arguments except for the tensors")
        self._arguments = args, kwargs
        return list(inputs)

    def _run_unwatched(self, inputs: list[Tensor]) -> list[Tensor]:
        with nullcontext() if self.watch is None else function_mode_removed(self.watch):
            return self._run(inputs)

    def _run(self, inputs: list[Tensor]) -> list[Tensor]:
        """The region's outputs on the last stage, from its inputs.

        Raises:
            StageExit: This is not the last stage.
        """
        if self.attributes is not None:
            self.attributes.begin_region()
        traced = self.trace.traced
        with numbers_on(self.root.get_submodule(traced.signature.path or ""), *self._arguments):
            traced.check_current(self.step.kind.value)
        expected = self._setup.input_shapes
        actual = tuple(tuple(tensor.shape) for tensor in inputs)
        if actual != expected:
            raise self._varying("inputs with different shapes", str(actual), str(expected))
        before_draws = rng_state()
        counts, joined, values = self._pass(inputs)
        if not counts:
            self._setup = self.make_setup()
            set_rng_state(before_draws)
            _, joined, values = self._pass(inputs)
        self.has_run = True
        if self.attributes is not None:
            self.attributes.end_region(self.trace.set_on_last_rank)
        if joined is None:
            raise StageExit(())  # the step is over for this rank
        return self._setup.run_tail(joined, values.__getitem__)

    def _pass(self, inputs: list[Tensor]) -> tuple[bool, tuple[Tensor, ...] | None, list[Tensor | None]]:
        """Returns True if the batch's pass through the stages is valid, the joined results, and the region's inputs and
        draws.
        """
        setup, draws = self._setup, self.trace.traced.draw_nodes
        is_cut = setup.num_microbatches > 1
        # With one microbatch the stages draw where the calls stand.
        values_of_symbols = self.trace.traced.values(self.sizes)
        ahead = [node.meta["draw"].make(self.draws, values_of_symbols) if is_cut else None for node in draws]
        self.rng_before_region = rng_state()
        values: list[Tensor | None] = [*inputs, *ahead]
        tail = None
        if self._rng_at_start is not None and setup.is_last and is_cut:
            tail = self._step_tail(values, self._rng_at_start, self.rng_before_region)
        return *self.passes.run(setup, values, self.step, self.trace, tail), values

    def _step_tail(self, values: list[Tensor | None], at_start: dict[str, Any], after_prelude: dict[str, Any]) -> StepTail:
        passes = [leg.part for leg in self._setup.legs]
        return StepTail(
            root=self.root,
            log=self.log,
            step=self.step,
            batch=self.batch,
            batch_sizes=self.sizes,
            microbatches=split_batch(self.batch, passes, self.batch_dim),
            traced=self.trace.traced,
            setup=self._setup,
            values=values,
            rng_at_start=at_start,
            rng_after_prelude=after_prelude,
            draws=BatchDraws(sum(part.count * part.size for part in passes), self.batch_dim),
            attributes=self.attributes,
            members=self.members.renewed(),
            versions=self.trace.traced.held.versions(),
        )

    def _varying(self, what: str, observed: str, expected: str) -> UnsupportedError:
        return UnsupportedError(
            f"The {self.step.kind.value} calls {self.trace.traced.signature.label} with {what} than in the trace.",
            observed=observed,
            expected=expected,
            todo="Derive the inputs' shapes and constants from the batch's shapes and plain attributes.",
        )
