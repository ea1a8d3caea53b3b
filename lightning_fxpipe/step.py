"""One batch of a user's step, microbatch by microbatch, around this rank's stage.

Each rank calls the real ``training_step`` (or validation, test, predict step) on each microbatch. The region's call inside it
runs this rank's stage. A stage that is not the last leaves the step there with what it sends; on the last stage the call
returns the model's output and the step goes on to its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe.appended import AppendedEntries
from lightning_fxpipe.assigned import AssignedValues
from lightning_fxpipe.batchvalues import unmarked
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.metrics import StepLog
from lightning_fxpipe.randomness import (
    BatchRandomness,
    Draw,
    continued_random_numbers,
    generator_state,
    own_random_numbers,
    set_generator_state,
)
from lightning_fxpipe.region import StageExit, no_model_called, replaced_region
from lightning_fxpipe.replay import Replayer, watched_step
from lightning_fxpipe.rng import rng_state, same_rng
from lightning_fxpipe.split import Stage, TensorSpec
from lightning_fxpipe.structure import describe
from lightning_fxpipe.trace import TracedRegion
from lightning_fxpipe.weighting import without_gradient


class StepKind(Enum):
    """Which of the module's steps runs."""

    TRAIN = "training_step"
    VALIDATE = "validation_step"
    TEST = "test_step"
    PREDICT = "predict_step"

    @property
    def words(self) -> str:
        """What it is called in a sentence."""
        return self.value.replace("_", " ")


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
        scale_loss: Scales the loss for its backward pass, as the precision plugin does; None leaves it.
    """

    kind: StepKind
    function: Callable[..., Any]
    rest: tuple[Any, ...]
    context: Callable[[], AbstractContextManager[Any]]
    random_key: tuple[int | str, ...]
    num_accumulated: int = 1
    scale_loss: Callable[[Tensor], Tensor] | None = None

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
        draws: Random tensors that the region's own Python draws.
        sizes: Values of the symbols in the graph.
        replayer: Leads the step through a region of several calls; None for one of a single call.
        carries_random_state: Whether the state of the random numbers is the last of the received and sent tensors.
    """

    traced: TracedRegion
    stage: Stage
    input_shapes: tuple[tuple[int, ...], ...]
    received: tuple[TensorSpec, ...]
    sent: tuple[TensorSpec, ...]
    draws: tuple[Draw, ...]
    sizes: Mapping[Any, int]
    replayer: Replayer | None
    carries_random_state: bool


@dataclass(frozen=True, kw_only=True)
class KeptOutputs:
    """What the last stage got and gave for one microbatch."""

    setup: StageSetup
    received: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(kw_only=True)
