"""Gradients of a batch that has gone backward before its loss does.

With 1F1B they are there when the step comes back from the model. Lightning sets ``.grad`` to zero after that, hooks may look
there, and the loss may yet be divided, so they are parked until the backward pass of the loss says by which factor they count.
If user code neither zeroes nor reads them they stay in place: removing and restoring thousands takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class BatchGradients:
    """Gradients of one batch, on this rank.

    Args:
        parameters: This rank's.
        may_stay: Whether they need not be parked.

    Attributes:
        are_in_place: Whether they are where the parameters have theirs, and their loss's backward pass is still to come.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, may_stay: bool) -> None:
        self._parameters = parameters
        self._may_stay = may_stay
        self._parked: list[tuple[nn.Parameter, Tensor]] = []
        self.are_in_place = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The block computes them. Those that were there before are there again after it."""
        before = [(parameter, gradient) for parameter in self._parameters if (gradient := parameter.grad) is not None]
        for parameter, _ in before:
            parameter.grad = None
        self.are_in_place = True
        try:
            yield
            if before or not self._may_stay:
                self.park()
        except BaseException:
            self.park()
            raise
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient

    def park(self) -> None:
        """Takes them away from the parameters."""
        for parameter in self._parameters if self.are_in_place else ():
            if (gradient := parameter.grad) is not None:
                self._parked.append((parameter, gradient))
                parameter.grad = None
        self.are_in_place = False

    def install(self, factor: float) -> None:
        """Adds them to ``.grad``, as a backward pass does.

        Args:
            factor: Derivative of what is differentiated by the batch's loss, over the scale.
        """
        if factor != 1:
            self.park()
        self.are_in_place = False
        for parameter, gradient in self._parked:
            if factor != 1:
                gradient.mul_(factor)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._parked = []


class ParkedLoss(torch.autograd.Function):
    """The batch's loss, whose backward pass has been: it tells by which factor the gradients count."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, install: Callable[[Tensor], None]) -> Tensor:
        """The loss.

        Args:
            ctx: Of autograd.
            anchor: Requires a gradient, so that the loss does.
            loss: Its value.
            install: Gets the factor.
        """
        ctx.install = install
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Installs the gradients."""
        ctx.install(gradient)
        return None, None, None
