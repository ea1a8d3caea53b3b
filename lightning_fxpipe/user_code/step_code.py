"""Static analysis of a step's code: if it may do something else for one batch than for another.

A step that logs an image with every hundredth batch uses a result of its model then, and not otherwise. Nothing but its code
tells that while the first batch runs.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, TracebackType
from typing import Any

from torch import nn

from lightning_fxpipe._compat.torch import hooks_of
from lightning_fxpipe.user_code.bytecode import attribute_line, codes_in, first_line_with, names_read, operations
from lightning_fxpipe.user_code.code_contents import functions_of
from lightning_fxpipe.user_code.code_names import function_of, is_followed
from lightning_fxpipe.user_code.frames import is_framework, is_machinery

# What user code asks to tell one batch from another.
_CHANGING = frozenset({"trainer", "global_step", "current_epoch", "random", "time", "optimizers", "lr_schedulers"})
# What the model may be called with that no attribute of a module tells.
_RUN_STATE = frozenset({"optimizers", "lr_schedulers", "lr_scheduler_configs", "param_groups", "time"})
_REGISTERING = frozenset(
    {"register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook"}
)
_MAX_METHODS = 50


def code_of(function: Any) -> CodeType | None:
    """The code of a step; None where it is no function of Python's."""
    while isinstance(function, partial):
        function = function.func
    return getattr(inspect.unwrap(function_of(function)), "__code__", None)


def uses_arguments_after_batch(function: Callable[..., Any], left_at: TracebackType | None = None) -> bool:
    """Returns True if a step uses ``batch_idx`` or ``dataloader_idx``, up to where it was left, if it was."""
    code = code_of(function)
    if code is None:
        return False
    end: float = math.inf
    while left_at is not None:
        if left_at.tb_frame.f_code is code:
            end = left_at.tb_lasti
        left_at = left_at.tb_next
    names = code.co_varnames[2 : code.co_argcount]
    if code.co_flags & inspect.CO_VARARGS:
        names += (code.co_varnames[code.co_argcount + code.co_kwonlyargcount],)
    return any(operation.argument in names and operation.offset < end for operation in operations(code))


def reads_run_state(root: nn.Module, function: Callable[..., Any]) -> bool:
    """Returns True if a step, or a method that it calls, asks optimizers or schedulers, whose numbers change from batch to
    batch.
    """
    code = code_of(function)
    return code is not None and any(_RUN_STATE & {*current.co_names} for current in codes_called(type(root), code))


def attribute_uses(cls: type, name: str) -> str | None:
    """Says where the methods of a class of user code set and read an attribute, but for its constructor."""
    found = dict[str, str]()
    for operation, verb in (("STORE_ATTR", "set"), ("LOAD_ATTR", "read")):
        for function in (f for base in cls.__mro__ if is_followed(base.__module__) for f in functions_of(base)):
            code = code_of(function)
            line = None if code is None or code.co_name == "__init__" else attribute_line(code, name, operation)
            if code is not None and line is not None:
                found.setdefault(verb, f"{verb} at {code.co_filename}:{line}")
    return ", ".join(found.values()) or None


def line_of_use(cls: type, name: str) -> str | None:
    """Returns ``file:line`` where the methods of a class of user code first use an attribute, a key or a variable of a name."""
    for function in (f for base in cls.__mro__ if is_followed(base.__module__) for f in functions_of(base)):
        code = code_of(function)
        line = None if code is None or code.co_name == "__init__" else first_line_with(code, name)
        if code is not None and line is not None:
            return f"{code.co_filename}:{line}"
    return None


def assigned_anywhere(cls: type) -> frozenset[str]:
    """Names of the attributes that code of a class of the user's may assign, to whatever object."""
    names = set[str]()
    for base in cls.__mro__:
        if is_followed(base.__module__):
            for function in functions_of(base):
                code = code_of(function)
                for inner in () if code is None else codes_in(code):
                    names |= {str(each.argument) for each in operations(inner) if each.name == "STORE_ATTR"}
                    texts = (constant for constant in inner.co_consts if isinstance(constant, str))
                    names |= {text for text in texts if text.isidentifier()}  # as for `register_buffer` and `setattr`
    return frozenset(names)


def may_differ_between_batches(root: nn.Module, function: Callable[..., Any]) -> bool:
    """Returns True if a step, or a method that it calls, uses the batch's index, the Trainer, or its counters."""
    code = code_of(function)
    if code is None or uses_arguments_after_batch(function):
        return True
    return any(_CHANGING & {*current.co_names} for current in codes_called(type(root), code))


def registers_hooks(root: nn.Module, function: Callable[..., Any]) -> bool:
    """Returns True if a step, or a method that it calls, names a function that registers a hook on a module."""
    return not _REGISTERING.isdisjoint(names_in_step(root, function))


def names_in_step(root: nn.Module, function: Callable[..., Any]) -> frozenset[str]:
    """Returns the names in :func:`codes_of_step`."""
    return frozenset(name for each in codes_of_step(root, function) for name in each.co_names)


def codes_of_step(root: nn.Module, function: Callable[..., Any]) -> list[CodeType]:
    """Returns a step's code, and that of the methods it names of the module and its submodules, but forward."""
    code = code_of(function)
    kinds = dict.fromkeys(type(module) for module in root.modules() if not is_framework(type(module).__module__))
    return [] if code is None else [*codes_called(tuple(kinds), code, but=frozenset({"forward"}))]


def names_in_hooks(root: nn.Module, *kinds: type[nn.Module]) -> frozenset[str]:
    """Returns the names that hooks read, of a LightningModule and of its Trainer's callbacks, and what they call.

    Args:
        root: The LightningModule.
        *kinds: Classes of modules whose methods they may call.
    """
    trainer = vars(root).get("_trainer")
    names = set[str]()
    forward_hooks = {code_of(hook) for module in root.modules() for hook in hooks_of(module)}  # which run in the stages
    for owner in (root, *getattr(trainer, "callbacks", ())):
        kind = type(owner)
        for hook in (function for base in kind.__mro__ if is_followed(base.__module__) for function in functions_of(base)):
            if (code := code_of(hook)) is not None and code.co_name.startswith("on_"):
                called = codes_called((kind, *kinds), code, but=frozenset({"forward"}))
                names.update(*(names_read(each) for each in called if each not in forward_hooks))
    return frozenset(names)


def codes_called(kinds: type | tuple[type, ...], code: CodeType, but: frozenset[str] = frozenset()) -> Iterator[CodeType]:
    """Yields the code, and that of the methods of classes that it names, but for some and those of torch and Lightning."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    seen, waiting = {code}, [code]
    while waiting and len(seen) < _MAX_METHODS:
        current = waiting.pop()
        yield current
        called = {code_of(getattr(kind, name, None)) for name in {*current.co_names} - but for kind in kinds}
        new = {c for c in called if c is not None and not is_framework(getattr(inspect.getmodule(c), "__name__", ""))} - seen
        new |= {constant for constant in current.co_consts if isinstance(constant, CodeType)} - seen  # comprehensions
        seen |= new
        waiting += new


def locals_up_to(code: CodeType) -> list[Any]:
    """The values of the local variables of user code that runs now, up to and with the function with this code.

    Returns:
        The values; none where the function does not run, as other frames hold objects that have nothing to do with it.
    """
    found: list[Any] = []
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if not is_machinery(frame.f_globals.get("__name__", "")):
            found += frame.f_locals.values()
        if frame.f_code is code:
            return found
        frame = frame.f_back
    return []
