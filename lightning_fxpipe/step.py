"""One batch of a user's step, microbatch by microbatch, around this rank's stage.

Each rank calls the real ``training_step`` (or validation, test, predict step) on each microbatch. The region's call inside it
runs this rank's stage. A stage that is not the last leaves the step there with what it sends; on the last stage the call
returns the model's output and the step goes on to its loss.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat import rng_state, same_rng
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.metrics import StepLog
from lightning_fxpipe.randomness import own_random_numbers
from lightning_fxpipe.region import StageExit, replaced_region
from lightning_fxpipe.split import Stage, TensorSpec
from lightning_fxpipe.structure import describe
from lightning_fxpipe.trace import TracedRegion


class StepKind(Enum):
    """Which of the module's steps runs."""

    TRAIN = "training_step"
    VALIDATE = "validation_step"
    TEST = "test_step"
    PREDICT = "predict_step"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A call of one of the module's steps by Lightning.

    Attributes:
        kind: Which step.
        function: The bound method.
        rest: Its arguments after the batch.
        context: Makes the precision plugin's context for it.
        random_key: Identifies the batch within the run, for the stages' random numbers.
        num_accumulated: Batches whose gradients are summed before an optimizer step; each loss is divided by it.
    """

    kind: StepKind
    function: Callable[..., Any]
    rest: tuple[Any, ...]
    context: Callable[[], AbstractContextManager[Any]]
    random_key: tuple[int | str, ...]
    num_accumulated: int = 1

    @property
    def is_training(self) -> bool:
        """Whether a backward pass follows."""
        return self.kind is StepKind.TRAIN


@dataclass(frozen=True, kw_only=True)
class StageSetup:
    """This rank's stage, and the shapes that a pass was set up for.

    Attributes:
        traced: The graph that the stage is a part of.
        stage: The stage.
        input_shapes: Shapes of the region's input tensors.
        received: Specs of the tensors from the previous stage.
        sent: Specs of the tensors to the next stage.
    """

    traced: TracedRegion
    stage: Stage
    input_shapes: tuple[tuple[int, ...], ...]
    received: tuple[TensorSpec, ...]
    sent: tuple[TensorSpec, ...]


@dataclass(kw_only=True)
class BatchRun:
    """A batch on its way through this rank's stage.

    Attributes:
        root: The LightningModule.
        step: The step.
        microbatches: The batch, split.
        sizes: Samples in each microbatch.
        log: Collects what the step logs.
        device: This rank's device.
        outputs: On the last stage, what the step returned for each microbatch.
        losses: On the last stage, the unweighted loss of each microbatch.
    """

    root: nn.Module
    step: Step
    microbatches: list[Any]
    sizes: list[int]
    log: StepLog
    device: torch.device
    outputs: list[Any] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    _rng_after_region: dict[str, Any] | None = None

    def changed_rng(self) -> dict[str, Any] | None:
        """State of the generators, where the step drew numbers that the other ranks did not."""
        now = rng_state()
        before = self._rng_after_region
        return None if before is None or same_rng(before, now) else now

    def run_microbatch(self, index: int, setup: StageSetup, received: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """Runs the step on one microbatch.

        Args:
            index: Position of the microbatch in the batch.
            setup: This rank's stage and what it was set up for.
            received: Tensors from the previous stage.

        Returns:
            What the stage sends; on the last stage the weighted loss, or zero where nothing is trained.
        """
        stage, traced = setup.stage, setup.traced
        self.log.begin_microbatch(self.sizes[index])

        def run_region(*args: Any, **kwargs: Any) -> Any:
            inputs = self._checked_inputs(args, kwargs, setup)
            with own_random_numbers(*self.step.random_key, index, stage.index):
                outputs = stage.module(*received, *(inputs[i] for i in stage.region_inputs))
            if not stage.is_last:
                raise StageExit(self._checked_outputs(outputs, setup))
            if len(self.microbatches) > 1:
                after_region.enter_context(own_random_numbers(*self.step.random_key, index, "after"))
            else:
                self._rng_after_region = rng_state()
            return _region_result(traced, outputs, received)

        with ExitStack() as after_region, self.step.context(), replaced_region(self.root, traced.signature.path, run_region):
            try:
                result = self.step.function(self.microbatches[index], *self.step.rest)
            except StageExit as leaving:
                return leaving.outputs
        if not stage.is_last:
            raise self._never_called(traced)
        self.outputs.append(result)
        if not self.step.is_training:
            return torch.zeros((), device=self.device)
        return self._weighted_loss(result, index)

    def _checked_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], setup: StageSetup) -> list[Tensor]:
        """The region's input tensors, if they are what the pass was set up for; all ranks have already agreed on that."""
        traced, shapes = setup.traced, setup.input_shapes
        tensors = traced.input_tensors(args, kwargs)
        if tensors is None:
            raise self._varying("other arguments", describe((args, kwargs)), "the same arguments but for the tensors", traced)
        actual = tuple(tuple(tensor.shape) for tensor in tensors)
        if actual != shapes:
            raise self._varying("inputs of other shapes", str(actual), str(shapes), traced)
        return list(tensors)

    def _checked_outputs(self, outputs: tuple[Tensor, ...], setup: StageSetup) -> tuple[Tensor, ...]:
        """What the stage sends, if it is what the next stage expects: a transport does not compare shapes or dtypes."""
        for output, spec, node in zip(outputs, setup.sent, setup.stage.boundary_out, strict=True):
            loses_gradient = self.step.is_training and output.requires_grad and not spec.requires_grad
            if tuple(output.shape) != spec.shape or output.dtype != spec.dtype or loses_gradient:
                raise UnsupportedError(
                    f"Stage {setup.stage.index} computed another tensor than it was set up to send.",
                    where=f"{node.meta['module_path'] or 'the module itself'}, {node.meta.get('source') or 'source unknown'}",
                    observed=f"shape {tuple(output.shape)}, {output.dtype}, requires_grad={output.requires_grad}",
                    expected=f"shape {spec.shape}, {spec.dtype}, requires_grad={spec.requires_grad}, as when it was traced",
                    todo="A shape, dtype or gradient that depends on data cannot cross a cut: keep that module and its user in "
                    "one stage, with a plan of other cuts or fewer stages.",
                )
        return tuple(output.contiguous() for output in outputs)

    def _varying(self, what: str, observed: str, expected: str, traced: TracedRegion) -> UnsupportedError:
        return UnsupportedError(
            f"The {self.step.kind.value} calls {traced.signature.path or 'the module'} with {what} in different microbatches "
            "or in batches of the same shape.",
            observed=observed,
            expected=expected,
            todo="Make the inputs' shapes and constants follow from the batch's shapes, or set num_microbatches=1.",
        )

    def _never_called(self, traced: TracedRegion) -> UnsupportedError:
        return UnsupportedError(
            f"The {self.step.kind.value} did not call {traced.signature.path or 'the module'} for this microbatch.",
            observed="the step returned without the call that it made on the first batch",
            expected="the same call for every microbatch",
            todo="Call the model for every batch; a step that skips batches cannot be pipelined.",
        )

    def _weighted_loss(self, result: Any, index: int) -> Tensor:
        loss = result.get("loss") if isinstance(result, dict) else result
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UnsupportedError(
                "The training_step returned no loss for a microbatch.",
                observed=f"{type(loss).__name__}" + (f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""),
                expected="a tensor with one element, or a dict with one under 'loss'",
                todo="Return a loss for every batch; skipping batches is not supported in a pipeline.",
            )
        self.losses.append(loss.detach().reshape(()))
        weight = self.sizes[index] / sum(self.sizes) / self.step.num_accumulated
        # A product, not a view: torch detaches what the last stage returns in place.
        return loss.reshape(()) * weight


def _region_result(traced: TracedRegion, outputs: tuple[Tensor, ...], received: tuple[Tensor, ...]) -> Any:
    """The region's result in the structure that the model returns, safe from the next step's receives."""
    buffers = {tensor.untyped_storage().data_ptr() for tensor in received}
    safe = [output.clone() if output.untyped_storage().data_ptr() in buffers else output for output in outputs]
    return traced.result(safe)
