"""The autograd graph of one microbatch in one stage, from its forward to its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.schedules.split_backward import WeightGradients, input_gradients
from lightning_fxpipe.simulation.actions import BACKWARD, WEIGHT_BACKWARD, Action


@dataclass(frozen=True)
class StageGraph:
    """Ends of a graph. It does not keep the values of the outputs: functions that need them have saved them.

    Attributes:
        inputs: The received tensors that train, which are leaves.
        ends: Of each output the edge where its backward begins; None for one that does not train.
    """

    inputs: tuple[Tensor, ...]
    ends: tuple[GradientEdge | None, ...]

    @classmethod
    def of(cls, received: Sequence[Tensor], outputs: Sequence[Tensor]) -> StageGraph:
        """Returns the graph of what a stage has computed.

        Args:
            received: All that it has received.
            outputs: All that it has computed.
        """
        ends = tuple(_edge(output) if output.requires_grad else None for output in outputs)
        return cls(tuple(tensor for tensor in received if tensor.requires_grad), ends)

    def backward(
        self,
        gradients: Sequence[Tensor | None],
        *,
        returned: Sequence[bool] | None = None,
        only: Sequence[Tensor] | None = None,
        retains: bool = False,
    ) -> tuple[Tensor, ...]:
        """Computes the gradients of the inputs and the weights.

        Args:
            gradients: Of each output; None where it has none.
            returned: Of each input, whether its gradient is expected; by default those of all are.
            only: The tensors that get gradients, besides the inputs; by default all that train.
            retains: Whether the graph is kept for one more backward pass.

        Returns:
            The expected gradients of inputs; zeros for one that has no part in the outputs.

        Raises:
            UnsupportedError: An input has an unexpected gradient.
        """
        ends, given = self._pairs(gradients)
        wanted = None if only is None else [*self.inputs, *(tensor for tensor in only if tensor.requires_grad)]
        if ends and wanted != []:
            torch.autograd.backward(ends, given, retain_graph=retains, inputs=wanted)
        found = [tensor.grad for tensor in self.inputs]
        for tensor in self.inputs:
            tensor.grad = None
        return self._filled(found, returned)

    def input_backward(
        self, gradients: Sequence[Tensor | None], returned: Sequence[bool] | None = None
    ) -> tuple[tuple[Tensor, ...], WeightGradients | None]:
        """Computes the gradients of the inputs; of the weights as well where the graph cannot be run in two halves.

        Args:
            gradients, returned: As of :meth:`backward`.

        Returns:
            As :meth:`backward`, and what is left to do for the weights.
        """
        split = input_gradients(*self._pairs(gradients), self.inputs)
        if split is None:
            return self.backward(gradients, returned=returned), None
        found, left = split
        return self._filled(found, returned), left

    def _pairs(self, gradients: Sequence[Tensor | None]) -> tuple[list[GradientEdge], list[Tensor]]:
        pairs = [(end, grad) for end, grad in zip(self.ends, gradients, strict=True) if end is not None and grad is not None]
        return [end for end, _ in pairs], [gradient for _, gradient in pairs]

    def _filled(self, gradients: Sequence[Tensor | None], returned: Sequence[bool] | None) -> tuple[Tensor, ...]:
        filled: list[Tensor] = []
        returned = (True,) * len(self.inputs) if returned is None else returned
        for tensor, gradient, is_returned in zip(self.inputs, gradients, returned, strict=True):
            if is_returned:
                filled.append(torch.zeros_like(tensor) if gradient is None else gradient)
            elif gradient is not None:
                raise _unexpected_gradient(tensor)
        return tuple(filled)


def _unexpected_gradient(tensor: Tensor) -> UnsupportedError:
    return UnsupportedError(
        "A tensor between two stages has a gradient in this batch, unlike when the step was recorded.",
        observed=f"a gradient for a tensor of shape {tuple(tensor.shape)}",
        expected="a loss that depends on the same tensors in every batch",
        todo='If the loss uses more results of the model than before, set FxPipeStrategy(schedule="gpipe"). If a module '
        "detaches its input for some values only, keep it and the one before it in one stage, by other cuts or fewer stages.",
    )


class StageGraphs:
    """The graphs of a pass whose microbatches go forward and backward by turns; runs its backward actions."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[int, int], tuple[StageGraph, bool, Tensor | None]] = {}  # by stage and microbatch
        self._left: dict[tuple[int, int], WeightGradients] = {}

    def put(self, action: Action, graph: StageGraph, *, splits: bool, gradient: Tensor | None = None) -> None:
        """Keeps the graph of a forward action.

        Args:
            action: The action.
            graph: Its graph.
            splits: Whether the graph may be run in two halves.
            gradient: On the last stage, that of the output.
        """
        self._graphs[action.stage, action.microbatch] = graph, splits, gradient

    def backward(
        self, action: Action, received: Sequence[Tensor | None], returned: Sequence[bool] | None = None
    ) -> Sequence[Tensor]:
        """Runs a backward action.

        Args:
            action: The action.
            received: The gradients of the stage's outputs, None for one that has none; nothing on the last stage.
            returned: As of :meth:`StageGraph.backward`.

        Returns:
            The gradients of the stage's inputs; nothing where the action computes those of weights.
        """
        key = action.stage, action.microbatch
        if action.kind is WEIGHT_BACKWARD:
            if (left := self._left.pop(key, None)) is not None:
                left.compute()
            return ()
        graph, splits, gradient = self._graphs.pop(key)
        gradients = received if gradient is None else (gradient,)
        if action.kind is BACKWARD or not splits:
            return graph.backward(gradients, returned=returned)
        found, left = graph.input_backward(gradients, returned)
        if left is not None:
            self._left[key] = left
        return found


def _edge(output: Tensor) -> GradientEdge:
    # An operation written in Python does not own what is behind it; a view of its result does.
    return get_gradient_edge(output.view_as(output) if isinstance(output.grad_fn, BackwardCFunction) else output)
