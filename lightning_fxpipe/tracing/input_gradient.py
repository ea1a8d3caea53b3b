"""A step that differentiates the model by its inputs: gradient penalties, adversarial examples, forces from energies.

Its loss holds a derivative of what the stages compute together, so that its backward pass would go through all of them twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.user_code.frames import user_source


class InputGradient(UnsupportedError):
    """A step needs the gradient of the model's inputs."""


def input_gradient(where: str | None = None) -> InputGradient:
    """The refusal; ``where`` is by default the user's code that runs now."""
    return InputGradient(
        "The step needs the gradient of the model's inputs, as a gradient penalty (WGAN-GP, R1) or adversarial training does.",
        where=where or user_source(),
        observed="inputs of the pipelined call that require a gradient though no parameter goes into them",
        expected="a loss that needs the gradients of parameters only",
        todo="Train this module on one device or with DDP, or use what needs no gradient of the input, such as spectral "
        "normalisation. If the gradient is not used, leave out requires_grad_() or detach the input.",
    )


def functions_before(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """What autograd runs backward for the tensors."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        function = waiting.pop()
        yield function
        new = {following for following, _ in function.next_functions if following is not None} - seen
        seen |= new
        waiting += new


def depends_on_parameters(tensors: Iterable[Tensor], root: nn.Module) -> bool:
    """Whether autograd would give a parameter of the module a gradient from the tensors."""
    tensors = list(tensors)
    leaves = {*map(id, tensors), *(id(getattr(function, "variable", None)) for function in functions_before(tensors))}
    return any(id(parameter) in leaves for parameter in root.parameters())


def no_second_derivative() -> UnsupportedError:
    """The refusal of a derivative of gradients, at the moment when autograd would compute it."""
    return UnsupportedError(
        "A gradient of the pipelined calls is to be differentiated again.",
        observed="autograd.grad or backward with create_graph=True, as in a gradient penalty",
        expected="first derivatives: the backward pass of the stages leaves no graph",
        todo="Leave the penalty out, estimate it by finite differences, or train on one device.",
    )
