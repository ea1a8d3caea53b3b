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
from dataclasses import InitVar, dataclass
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor, nn

from lightning_fxpipe._compat.autograd import after_backward, backward_keeps_graph, runs_before
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.distributed.values import broadcast_tensor
from lightning_fxpipe.microbatch.draws import generator_state, sent_state, set_generator_state
from lightning_fxpipe.runtime.joined_results import with_gradients
from lightning_fxpipe.runtime.region_pass import Operation, PassSetup, RegionPass
from lightning_fxpipe.runtime.stage_changes import StageChanges
from lightning_fxpipe.stages.gradients import SharedParameters


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
        """Returns a tensor that makes an operation trainable, though no parameter is among its inputs."""
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


@dataclass(kw_only=True, eq=False)
class JointPass:
    """One call. Made by every rank of the pipeline.

    Attributes:
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

    setup: PassSetup
    inputs: tuple[Tensor, ...]
    drawn: Sequence[Tensor | None]
    topology: Topology
    backwards: Backwards
    random_key: tuple[int | str, ...]
    training: bool
    tries: InitVar[StageChanges | None]
    aside: Callable[[Callable[[], None]], Callable[[], None]]

    def __post_init__(self, tries: StageChanges | None) -> None:
        # A stage's graph begins here: what made the inputs is every rank's own.
        self._leaves = tuple(t.detach().requires_grad_(self.training and t.requires_grad) for t in self.inputs)
        values = [*self._leaves, *self.drawn]
        self._pass = RegionPass(self.setup, values, random_key=self.random_key, training=self.training, tries=tries)
        self._joined: tuple[Tensor, ...] = ()

    @property
    def obstacle(self) -> str | None:
        """A call of this rank's stage in which samples notice each other, after a try."""
        return self._pass.obstacle

    def run_stages(self) -> None:
        """Runs all microbatches forward, and gives every rank the results."""
        joined = self._pass.run_forward()
        topology, specs = self.topology, self.setup.joined_specs
        with torch.inference_mode(False):
            if joined is None:
                results = [torch.empty(spec.shape, dtype=spec.dtype, device=topology.device) for spec in specs]
            else:
                results = [tensor.contiguous() for tensor in joined]
            if self.setup.carries_random_state:  # the random numbers go on where the last stage's have ended
                results.append(sent_state(generator_state(topology.device), topology.device))
            for tensor in results:
                if tensor.numel():
                    broadcast_tensor(tensor, topology.last_rank, topology.group)
        if self.setup.carries_random_state:
            set_generator_state(results.pop(), topology.device)
        self._joined = tuple(results)

    def results(self) -> list[Tensor]:
        """Returns the call's results, connected to autograd."""
        joined, self._joined = self._joined, ()
        if torch.is_grad_enabled() and any(spec.requires_grad for spec in self.setup.joined_specs):
            anchor = self.backwards.anchor()
            joined = Operation.apply(anchor, self.setup, joined, self._backward, *self.inputs)  # type: ignore[no-untyped-call]
        return self.setup.run_tail(joined, (*self.inputs, *self.drawn).__getitem__)

    def _backward(self, ctx: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Runs the stages backward, from the gradients of the joined results to those of the inputs."""
        self._pass.retains = backward_keeps_graph()
        self.backwards.note()
        only = self.backwards.only(trains=runs_before(ctx, 0))
        own = None if only is None else (*only, *self._leaves)
        results = with_gradients(gradients)
        self.aside(lambda: self._pass.backward(results, gradients, own))()
        found: list[Tensor | None] = []
        for leaf, sources in zip(self._leaves, self.setup.input_sources, strict=True):
            if not leaf.requires_grad or sources.isdisjoint(results):
                found.append(None)
                continue
            gradient, leaf.grad = leaf.grad, None
            gradient = (
                torch.zeros_like(leaf, memory_format=torch.contiguous_format) if gradient is None else gradient.contiguous()
            )
            dist.all_reduce(gradient, group=self.topology.group)
            found.append(gradient)
        return found
