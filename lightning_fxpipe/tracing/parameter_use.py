"""Uses of the model's parameters that a step must not make by itself: to change them, or to read their gradients.

A rank has one stage's parameters, and the step runs beyond the model's call on the last stage only. A step that clamps weights
or moves a teacher would do so for some parameters, and with ``1f1b`` between two microbatches. Hooks see the whole model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe._compat.operators import is_writing, written_arguments
from lightning_fxpipe._compat.torch import FakeTensor, storage_key
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.tracing.torch_calls import NORMALISATIONS, changed_statistics, is_query
from lightning_fxpipe.user_code.frames import user_source
from lightning_fxpipe.user_code.objects import Unsent

# As functions that __torch_function__ gets.
_PROPERTIES: Any = vars(Tensor.__base__)
_GET_GRADIENT, _SET_GRADIENT = _PROPERTIES["grad"].__get__, _PROPERTIES["grad"].__set__
_SET_DATA = _PROPERTIES["data"].__set__
_SET_REQUIRES = _PROPERTIES["requires_grad"].__set__
# What gives a tensor's memory to code that torch does not see.
_GIVING_MEMORY = frozenset({Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})
# What may write to a tensor, though its name does not say so.
_WRITING = _GIVING_MEMORY | NORMALISATIONS.keys()
# In place by their names, and yet not: they change no values.
_KEEPING = frozenset({Tensor.requires_grad_, Tensor.share_memory_, Tensor.detach_})

_IN_A_HOOK = (
    "Move this to a hook, which runs once per batch with access to the whole model: on_train_batch_end, on_before_zero_grad "
    "or on_after_backward."
)


_SET_BUFFER = (
    "Set it to a new tensor before the model's call (`self.scale = torch.tensor(...)`), or change it in a hook, which has "
    "access to the whole model, such as on_train_batch_start."
)


class ParameterMisuse(UnsupportedError):
    """A step does with parameters what only a hook can do."""


def check_call(
    root: nn.Module, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Collection[int]:
    """Called for each call of torch that a step makes.

    Returns:
        The memory into which it writes, see :func:`written_by`.

    Raises:
        ParameterMisuse: It looks at a parameter's gradient or sets it, changes a parameter under whatever name, gives away its
            memory, or uses one of another stage.
    """
    written: Collection[int] = ()
    # Most calls write nothing: this runs at each call of each microbatch's step.
    if may_write(func, kwargs or {}):
        if isinstance(args[0] if args else None, nn.Parameter):
            _check_attribute(root, func, args, kwargs or {})
        if written := written_by(func, args, kwargs or {}):
            check_changes(root, written)
    if is_query(func):
        return written
    for argument in args:
        if isinstance(argument, Tensor):
            _check_is_here(root, argument)
        elif isinstance(argument, (list, tuple)):
            for leaf in argument:
                if isinstance(leaf, Tensor):
                    _check_is_here(root, leaf)
    return written


def may_write(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns False for a call of torch that, by its name, writes to no tensor."""
    return getattr(func, "__name__", "").endswith("_") or "out" in kwargs or func in _WRITING or is_writing(func)


