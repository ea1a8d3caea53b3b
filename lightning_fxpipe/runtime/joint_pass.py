"""A call of a module as one operation that all ranks make: each has the whole result, and the same gradients flow back.

Where a step calls the model several times, and takes its own optimizer steps between (manual optimization), every rank runs the
step's Python. A call of a module whose parameters are in the stages is then a collective: its microbatches run through the
stages, and the last stage gives all ranks what they gave. Backward, each rank's autograd comes to the operation at the same
moment, because all have the same graph; the stages run in reverse, and what they find for the call's inputs is summed, so that
an earlier call goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor, nn

from lightning_fxpipe._compat.autograd import after_backward, backward_keeps_graph, runs_before
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.microbatch.draws import generator_state, set_generator_state
from lightning_fxpipe.pytree.sizes import as_bytes
from lightning_fxpipe.runtime.region_pass import PassSetup, RegionPass
from lightning_fxpipe.runtime.stage_changes import StageChanges
from lightning_fxpipe.stages.gradients import SharedParameters
from lightning_fxpipe.tracing.input_gradient import no_second_derivative


class Backwards:
    """The backward passes of a step that all ranks run.

    Args:
        shared: Parameters of which several stages have a copy.
        meet: Waits for ranks that look at what others have.
    """

    def __init__(self, shared: SharedParameters, meet: Callable[[], None]) -> None:
        self._shared = shared
        self._meet = meet
        self._is_running = False
        self.anchors: list[Tensor] = []  # of the step's operations
        self._asked: dict[int, nn.Parameter] | None = None

    def anchor(self) -> Tensor:
        """What makes an operation one that trains, though no parameter is among its inputs."""
        # No leaf, of which autograd would not say whether a pass for some gradients only goes on to it.
        self.anchors.append(torch.zeros((), requires_grad=True).clone())
        return self.anchors[-1]

    def gradients_of(self, parameters: Sequence[nn.Parameter], run: Callable[[], None]) -> list[Tensor | None]:
        """The gradients of parameters that ``run``, a backward pass, does not accumulate. Called by every rank.

        Args:
            parameters: Parameters, or what stands for those of other stages.
            run: Runs autograd up to each of :attr:`anchors`.
        """
        before = [(p, p.grad) for p in parameters if not p.is_meta]
        for parameter, _ in before:
            parameter.grad = None
        self._asked = {id(parameter): parameter for parameter, _ in before}
        try:
            run()
            return [p.grad for p in parameters]
        finally:
            self._asked = None
            for parameter, gradient in before:
                parameter.grad = gradient

    def only(self, trains: bool) -> Sequence[Tensor] | None:
        """The parameters of this rank that an operation's backward computes gradients of; None for all.

        Args:
            trains: Whether the pass accumulates gradients.
        """
        if self._asked is not None:
            return list(self._asked.values())
        return None if trains else ()

    def note(self) -> None:
        """Called first by each operation that a backward pass comes to: when it is over, the copies' gradients are summed."""
        if self._is_running:
            return
        self._is_running = True
        self._meet()
        summing = ExitStack()
        summing.enter_context(self._shared.summed_gradients())

        def end() -> None:
            self._is_running = False
            summing.close()

        after_backward(end)

    def forget(self) -> None:
        """The step is over, and a pass in it may have failed."""
        self._is_running = False
        self.anchors = []


