"""The region in place of the step's calls of the model, for one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_fxpipe._compat.modes import function_mode_removed
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.microbatch.draws import BatchDraws
from lightning_fxpipe.microbatch.rewind import Rewind
from lightning_fxpipe.microbatch.split import split_batch
from lightning_fxpipe.pytree.structure import describe
from lightning_fxpipe.rng import rng_state, set_rng_state
from lightning_fxpipe.runtime.attributes import StepAttributes
from lightning_fxpipe.runtime.batch_passes import BatchPasses
from lightning_fxpipe.runtime.one_f_one_b import StepTail
from lightning_fxpipe.runtime.region_in_place import region_in_place
from lightning_fxpipe.runtime.region_pass import PassSetup
from lightning_fxpipe.runtime.stage_traces import StageTrace
from lightning_fxpipe.stages.build import boundary_specs
from lightning_fxpipe.tracing.region import Leaving, StageExit
from lightning_fxpipe.user_code.step import Step


class RegionRun:
    """Runs the region in place of the step's calls of the model, for one batch. Made by every rank.

    Args:
        root: The LightningModule, with this rank's stage on its device.
        passes: Sends the batch through the stages.
        step: The step.
        batch: The batch.
        metrics: The module's metrics, by name.
        batch_dim: The batch's dimension of samples.
        trace: What the step calls.
        sizes: Values of the trace's symbols for the batch.
        make_setup: Makes the microbatches; anew where the batch turns out not to be cut.
        draws: Makes what the step draws.

    Attributes:
        setup: The microbatches.
        attributes: What the step can change, as it was when the step began; on the last stage.
        watch: Watches the step's own code, and not what runs in the region.
        has_run: Whether all ranks have done their part.
        leaving: How the step has left the region.
        rng_before_region: State of the generators when the step had come to the region.
    """

    def __init__(
        self,
        root: nn.Module,
        passes: BatchPasses,
        step: Step,
        batch: Any,
        *,
        metrics: Mapping[str, nn.Module],
        batch_dim: int,
        trace: StageTrace,
        sizes: Mapping[Any, int],
        make_setup: Callable[[], PassSetup],
        draws: BatchDraws,
    ) -> None:
        self.setup = make_setup()
        self.attributes: StepAttributes | None = None
        self.watch: TorchFunctionMode | None = None
        self.has_run = False
        self.leaving = Leaving()
        self.rng_before_region: dict[str, Any] | None = None
        self._root = root
        self._passes = passes
        self._step = step
        self._metrics = metrics
        self._batch, self._batch_dim = batch, batch_dim
        self._trace, self._traced = trace, trace.traced
        self._sizes = sizes
        self._make_setup = make_setup
        self._draws = draws
        self._tail: StepTail | None = None
        self._rng_at_start = rng_state() if passes.may_interleave(step) else None

    def in_place(self, batch: Any) -> AbstractContextManager[None]:
        """In the block, the step on ``batch``, the region is pipelined.

        Raises:
            StageExit: The region has run, and this is not the last stage.
        """
        return region_in_place(
            self._root,
            self._traced,
            self._sizes,
            device_type=self.setup.device.type,
            arguments=(batch, self._step.rest[1:]),
            draws=self._draws,
            inputs=self._inputs,
            run=self.leaving.noting_errors(self._run_unwatched),
        )

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        inputs = self._traced.input_tensors(args, kwargs)
        if inputs is None:
            raise self._varying("other arguments", describe((args, kwargs)), "the same arguments but for the tensors")
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
        traced, setup = self._traced, self.setup
        expected = tuple(spec.shape for spec in boundary_specs(traced.input_nodes, self._sizes))
        actual = tuple(tuple(tensor.shape) for tensor in inputs)
        if actual != expected:
            raise self._varying("inputs of other shapes", str(actual), str(expected))
        before_draws = rng_state()
        values = self._values(inputs)
        counts, joined = self._passes.run(setup, values, self._step, self._trace, self._tail)
        if not counts:
            self.setup = setup = self._make_setup()
            set_rng_state(before_draws)
            values = self._values(inputs)
            _, joined = self._passes.run(setup, values, self._step, self._trace, self._tail)
        self.has_run = True
        if joined is None:
            raise StageExit(())  # the step is over for this rank
        assert setup.tail is not None
        return list(setup.tail.module(*joined, *(values[i] for i in setup.tail.region_inputs)))

    def _values(self, inputs: list[Tensor]) -> list[Tensor | None]:
        """The region's inputs and draws for the whole batch; with one microbatch these are drawn where they stand."""
        setup = self.setup
        is_cut = setup.num_microbatches > 1
        ahead = [node.meta["draw"].make(self._draws, self._sizes) if is_cut else None for node in self._traced.draw_nodes]
        self.rng_before_region = rng_state()
        values: list[Tensor | None] = [*inputs, *ahead]
        self._tail = None
        if self._rng_at_start is not None and setup.is_last and is_cut:
            self._tail = self._step_tail(values, self._rng_at_start, self.rng_before_region)
        return values

    def _step_tail(self, values: list[Tensor | None], at_start: dict[str, Any], after_prelude: dict[str, Any]) -> StepTail:
        passes = [leg.part for leg in self.setup.legs]
        return StepTail(
            root=self._root,
            metrics=self._metrics,
            step=self._step,
            batch=self._batch,
            batch_sizes=self._sizes,
            microbatches=split_batch(self._batch, passes, self._batch_dim),
            traced=self._traced,
            setup=self.setup,
            values=values,
            at_start=Rewind(at_start),
            rng_after_prelude=after_prelude,
            draws=BatchDraws(sum(part.count * part.size for part in passes), self._batch_dim),
            attributes=self.attributes,
        )

    def _varying(self, what: str, observed: str, expected: str) -> UnsupportedError:
        return UnsupportedError(
            f"The {self._step.kind.value} calls {self._traced.signature.label} with {what} than it was set up for.",
            observed=observed,
            expected=expected,
            todo="Make the inputs' shapes and constants follow from the batch's shapes and plain attributes.",
        )