def _check_attribute(root: nn.Module, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    parameter = args[0]
    if func in (_GET_GRADIENT, _SET_GRADIENT):
        raise _misuse(
            "The step reads or sets the gradient of a parameter.",
            root,
            parameter,
            "gradients that are used only after the step",
        )
    if func == _SET_DATA:
        raise _changes(root, parameter)
    if changes_requires_grad(func, args, kwargs):
        raise _misuse(
            "The step freezes or unfreezes a parameter.",
            root,
            parameter,
            "parameters whose requires_grad is constant during the step",
        )


def changes_requires_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns True if a call freezes or unfreezes a parameter."""
    if func not in (_SET_REQUIRES, Tensor.requires_grad_) or not isinstance(args[0], nn.Parameter):
        return False
    wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    return bool(wanted) != args[0].requires_grad


def _check_is_here(root: nn.Module, tensor: Tensor) -> None:
    if not isinstance(tensor, (FakeTensor, Unsent)) and tensor.is_meta:
        for fqn, buffer in root.named_buffers():
            if buffer is tensor:
                raise ParameterMisuse(
                    "The step uses another rank's buffer outside the model's call.",
                    where=user_source(),
                    observed=f"{fqn}, which the model reads in another stage",
                    expected="the buffers of this rank's stage",
                    todo=_SET_BUFFER,
                )
        if (path := _running_call(root)) is not None:
            raise further_call(path)
        what = "The step uses another rank's parameter outside the model's call."
        raise _misuse(what, root, tensor, "the parameters of this rank's stage")


def _running_call(root: nn.Module) -> str | None:
    """Path of the module whose forward the step has called, and which runs now."""
    paths = {id(module): path for path, module in root.named_modules() if path}
    called = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        called = paths.get(id(owner), called)
        frame = frame.f_back
    return called


def further_call(path: str) -> UnsupportedError:
    """Returns the error for a call of the model, at a module's path, that the traced step has not made.

    The region has run when the step comes to it, and the tensors of other stages are on other ranks.
    """
    return UnsupportedError(
        f"The step calls {path or 'the module'} more often than when it was traced.",
        where=user_source(),
        observed="a call of the model that begins after the traced ones",
        expected="the same calls of the model in each step",
        todo="Make the call in every step, for example with a weight of zero for a loss that begins later or counts in some "
        "steps only. Or resume from the last checkpoint: the step is traced anew then, with all its calls.",
    )


def written_by(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[int]:
    """The memory into which a call of torch writes, or which it gives away, as far as its name and schema say."""
    written: list[Any] = [kwargs["out"]] if "out" in kwargs else []
    written += [*written_arguments(func, args, kwargs), *changed_statistics(func, args, kwargs)]
    if is_in_place(func) or func in _GIVING_MEMORY:
        written += [*args[:1], *(kwargs[name] for name in ("input", "tensor") if name in kwargs)]
    # A list is that of a `_foreach_` function.
    leaves = (leaf for one in written for leaf in (one if isinstance(one, (list, tuple)) else (one,)))
    return {storage_key(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided}


def is_in_place(func: Callable[..., Any]) -> bool:
    """Returns True if a function of torch changes its first argument, as its name says."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        # `__iadd__` and the like, which `__add__` is beside, but not `__invert__` or `__int__`.
        return name == "__setitem__" or (name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}"))
    return name.endswith("_") and func not in _KEEPING


def parameters_by_name(root: nn.Module) -> dict[str, tuple[int, int]]:
    """The identities of a module's parameters, and of their memory where that is not the step's own affair."""
    with unwatched_torch():
        return {fqn: (id(parameter), _memory_of(fqn, parameter)) for fqn, parameter in root.named_parameters()}


def with_todays_memory(root: nn.Module, before: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Updates :func:`parameters_by_name` after a call of a module: its forward may give parameters other memory, as by
    ``self.weight.data = torch.renorm(...)``, in a rank's stage as on one device.
    """
    now = parameters_by_name(root)
    return {fqn: (identity, now.get(fqn, (0, memory))[1]) for fqn, (identity, memory) in before.items()}


def _memory_of(fqn: str, parameter: Tensor) -> int:
    return storage_key(parameter) if parameter.layout is torch.strided and not _is_the_steps(fqn, parameter) else 0


def check_same_parameters(root: nn.Module, before: Mapping[str, tuple[int, int]]) -> None:
    """Called after a step.

    Args:
        root: The module.
        before: What :func:`parameters_by_name` has said before it.

    Raises:
        ParameterMisuse: It has put a parameter in another's place, or other memory under one, which no call of torch shows.
    """
    after = parameters_by_name(root)
    for fqn in sorted(before.keys() | after.keys()):
        was, is_now = before.get(fqn), after.get(fqn)
        if was != is_now:
            is_same = was is not None and is_now is not None and was[0] == is_now[0]
            raise _changes_by_itself(fqn) if is_same else _exchanges(fqn)


def check_none_exchanged(before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]) -> None:
    """Called after a step with a module's parameters before it and now.

    Raises:
        ParameterMisuse: It has put a parameter in another's place; their memory is not looked at.
    """
    if before is not after:  # lists are made anew where a buffer has been exchanged, too
        for fqn in sorted(before.keys() | after.keys()):
            if before.get(fqn) is not after.get(fqn):
                raise _exchanges(fqn)


def _exchanges(fqn: str) -> ParameterMisuse:
    return ParameterMisuse(
        "The step creates, replaces or removes a parameter.",
        observed=fqn,
        expected="the same parameters as before the step",
        todo=_IN_A_HOOK,
    )


def _changes_by_itself(fqn: str) -> ParameterMisuse:
    return ParameterMisuse(
        "The step changes a parameter.",
        observed=f"{fqn} has different memory",
        expected="the same parameters as before the step",
        todo=_IN_A_HOOK,
    )


def check_changes(root: nn.Module, storages: Iterable[int]) -> None:
    """Called for each call that a step makes by itself, with the memory that it changes.

    Raises:
        ParameterMisuse: It changes another parameter.
    """
    changed = set(storages)
    with unwatched_torch():  # who watches for looks at other stages' parameters means the step's
        found = [
            parameter
            for fqn, parameter in (root.named_parameters() if changed else ())
            if storage_key(parameter) in changed and not _is_the_steps(fqn, parameter)
        ]
    if found:
        raise _changes(root, found[0])


def _is_the_steps(fqn: str, parameter: Tensor) -> bool:
    """Returns True if the step may change a parameter: a frozen one of the LightningModule itself, such as a running centre."""
    return "." not in fqn and not parameter.requires_grad


def _changes(root: nn.Module, parameter: Tensor) -> ParameterMisuse:
    return _misuse("The step changes a parameter.", root, parameter, "parameters that the optimizer, modules or hooks change")


def _misuse(what: str, root: nn.Module, tensor: Tensor, expected: str) -> ParameterMisuse:
    names = {id(parameter): fqn for fqn, parameter in root.named_parameters()}
    name = names.get(id(tensor), f"a part of a parameter, of shape {tuple(tensor.shape)}")
    return ParameterMisuse(what, where=user_source(), observed=name, expected=expected, todo=_IN_A_HOOK)