class BatchRun:
    """A batch on its way through this rank's stage.

    Attributes:
        root: The LightningModule.
        step: The step.
        microbatches: The batch, split.
        sizes: Samples in each microbatch.
        randomness: Makes what the step draws.
        log: Collects what the step logs.
        device: This rank's device.
        appended: Follows the module's lists.
        assigned: Follows the attributes that the step only assigns.
        outputs: On the last stage, what the step returned for each microbatch.
        losses: On the last stage, the unweighted loss of each microbatch.
        weights: On the last stage in training, the factor of each microbatch's loss in the batch's loss.
        kept: On the last stage, the region's outputs by the number of the microbatch, where somebody wants them. In training
            they are copies on the CPU, where there is room until the batch is done.
        leaves_after_region: On the last stage, whether a microbatch's step ends with the region; the rest runs for the batch.
        num_without_loss: On the last stage in training, microbatches for which the step returned None.
    """

    root: nn.Module
    step: Step
    microbatches: list[Any]
    sizes: list[int]
    randomness: BatchRandomness
    log: StepLog
    device: torch.device
    appended: AppendedEntries
    assigned: AssignedValues
    outputs: list[Any] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    weights: Sequence[float] = ()
    kept: dict[int, KeptOutputs] | None = None
    leaves_after_region: bool = False
    num_without_loss: int = 0
    _given: KeptOutputs | None = None
    _region_outputs: Sequence[Tensor] = ()
    _has_run_stage: bool = False
    _rng_before_region: dict[str, Any] | None = None

    def changed_rng(self) -> dict[str, Any] | None:
        """State of the generators, where the step drew numbers that the other ranks did not."""
        now = rng_state()
        before = self._rng_before_region
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
        stage = setup.stage
        self.log.begin_microbatch(self.sizes[index])
        self.assigned.begin_microbatch()
        self._has_run_stage = False
        draws = self.randomness.draws
        try:
            with self.step.context(), self.randomness.microbatch(index, sum(self.sizes[:index]), self.sizes[index]):
                if setup.replayer is not None:
                    example = self.microbatches[index], self.step.rest[1:]
                    around = setup.replayer.lead(example, draws, lambda inputs: self._run_stage(index, setup, inputs, received))
                else:
                    around = self._single_call(index, setup, received)
                with around:
                    result = self.step.function(self.microbatches[index], *self.step.rest)
        except StageExit as leaving:
            return torch.zeros((), device=self.device) if stage.is_last else leaving.outputs
        finally:
            self.log.end_microbatch()
        if not self._has_run_stage:
            # A step that skips its model skips it on every rank: what decides that runs on all.
            self._region_outputs = received
            if not stage.is_last:
                return self._in_place_of_outputs(setup, received)
        self.appended.end_microbatch()
        self.assigned.end_microbatch()
        self.outputs.append(result)
        if not self.step.is_training:
            return torch.zeros((), device=self.device)
        return self._weighted_loss(result, index)

    def run_with_outputs(self, index: int, kept: KeptOutputs) -> None:
        """Runs the step on one microbatch, for which the region has run: it returns what it has given."""
        self._given = kept
        try:
            self.run_microbatch(index, kept.setup, ())
        finally:
            self._given = None

    def begin_whole(self, log: StepLog) -> None:
        """Before the step runs on the whole batch, once."""
        log.begin_microbatch(sum(self.sizes))
        self.assigned.begin_microbatch()

    def end_whole(self, result: Any) -> None:
        """After it."""
        self.appended.end_microbatch()
        self.assigned.end_microbatch()
        self.outputs.append(result)

    def forget_results(self) -> None:
        """What the microbatches have left so far, which do not count."""
        self.appended.rewind()
        self.assigned.restart()
        self.outputs.clear()

    def run_without_model(self) -> None:
        """Runs the step on all microbatches, none of which calls the model: on the last stage, as ordinary Python.

        Raises:
            UnsupportedError: It calls the model after all.
        """
        self._rng_before_region = rng_state()
        for index, microbatch in enumerate(self.microbatches):
            self.log.begin_microbatch(self.sizes[index])
            self.assigned.begin_microbatch()
            with (
                self.step.context(),
                self.randomness.microbatch(index, sum(self.sizes[:index]), self.sizes[index]),
                watched_step(self.root, self.randomness.draws),
                no_model_called(self.root),
            ):
                result = self.step.function(microbatch, *self.step.rest)
            self.log.end_microbatch()
            self.appended.end_microbatch()
            self.assigned.end_microbatch()
            self.outputs.append(result)
            if self.step.is_training:
                self._weighted_loss(result, index)
        if self.losses:
            raise UnsupportedError(
                f"The {self.step.kind.value} returned a loss without calling the model.",
                observed="a loss that depends on no parameter",
                expected="a loss of the model's result, or None to skip the batch",
                todo="Return None for batches that train nothing.",
            )

    @contextmanager
    def _single_call(self, index: int, setup: StageSetup, received: tuple[Tensor, ...]) -> Iterator[None]:
        """In the block, the region's only call runs the stage."""
        traced = setup.traced

        def run_region(*args: Any, **kwargs: Any) -> Any:
            inputs = self._checked_inputs(args, kwargs, setup)
            with mode.in_stage():
                outputs = self._run_stage(index, setup, inputs, received)
            return traced.result(outputs)

        path = traced.signature.path
        assert path is not None
        with watched_step(self.root, self.randomness.draws) as mode, replaced_region(self.root, path, run_region):
            yield

    def _run_stage(self, index: int, setup: StageSetup, inputs: list[Tensor], received: tuple[Tensor, ...]) -> list[Tensor]:
        """This rank's stage on the region's inputs; returns the region's outputs.

        Raises:
            StageExit: The stage is not the last.
        """
        self._check_shapes(inputs, setup)
        self._has_run_stage = True
        stage = setup.stage
        state: Tensor | None = None
        if setup.carries_random_state and stage.index:
            *tensors, state = received
            received = tuple(tensors)
        if index == 0:
            self._rng_before_region = rng_state()
        key = (*self.step.random_key, index, stage.index)
        # With one microbatch they are drawn where they stand.
        ahead = [d.make(self.randomness.draws, setup.sizes) if len(self.sizes) > 1 else None for d in setup.draws]
        if self._given is not None:
            return list(self._given.outputs)
        values = [*inputs, *ahead]
        numbers = continued_random_numbers(state, *key) if setup.carries_random_state else own_random_numbers(*key)
        with numbers, self.log.calls.in_stage():
            outputs = stage.module(*received, *(values[i] for i in stage.region_inputs))
            state = generator_state(self.device) if setup.carries_random_state else None
        if not stage.is_last:
            sent = self._checked_outputs(outputs, setup)
            raise StageExit(sent if state is None else (*sent, state))
        if state is not None:
            set_generator_state(state)
        self._region_outputs = _kept_from(outputs, received)
        if self.leaves_after_region:
            assert self.kept is not None
            # Not into the buffers, which the next pass receives into; the outputs are safe already.
            copies = tuple(tensor.clone() for tensor in received)
            self.kept[index] = KeptOutputs(setup=setup, received=copies, outputs=tuple(self._region_outputs))
            raise StageExit(())
        if self.kept is not None:
            self.kept[index] = KeptOutputs(setup=setup, received=_copies(received), outputs=_copies(self._region_outputs))
        return list(self._region_outputs)

    def _checked_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any], setup: StageSetup) -> list[Tensor]:
        """The region's input tensors, if they are what the pass was set up for; all ranks have already agreed on that."""
        tensors = setup.traced.input_tensors(args, kwargs)
        if tensors is None:
            expected = "the same arguments but for the tensors"
            raise self._varying("other arguments", describe((args, kwargs)), expected, setup.traced)
        return list(tensors)

    def _check_shapes(self, inputs: list[Tensor], setup: StageSetup) -> None:
        actual = tuple(tuple(tensor.shape) for tensor in inputs)
        if actual != setup.input_shapes:
            raise self._varying("inputs of other shapes", str(actual), str(setup.input_shapes), setup.traced)

    def _checked_outputs(self, outputs: tuple[Tensor, ...], setup: StageSetup) -> tuple[Tensor, ...]:
        """What the stage sends, if it is what the next stage expects: a transport does not compare shapes or dtypes."""
        specs = setup.sent[:-1] if setup.carries_random_state else setup.sent
        for output, spec, node in zip(outputs, specs, setup.stage.boundary_out, strict=True):
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
            f"The {self.step.kind.value} calls {traced.signature.label} with {what} in different microbatches "
            "or in batches of the same shape.",
            observed=observed,
            expected=expected,
            todo="Make the inputs' shapes and constants follow from the batch's shapes, or set num_microbatches=1.",
        )

    def _weighted_loss(self, result: Any, index: int) -> Tensor:
        if result is None:
            self.num_without_loss += 1
            return self._no_loss()
        loss = loss_of(result)
        if loss is None:
            found = result.get("loss") if isinstance(result, dict) else result
            raise UnsupportedError(
                "The training_step returned something that is no loss.",
                observed=f"{type(found).__name__}" + (f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""),
                expected="a tensor with one element, a dict with one under 'loss', or None to skip the batch",
                todo="Return a loss.",
            )
        self.losses.append(loss.detach().reshape(()))
        weight = self.weights[index] / self.step.num_accumulated
        if not weight:
            return self._no_loss()
        # A product, not a view: torch detaches what the last stage returns in place.
        weighted = loss.reshape(()) * weight
        scaled = weighted if self.step.scale_loss is None else self.step.scale_loss(weighted)
        return scaled if self._has_run_stage else scaled + self._no_loss()

    def _no_loss(self) -> Tensor:
        """Zero, with gradients of zero for what the stage computed from, so that the schedule has something to send."""
        trained = [tensor for tensor in self._region_outputs if tensor.requires_grad]
        return without_gradient(trained) if trained else torch.zeros((), device=self.device, requires_grad=True)

    def _in_place_of_outputs(self, setup: StageSetup, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the stage sends for a microbatch that skips the model: zeros, whose gradients are zero for what it received."""
        outputs = [torch.zeros(spec.shape, dtype=spec.dtype, device=self.device) for spec in setup.sent]
        if not self.step.is_training:
            return tuple(outputs)
        trained = [tensor for tensor in received if tensor.requires_grad]
        zero = without_gradient(trained) if trained else torch.zeros((), device=self.device, requires_grad=True)
        return tuple(
            output + zero.to(output) if spec.requires_grad else output for spec, output in zip(setup.sent, outputs, strict=True)
        )


def _copies(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().to("cpu", copy=True) for tensor in tensors)


def loss_of(result: Any) -> Tensor | None:
    """The loss in what a training step returned."""
    loss = unmarked(result.get("loss") if isinstance(result, dict) else result)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _kept_from(outputs: tuple[Tensor, ...], received: tuple[Tensor, ...]) -> list[Tensor]:
    """The region's outputs, safe from the next step's receives."""
    buffers = {tensor.untyped_storage().data_ptr() for tensor in received}
    return [output.clone() if output.untyped_storage().data_ptr() in buffers else output for output in outputs]
