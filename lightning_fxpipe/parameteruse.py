"""What a step may not do with the model's parameters by itself: change them, or look at their gradients.

A rank has one stage's parameters, and the step runs once for each microbatch, beyond the model's call on the last stage only. A
step that clamps weights or moves a teacher would do so for some parameters and between two microbatches. Hooks run once for the
batch, and see the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from lightning_fxpipe._compat import FakeTensor, storage_key
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.frames import user_source
from lightning_fxpipe.torchcalls import is_query

# As functions that __torch_function__ gets.
_GET_GRADIENT: Any = vars(Tensor.__base__)["grad"].__get__
_SET_DATA: Any = vars(Tensor.__base__)["data"].__set__

_TODO = (
    "Do it in a hook, which runs once for the batch and sees the whole model: on_train_batch_end, on_before_zero_grad or "
    "on_after_backward."
)


class ParameterMisuse(UnsupportedError):
    """A step does with parameters what only a hook can do."""


def check_call(root: nn.Module, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Called for each call of torch that a step makes.

    Raises:
        ParameterMisuse: It looks at a parameter's gradient, gives a parameter other data, or uses one of another stage.
    """
    if func == _GET_GRADIENT and isinstance(args[0], nn.Parameter):
        raise _misuse("The step looks at the gradient of a parameter.", root, args[0], "gradients are used after the step")
    if func == _SET_DATA and isinstance(args[0], nn.Parameter):
        raise _changes(root, args[0])
    if is_query(func):
        return
    for argument in args:
        for leaf in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(leaf, Tensor) and leaf.is_meta and not isinstance(leaf, FakeTensor):
                raise _misuse(
                    "The step uses a parameter, outside of the model's call, that another rank holds.",
                    root,
                    leaf,
                    "the parameters of this rank's stage",
                )


def check_changes(root: nn.Module, storages: Iterable[int]) -> None:
    """Called for each call that a step makes by itself, with the memory that it changes.

    A frozen parameter of the LightningModule itself, such as a running centre, is the step's own affair.

    Raises:
        ParameterMisuse: It changes another parameter.
    """
    changed = set(storages)
    for fqn, parameter in root.named_parameters() if changed else ():
        if storage_key(parameter) in changed and ("." in fqn or parameter.requires_grad):
            raise _changes(root, parameter)


def _changes(root: nn.Module, parameter: Tensor) -> ParameterMisuse:
    return _misuse("The step changes a parameter.", root, parameter, "parameters that the optimizer, modules or hooks change")


def _misuse(what: str, root: nn.Module, tensor: Tensor, expected: str) -> ParameterMisuse:
    names = {id(parameter): fqn for fqn, parameter in root.named_parameters()}
    name = names.get(id(tensor), f"a part of a parameter, of shape {tuple(tensor.shape)}")
    return ParameterMisuse(what, where=user_source(), observed=name, expected=expected, todo=_TODO)
