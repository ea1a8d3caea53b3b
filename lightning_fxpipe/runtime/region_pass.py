"""The region of a step as one operation: forward and backward, each a pipeline over the microbatches.

The step calls the model once, with the whole batch. Each rank cuts the region's inputs into microbatches and runs them through
its stage; the last stage joins what they gave, and the step goes on with that. For autograd the region is one operation
(:class:`Operation`): whoever calls backward, and with whatever loss, starts a second pipeline in the reverse order of the
stages, in which each runs autograd for one microbatch and sends the gradients of what it had received. So a loss may be any
function of the whole batch, and gradients appear when and where they do on one device.

GPipe (Huang et al. 2019, section 2.3) has the same order of work: all forward passes, then all backward passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.independence.division import cut
from lightning_fxpipe.independence.trials import carrying_call, counting_call, mixing_call, mixing_call_of_one
from lightning_fxpipe.microbatch.batch_norms import DeferredNorms
from lightning_fxpipe.microbatch.draws import (
    continued_random_numbers,
    generator_state,
    seed_generators,
    sent_state,
    set_generator_state,
)
from lightning_fxpipe.microbatch.split import Pass
from lightning_fxpipe.rng import isolated_rng
from lightning_fxpipe.runtime.joined_results import JoinedResults, with_gradients
from lightning_fxpipe.runtime.late_exchanges import LateExchanges
from lightning_fxpipe.runtime.left_state import LeftState
from lightning_fxpipe.runtime.stage_changes import StageChanges
from lightning_fxpipe.schedules.executor import Executor
from lightning_fxpipe.schedules.stage_graph import StageGraph
from lightning_fxpipe.simulation.actions import Action
from lightning_fxpipe.stages.build import Stage, TensorSpec
from lightning_fxpipe.stages.memory import SavedBytes
from lightning_fxpipe.stages.shared_casts import sharing_casts
from lightning_fxpipe.tracing.input_gradient import no_second_derivative
from lightning_fxpipe.user_code.paths import Path

_logger = logging.getLogger("lightning_fxpipe")

_T = TypeVar("_T")
RunBackward = Callable[[Any, Sequence[Tensor | None]], Sequence[Tensor | None]]


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Tensors that cross the boundaries of a stage for one microbatch.

    Attributes:
        received: Specs of the tensors from the previous stage.
        sent: Specs of the tensors to the next stage; on the last stage those that are joined.
    """

    received: tuple[TensorSpec, ...]
    sent: tuple[TensorSpec, ...]