class JointPass:
    """One call. Made by every rank of the pipeline.

    Args:
        setup: The stage and the microbatches.
        inputs: The call's tensors.
        drawn: Its random tensors; None for one that is drawn where it stands.
        topology: This rank's place.
        backwards: The step's backward passes.
        random_key: Identifies the call within the run, for the random numbers of stages.
        training: Whether a backward pass may follow.
        tries: Where the first microbatch is to show that the stage treats samples one by one, what it was before.
        aside: Makes a function one that is no user code, wherever it is called.
    """

    def __init__(
        self,
        setup: PassSetup,
        inputs: Sequence[Tensor],
        drawn: Sequence[Tensor | None],
        topology: Topology,
        backwards: Backwards,
        *,
        random_key: tuple[int | str, ...],
        training: bool,
        tries: StageChanges | None,
        aside: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        self._setup = setup
        self._inputs = tuple(inputs)
        # A stage's graph begins here: what made the inputs is every rank's own.
        self._leaves = tuple(tensor.detach().requires_grad_(training and tensor.requires_grad) for tensor in inputs)
        self._drawn = tuple(drawn)
        self._topology = topology
        self._backwards = backwards
        self._aside = aside
        self._joined: tuple[Tensor, ...] = ()
        self._pass = RegionPass(
            setup,
            [*self._leaves, *drawn],
            random_key=random_key,
            training=training,
            announce=lambda one: None,
            tries=tries,
        )

    @property
    def obstacle(self) -> str | None:
        """A call of this rank's stage in which samples notice each other, after a try."""
        return self._pass.obstacle

    @property
    def differentiable(self) -> tuple[bool, ...]:
        """Of the joined results, which train."""
        return tuple(spec.requires_grad for spec in self._setup.joined_specs)

    def run_stages(self) -> None:
        """Runs all microbatches forward, and gives every rank the results."""
        joined = self._pass.run_forward()
        device, group = self._topology.device, self._topology.group
        last = self._topology.last_rank
        with torch.inference_mode(False):
            given = [None] * len(self._setup.joined_specs) if joined is None else [tensor.contiguous() for tensor in joined]
            results = [
                torch.empty(spec.shape, dtype=spec.dtype, device=device) if tensor is None else tensor
                for tensor, spec in zip(given, self._setup.joined_specs, strict=True)
            ]
            if self._setup.carries_random_state:  # the random numbers go on where the last stage's have ended
                results.append(generator_state(device))
            for tensor in results:
                if tensor.numel():
                    dist.broadcast(as_bytes(tensor), src=last, group=group)
        if self._setup.carries_random_state:
            set_generator_state(results.pop())
        self._joined = tuple(results)

    def results(self) -> list[Tensor]:
        """What the call gives, of which autograd knows how it was made."""
        joined, self._joined = self._joined, ()
        if torch.is_grad_enabled() and any(self.differentiable):
            joined = _Jointly.apply(self._backwards.anchor(), self, joined, *self._inputs)  # type: ignore[no-untyped-call]
        tail = self._setup.tail
        assert tail is not None
        values = (*self._inputs, *self._drawn)
        return list(tail.module(*joined, *(values[i] for i in tail.region_inputs)))

    def backward(self, gradients: Sequence[Tensor | None], *, trains: bool) -> list[Tensor | None]:
        """Runs the stages backward; returns the gradients of the inputs.

        Args:
            gradients: Those of the joined results.
            trains: Whether the pass accumulates gradients of parameters.
        """
        self._pass.retains = backward_keeps_graph()
        self._backwards.note()
        only = self._backwards.only(trains)
        own = None if only is None else (*only, *self._leaves)
        self._aside(lambda: self._pass.backward(gradients, own))()
        found: list[Tensor | None] = []
        for leaf in self._leaves:
            if not leaf.requires_grad:
                found.append(None)
                continue
            gradient, leaf.grad = leaf.grad, None
            gradient = (
                torch.zeros_like(leaf, memory_format=torch.contiguous_format) if gradient is None else gradient.contiguous()
            )
            dist.all_reduce(gradient, group=self._topology.group)
            found.append(gradient)
        return found


class _Jointly(torch.autograd.Function):
    """A call that all ranks make, for autograd."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: JointPass, joined: tuple[Tensor, ...], *inputs: Tensor) -> Any:
        """The joined results, as results of this operation.

        Args:
            ctx: Of autograd.
            anchor: Requires a gradient, so that the results do.
            call: The call.
            joined: Its results; in a tuple, where autograd takes them for no inputs, of which the results would be views.
            *inputs: What it was called with.
        """
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t, trains in zip(joined, call.differentiable, strict=True) if not trains))
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Runs the pipeline backward; raises ``UnsupportedError`` where a derivative of the gradients is wanted."""
        if torch.is_grad_enabled():
            raise no_second_derivative()
        return None, None, None, *ctx.call.backward(gradients, trains=runs_before(ctx, 0))
