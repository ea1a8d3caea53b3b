"""Steps that differentiate by themselves what the stages compute together.

By the model's inputs: gradient penalties, adversarial examples, forces from energies. The loss holds a derivative, so that its
backward pass would go through all stages twice. By parameters: weights of several losses by their gradients, ``backward()`` of
a part of the loss. No rank's autograd knows the others' stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.user_code.for_microbatch import NeedsWholeBatch, is_for_microbatch
from lightning_fxpipe.user_code.frames import user_source


class InputGradient(UnsupportedError):
    """A step needs the gradient of the model's inputs."""


def input_gradient(where: str | None = None) -> InputGradient:
    """The refusal; ``where`` is by default the user's code that runs now."""
    return InputGradient(
        "The step needs the gradient with respect to the model's inputs, as in a gradient penalty (WGAN-GP, R1) or "
        "adversarial training.",
        where=where or user_source(),
        observed="inputs of the pipelined call that require a gradient although they do not depend on parameters",
        expected="a loss that needs only the gradients of parameters",
        todo="Train this module on one device or with DDP, or use a method without input gradients, such as spectral "
        "normalisation. If the gradient is unused, remove requires_grad_() or detach the input.",
    )


class OwnGradient(UnsupportedError):
    """A step differentiates by itself what several stages compute."""


def own_gradient() -> OwnGradient:
    """The refusal, of the user's code that runs now."""
    return OwnGradient(
        "The step itself computes gradients through several stages.",
        where=user_source(),
        observed="torch.autograd.grad or backward() through calls with parameters",
        expected="a loss whose backward pass Lightning runs after the step",
        todo="Differentiate with respect to the model's results only, or return the loss and use its gradients in a hook.",
    )


class DifferentiatesMicrobatch(NeedsWholeBatch):
    """A step differentiates by itself where it runs for each microbatch."""

    does = "computes gradients itself"


def check_may_differentiate() -> None:
    """Called before a step differentiates by the model's results, or by what it has made of these.

    Raises:
        DifferentiatesMicrobatch: It runs for a microbatch, whose gradient is another one; a look at the batch has none.
    """
    if is_for_microbatch():
        raise DifferentiatesMicrobatch(
            "The step itself computes gradients, but this schedule runs the step once per microbatch.",
            where=user_source(),
            observed="torch.autograd.grad or backward()",
            expected="a loss whose backward pass Lightning runs after the step",
            todo='Set FxPipeStrategy(schedule="gpipe"), which runs the step once per batch.',
        )


def functions_before(tensors: Iterable[Tensor], up_to: Iterable[Tensor] = ()) -> Iterator[Any]:
    """Yields the functions that autograd runs backward for the tensors, up to those that have made the others."""
    seen: set[Any] = {tensor.grad_fn for tensor in up_to}
    waiting: list[Any] = list({tensor.grad_fn for tensor in tensors} - seen - {None})
    seen |= set(waiting)
    while waiting:
        function = waiting.pop()
        yield function
        new = {following for following, _ in function.next_functions if following is not None} - seen
        seen |= new
        waiting += new


def depends_on_parameters(tensors: Iterable[Tensor], root: nn.Module) -> bool:
    """Returns True if autograd would give a parameter of the module a gradient from the tensors."""
    tensors = list(tensors)
    leaves = {*map(id, tensors), *(id(getattr(function, "variable", None)) for function in functions_before(tensors))}
    return any(id(parameter) in leaves for parameter in root.parameters())


def no_second_derivative() -> UnsupportedError:
    """The refusal of a derivative of gradients, at the moment when autograd would compute it."""
    return UnsupportedError(
        "The step differentiates a gradient of the pipelined calls again.",
        observed="autograd.grad or backward with create_graph=True, as in a gradient penalty",
        expected="first derivatives: the backward pass of the stages does not create a graph",
        todo="Remove the penalty, estimate it by finite differences, or train on one device.",
    )