@dataclass(frozen=True, kw_only=True)
class Leg:
    """Microbatches of one size, on this rank.

    Attributes:
        part: Which microbatches of the batch.
        start: First row of the first of them in the dimension that is cut.
        rows: Rows of each.
        crossings: Of each of the rank's stages, what crosses its boundaries.
        sizes: Values of the graph's symbols for one of them.
        admits_one_more: Whether the graph holds for one of them with one sample more.
        forward: Runs the forward pass.
        backward: Gives what runs the backward pass for some results' gradients, by their numbers; None without training.
        interleaved: The same for both passes at once; None where it is not possible.
    """

    part: Pass
    start: int
    rows: int
    crossings: Mapping[int, Crossing]
    sizes: Mapping[Any, int]
    admits_one_more: bool
    forward: Executor
    backward: Callable[[frozenset[int]], Executor] | None
    interleaved: Callable[[frozenset[int]], Executor] | None

    def leaves(self, stage: int, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns the tensors that a stage has received for a microbatch as leaves of its graph."""
        trains = torch.is_grad_enabled()
        specs = self.crossings[stage].received
        return tuple(t.detach().requires_grad_(spec.requires_grad and trains) for t, spec in zip(received, specs, strict=True))

    def trained(self, stage: int, outputs: Sequence[_T]) -> list[_T]:
        """Returns the outputs of a stage that get gradients, or the entries for these of a list with one for each output."""
        return [output for output, spec in zip(outputs, self.crossings[stage].sent, strict=True) if spec.requires_grad]

    def returned(self, stage: int, results: frozenset[int]) -> list[bool]:
        """True for each received tensor that trains if its gradient is sent back where these results have gradients."""
        return [spec.has_gradient(results) for spec in self.crossings[stage].received if spec.requires_grad]

    def arrived(self, stage: int, gradients: Sequence[Tensor], results: frozenset[int]) -> list[Tensor | None]:
        """Returns for each output of a stage that trains the gradient that has come back, if one does."""
        rest = iter(gradients)
        sent = (spec for spec in self.crossings[stage].sent if spec.requires_grad)
        return [next(rest) if spec.has_gradient(results) else None for spec in sent]

    def number(self, index: int) -> int:
        """Converts a microbatch's number among those of its size to its number in the batch."""
        return self.part.first + index

    def row(self, index: int) -> int:
        """First row of a microbatch."""
        return self.start + index * self.rows


@dataclass(frozen=True, kw_only=True)
class PassSetup:
    """Common part, on this rank, of all calls of the region with inputs of the same shapes.

    Attributes:
        stages: This rank's stages, by their index.
        tail: On the last stage, what then runs once on the joined results.
        last_stage: Index of the one whose results are joined.
        legs: The microbatches.
        input_dims: Of the region's inputs and draws, the dimension that is cut; None: each microbatch gets all of it.
        joined_dims: Of what the last stage gives, the dimension along which microbatches are joined; None: all give the same.
        joined_specs: Specs of the joined results.
        input_shapes: Shapes of the region's inputs for the whole batch.
        input_sources: For each of the region's inputs the numbers of the joined results whose gradients reach it.
        sample_dims: Of the graph's nodes, by name, the dimension of their results that has the samples, where one has. Results
            that are joined may have several entries for each row; those of others count as none.
        fixed: The graph's nodes, by name, whose results are the same for all samples.
        carries_random_state: Whether the state of the random numbers is the last of the received and sent tensors.
        device: This rank's device.
        norms: The layers whose running statistics wait for all microbatches.
        late_exchanges: What the stages may leave for those of other ranks.
        left: What they leave for code that every rank runs.
        carried: Places of modules' attributes that are results of the region.
    """

    stages: Mapping[int, Stage]
    tail: Stage | None
    last_stage: int
    legs: tuple[Leg, ...]
    input_dims: tuple[int | None, ...]
    joined_dims: tuple[int | None, ...]
    joined_specs: tuple[TensorSpec, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    input_sources: tuple[frozenset[int], ...]
    sample_dims: Mapping[str, int]
    fixed: frozenset[str]
    carries_random_state: bool
    device: torch.device
    norms: DeferredNorms
    late_exchanges: LateExchanges
    left: LeftState
    carried: frozenset[Path]

    @property
    def is_last(self) -> bool:
        """True if this rank joins the results."""
        return self.last_stage in self.stages

    @property
    def can_be_interleaved(self) -> bool:
        """True if each microbatch can go back before the others have come forward."""
        return all(leg.interleaved is not None for leg in self.legs)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a batch."""
        return sum(leg.part.count for leg in self.legs)

    @property
    def num_rows(self) -> int:
        """Rows of a batch."""
        last = self.legs[-1]
        return last.start + last.part.count * last.rows

    def joining(self) -> JoinedResults:
        """Takes what the last stage gives for the microbatches."""
        return JoinedResults(self.joined_specs, self.joined_dims, self.num_rows)

    def run_tail(self, joined: Sequence[Tensor], value: Callable[[int], Tensor | None]) -> list[Tensor]:
        """The region's outputs.

        Args:
            joined: What the last stage gave.
            value: Gives the region's inputs and draws, by number.
        """
        assert self.tail is not None
        return list(self.tail.module(*joined, *map(value, self.tail.region_inputs)))


@dataclass(frozen=True, eq=False)
class StageRun:
    """This rank's stages on the microbatches of one call of the region.

    Attributes:
        setup: The stages and the microbatches.
        values: The region's inputs and draws for the whole batch; None for a draw that is made where it stands.
        random_key: Identifies the batch within the run, for the random numbers of stages.
    """

    setup: PassSetup
    values: Sequence[Tensor | None]
    random_key: tuple[int | str, ...]

    def compute(
        self, leg: Leg, stage: Stage, index: int, received: tuple[Tensor, ...], *, state: Tensor | None, training: bool
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Computes a stage's outputs for one microbatch. Seeds the generators, unless their state is sent from stage to
        stage.

        Args:
            leg: The microbatches of its size.
            stage: The stage.
            index: The microbatch's number among them.
            received: What the previous stage sent.
            state: State of the random numbers, where it goes from stage to stage.
            training: Whether a backward pass follows.

        Returns:
            The outputs, and the state of the random numbers after them.

        Raises:
            UnsupportedError: The next stage expects another tensor.
        """
        setup = self.setup
        carried = setup.carries_random_state
        if not carried:
            seed_generators(*self.random_key, leg.number(index), stage.index)
        with continued_random_numbers(state, setup.device) if carried else nullcontext(), setup.norms.noting():
            run = partial(stage.module, *received, *self._inputs(leg, stage, index))
            setup.left.begin_stage(is_cut=setup.num_microbatches > 1, carried=setup.carried)
            outputs: tuple[Tensor, ...] = setup.late_exchanges.watching(stage.index, run)
            after = generator_state(setup.device) if carried else None
        for output, spec, node in zip(outputs, leg.crossings[stage.index].sent, stage.boundary_out, strict=True):
            # A transport does not compare shapes or dtypes.
            loses_gradient = training and output.requires_grad and not spec.requires_grad
            if tuple(output.shape) != spec.shape or output.dtype != spec.dtype or loses_gradient:
                raise _mismatch_error(stage, node, output, spec)
        return outputs, after

    def mixing_call(
        self, leg: Leg, stage: Stage, index: int, received: tuple[Tensor, ...], counted: Callable[[Sequence[str]], None]
    ) -> str | None:
        """The call of a stage in which the samples of a microbatch notice each other, found by trial; None for none.

        ``counted`` gets the names of numbers that its modules set by the number of samples.
        """
        setup = self.setup
        dims = [setup.sample_dims.get(node.name) for node in stage.boundary_in]
        dims += [setup.input_dims[i] for i in stage.region_inputs]
        inputs = [*received, *self._inputs(leg, stage, index)]
        module, rows_of = stage.module, setup.sample_dims.get
        mixing = mixing_call(module, inputs, dims, rows_of, leg.rows)
        if leg.rows == 1 and leg.admits_one_more:
            mixing = mixing_call_of_one(module, inputs, dims, rows_of)
        if mixing is None and leg.admits_one_more:
            counting = counting_call(module, inputs, dims, rows_of, setup.fixed, leg.rows, leg.rows // leg.part.size)
            mixing = counting.call
            counted(counting.numbers)
        return mixing

    def carrying_call(self, leg: Leg, stage: Stage, index: int, received: tuple[Tensor, ...]) -> str | None:
        """The call of a stage in which a microbatch notices the one before, found by trial; None for none."""
        return carrying_call(stage.module, [*received, *self._inputs(leg, stage, index)])

    def saved_bytes(self, leg: Leg, stage: Stage, index: int, received: tuple[Tensor, ...]) -> int:
        """Bytes that autograd keeps for a stage's backward pass of a microbatch, found by trial."""
        specs = leg.crossings[stage.index].received
        inputs = tuple(t.clone().requires_grad_(s.requires_grad) for t, s in zip(received, specs, strict=True))
        module, there = stage.module, (value for value in self.values if value is not None)
        saved = SavedBytes((*module.parameters(), *module.buffers(), *there))
        try:
            with torch.enable_grad(), saved.counting():
                self.compute(leg, stage, index, inputs, state=None, training=True)
        except Exception as error:  # torch.func, for one, cannot be looked at so; what else fails will fail again
            _logger.debug("The activations that autograd saves cannot be measured (%s)", error)
        return saved.num_bytes

    def _inputs(self, leg: Leg, stage: Stage, index: int) -> list[Tensor | None]:
        setup = self.setup
        wanted = ((self.values[i], setup.input_dims[i]) for i in stage.region_inputs)
        return [None if value is None else cut(value, dim, leg.row(index), leg.rows) for value, dim in wanted]


@dataclass(eq=False)
class RegionPass:
    """One call of the region. Made by every rank of the pipeline.

    Attributes:
        setup: The stages and the microbatches.
        values: The region's inputs and draws for the whole batch; None for a draw that is made where it stands.
        random_key: Identifies the batch within the run, for the random numbers of stages.
        training: Whether a backward pass may follow.
        announce: Tells the others that a backward pass begins, whether what the stages saved is kept for one more, and which
            results have gradients. Called on the last stage.
        tries: Where the first microbatch is to show that the stages treat samples one by one, what they were before.
        measures: Whether the first microbatch is to show what autograd would keep of it. The state of the random numbers must
            not go from stage to stage then.
        obstacle: Why this rank's stages do not, or must not run more than once for a batch, after a try.
        saved_bytes: What autograd would keep on this rank, after a measurement.
        retains: Whether what the stages saved is kept for one more backward pass.
    """

    setup: PassSetup
    values: Sequence[Tensor | None]
    _: KW_ONLY
    random_key: tuple[int | str, ...]
    training: bool
    announce: Callable[[bool, frozenset[int]], None] = lambda retains, results: None
    tries: StageChanges | None = None
    measures: bool = False
    obstacle: str | None = None
    saved_bytes: int = 0
    retains: bool = False

    def __post_init__(self) -> None:
        self._run = StageRun(self.setup, self.values, self.random_key)
        self._graphs: dict[tuple[int, int], StageGraph] = {}  # by stage and number of the microbatch
        self._results = self.setup.joining()
        self._carrying: str | None = None  # the call that notices the microbatch before

    # ------------------------------------------------------------------ forward

    def forward(self) -> tuple[Tensor, ...] | None:
        """Runs all microbatches forward. Called by every rank of the pipeline.

        Returns:
            On the last stage the joined results; those that train are results of one operation of autograd.
        """
        joined = self.run_forward()
        trains = any(end is not None for graph in self._graphs.values() for end in graph.ends)
        if joined is None or not self.training or not torch.is_grad_enabled() or not trains:
            return joined
        anchor = torch.zeros((), requires_grad=True)
        return tuple(Operation.apply(anchor, self.setup, joined, self._lead_backward))  # type: ignore[no-untyped-call]

    def run_forward(self) -> tuple[Tensor, ...] | None:
        """Runs like :meth:`forward`, but leaves the results outside of autograd; the caller runs the backward pass."""
        isolated = nullcontext() if self.setup.carries_random_state else isolated_rng()
        with self.setup.norms.deferring(), isolated, sharing_casts(self.setup.device):
            for leg in self.setup.legs:
                leg.forward.step(partial(self._forward_one, leg))
        if self.tries is not None:
            self.obstacle = self.obstacle or self.tries.reason()
            if self.obstacle is None and self._carrying is not None:
                self.obstacle = f"{self._carrying} uses a value that an earlier call stored on its module"
            self.obstacle = self.obstacle or self.setup.left.obstacle()
            self.tries = None  # it holds copies
        return self._results.take() if self.setup.is_last else None

    def _forward_one(self, leg: Leg, action: Action, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """One microbatch forward through a stage."""
        of, index = action.stage, action.microbatch
        setup, stage, number = self.setup, self.setup.stages[of], leg.number(index)
        state: Tensor | None = None
        if setup.carries_random_state and of:
            *tensors, state = received
            received = tuple(tensors)
        if self.training:
            received = leg.leaves(of, received)
        if self.tries is not None and number == 0 and self.obstacle is None:
            mixing = self._run.mixing_call(leg, stage, index, received, self.tries.numbers.extend)
            self.obstacle = None if mixing is None else f"{mixing} mixes samples of the batch"
            self._carrying = self._carrying or self._run.carrying_call(leg, stage, index, received)
        if self.measures and number == 0:
            self.saved_bytes += self._run.saved_bytes(leg, stage, index, received)
        outputs, state = self._run.compute(leg, stage, index, received, state=state, training=self.training)
        if self.tries is not None and number == 0:
            setup.left.note_first()
            self.tries.note_first(stage.module, [other.module for other in setup.stages.values() if other is not stage])
        if self.training and torch.is_grad_enabled():
            self._graphs[of, number] = StageGraph.of(received, leg.trained(of, outputs))
        detached = tuple(output.detach() for output in outputs)
        if of != setup.last_stage:
            if state is None:
                return detached
            return *detached, state if of + 1 in setup.stages else sent_state(state, setup.device)
        if state is not None:
            set_generator_state(state, setup.device)
        self._results.put(detached, leg.row(index), leg.rows)
        return ()

    # ------------------------------------------------------------------ backward

    def backward(
        self, results: frozenset[int], gradients: Sequence[Tensor | None] = (), only: Sequence[Tensor] | None = None
    ) -> None:
        """Runs all microbatches backward. Called by every rank of the pipeline, once for each backward pass.

        Args:
            results: Numbers of the joined results that have gradients.
            gradients: On the last stage, those of the joined results.
            only: The tensors of this rank's stages that get gradients; by default all that it trains.
        """
        for leg in self.setup.legs:
            assert leg.backward is not None
            with self.setup.norms.without_tracking():
                leg.backward(results).step(partial(self._backward_one, leg, results, gradients, only))

    def _lead_backward(self, ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[()]:
        results = with_gradients(gradients)
        self.announce(self.retains, results)
        self.backward(results, gradients)
        return ()

    def _backward_one(
        self,
        leg: Leg,
        results: frozenset[int],
        joined: Sequence[Tensor | None],
        only: Sequence[Tensor] | None,
        action: Action,
        received: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """One microbatch back through a stage; returns the gradients of what the stage had received.

        Args:
            leg: The microbatches of its size.
            results: See :meth:`backward`.
            joined: On the last stage, the gradients of the joined results.
            only: See :meth:`backward`.
            action: The stage and the microbatch's number among them.
            received: On another stage, the gradients of what it had sent, of tensors that have one.
        """
        of, index = action.stage, action.microbatch
        key = of, leg.number(index)
        graph = self._graphs.get(key) if self.retains else self._graphs.pop(key, None)
        if graph is None:
            raise RuntimeError(
                "Trying to backward through the pipelined calls a second time: their saved activations have been freed. "
                "Specify retain_graph=True in the first call of backward."
            )
        is_last = of == self.setup.last_stage
        own = leg.trained(of, self._own_gradients(leg, index, joined)) if is_last else leg.arrived(of, received, results)
        return graph.backward(own, returned=leg.returned(of, results), only=only, retains=self.retains)

    def _own_gradients(self, leg: Leg, index: int, joined: Sequence[Tensor | None]) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for gradient, dim in zip(joined, self.setup.joined_dims, strict=True):
            if gradient is None:
                found.append(None)
            elif dim is None:  # all microbatches gave the same; one of them is what the batch has
                found.append(gradient if leg.number(index) == 0 else None)
            else:
                found.append(cut(gradient, dim, leg.row(index), leg.rows, num_rows=self.setup.num_rows))
        return found


class Operation(torch.autograd.Function):
    """Work of the stages in a call, as one operation of autograd."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, setup: PassSetup, joined: tuple[Tensor, ...], run_backward: RunBackward, *inputs: Tensor
    ) -> Any:
        """The joined results, as results of this operation.

        Args:
            ctx: Of autograd.
            anchor: Requires a gradient, so that the results do.
            setup: Says which of them train.
            joined: They; in a tuple, where autograd takes them for no inputs, of which the results would be views.
            run_backward: Runs the pipeline backward: from ``ctx`` and the results' gradients to those of the inputs.
            *inputs: Tensors of the call that get gradients.
        """
        ctx.run_backward = run_backward
        ctx.set_materialize_grads(False)
        specs = setup.joined_specs
        ctx.mark_non_differentiable(*(t for t, spec in zip(joined, specs, strict=True) if not spec.requires_grad))
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Runs the pipeline backward; raises ``UnsupportedError`` where a derivative of the gradients is wanted."""
        if torch.is_grad_enabled():
            raise no_second_derivative()
        return None, None, None, None, *ctx.run_backward(ctx, gradients)


def _mismatch_error(stage: Stage, node: fx.Node, output: Tensor, spec: TensorSpec) -> UnsupportedError:
    return UnsupportedError(
        f"Stage {stage.index} computed a tensor with a different shape, dtype or gradient than expected.",
        where=f"{node.meta['module_path'] or 'the module itself'}, {node.meta.get('source') or 'source unknown'}",
        observed=f"shape {tuple(output.shape)}, {output.dtype}, requires_grad={output.requires_grad}",
        expected=f"shape {spec.shape}, {spec.dtype}, requires_grad={spec.requires_grad}, as when it was traced",
        todo="A tensor whose shape, dtype or gradient depends on data cannot cross a cut. Keep the module and its user in one "
        "stage, by other cuts or fewer stages.",
    )
