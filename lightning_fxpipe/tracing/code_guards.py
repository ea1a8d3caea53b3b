"""Guards for values that recorded code reads from elsewhere than modules: global variables, attributes of classes, the
learning rates and callbacks of the Trainer, environment variables.

Python does not report such reads, so they are found in the code: names in the forward of an opened module, in methods and
functions of the user's that it names, and in functions in attributes that it reads. Too many cost one more trace at most.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from lightning_fxpipe.tracing.comparable import Unplain, comparable, parts_of
from lightning_fxpipe.tracing.guards import GuardKey
from lightning_fxpipe.user_code.code_names import function_of, globals_read, is_own_code, names_of
from lightning_fxpipe.user_code.kinds import is_users

_MAX_FUNCTIONS = 200
_MAX_DEPTH, _MAX_SIZE = 2, 100  # of what attributes hold, to look for functions


@dataclass(frozen=True)
class CodeKey:
    """A global variable of a module, or an attribute of what it holds.

    Attributes:
        module: The module's name in ``sys.modules``.
        names: Name of the variable, and of the attribute.
    """

    module: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return ".".join((self.module, *self.names))

    def value(self, root: nn.Module) -> Any:
        """Returns the present value; None if there is none."""
        return getattr(self.owner(), self.names[-1], None)

    def owner(self) -> Any:
        """Returns the module, the class or the object that has it."""
        found: Any = sys.modules.get(self.module)
        for name in self.names[:-1]:
            found = getattr(found, name, None)
        return found


@dataclass(frozen=True)
class RunKey:
    """Objects of one kind that the Trainer holds: ``param_groups`` of the optimizers, or ``callbacks``."""

    name: str

    def __str__(self) -> str:
        return f"trainer.{self.name}"

    def value(self, root: nn.Module) -> Any:
        """Returns the present value."""
        trainer: Any = vars(root).get("_trainer")
        if trainer is None:
            return None
        if self.name == "callbacks":
            return [vars(callback) for callback in trainer.callbacks if is_own_code(type(callback).__module__)]
        groups = [group for optimizer in trainer.strategy.optimizers for group in optimizer.param_groups]
        schedulers = [config.scheduler for config in trainer.strategy.lr_scheduler_configs]
        rates = [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in groups]
        return rates, [getattr(scheduler, "last_epoch", None) for scheduler in schedulers]


@dataclass(frozen=True)
class EnvironmentKey:
    """The environment variables of the process."""

    def __str__(self) -> str:
        return "os.environ"

    def value(self, root: nn.Module) -> Any:
        """Returns their present values."""
        return dict(os.environ)


_BY_NAME: dict[str, RunKey | EnvironmentKey] = {
    **dict.fromkeys(("optimizers", "lr_schedulers", "lr_scheduler_configs", "param_groups"), RunKey("param_groups")),
    **dict.fromkeys(("callbacks", "early_stopping_callback", "checkpoint_callback"), RunKey("callbacks")),
    **dict.fromkeys(("environ", "getenv"), EnvironmentKey()),
}


def code_guards(root: nn.Module, opened: Iterable[str], functions: Iterable[Any] = ()) -> dict[GuardKey, Any]:
    """Returns what recorded code may read besides attributes of modules, with the current values.

    Args:
        root: The module.
        opened: Paths of the modules whose forward is recorded.
        functions: Methods of the root, or functions, that run as well.
    """
    found: dict[GuardKey, Any] = {}
    begins = [(path, type(root.get_submodule(path)), ("forward",)) for path in opened]
    for path, cls, begin in (*begins, ("", type(root), tuple(functions))):
        for key, value in _class_values(root, path, cls, begin):
            if begin[:1] != ("forward",) and isinstance(key, tuple):
                continue  # a function may run before what is recorded; of modules it is noted what that reads
            with suppress(Unplain):
                found.setdefault(key, comparable(value))
    return found


def functions_read(root: nn.Module, read: Iterable[GuardKey]) -> list[Any]:
    """Returns the functions in attributes of modules that code has read: it may have called them.

    Args:
        root: The module.
        read: The attributes.
    """
    named = [key for key in read if isinstance(key, tuple) and key[0] is not None]
    values = [vars(root.get_submodule(str(path))).get(name) for path, name in named]
    return [function for value in values for function in _functions_in(value, _MAX_DEPTH)]


def _functions_in(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, (FunctionType, MethodType, partial)):
        yield value
    elif depth and not (isinstance(value, (list, tuple, dict)) and len(value) > _MAX_SIZE):
        for _, item in parts_of(value):
            yield from _functions_in(item, depth - 1)


def _class_values(root: nn.Module, path: str, cls: type, begin: Iterable[Any]) -> Iterator[tuple[GuardKey, Any]]:
    classes = [base for base in cls.__mro__ if is_own_code(base.__module__)]
    in_classes = {name: value for base in reversed(classes) for name, value in vars(base).items()}
    waiting: list[Any] = [in_classes.get(each) if isinstance(each, str) else each for each in begin]
    seen = set[int]()
    while waiting and len(seen) < _MAX_FUNCTIONS:
        found = waiting.pop()
        while isinstance(found, partial):
            found = found.func
        function = found.fget if isinstance(found, property) else function_of(found)
        if not isinstance(function, FunctionType) or id(function) in seen or not is_own_code(function.__module__ or ""):
            continue
        seen.add(id(function))
        (named, _), read = names_of(function.__code__), globals_read(function.__code__)
        for name in sorted(named):
            if name in _BY_NAME:
                yield _BY_NAME[name], _BY_NAME[name].value(root)
            if name in in_classes:
                waiting.append(in_classes[name])
                if not hasattr(type(in_classes[name]), "__get__"):
                    yield (path, name), in_classes[name]
            if name in read and name in function.__globals__:
                value = function.__globals__[name]
                waiting.append(value)
                yield from _of_variable(function, name, value, named)


def _of_variable(function: FunctionType, name: str, value: Any, named: frozenset[str]) -> Iterator[tuple[GuardKey, Any]]:
    module = str(function.__globals__.get("__name__", ""))
    if isinstance(value, nn.Module):
        return  # what is read from modules is noted where it is
    if not isinstance(value, (ModuleType, type)):
        yield CodeKey(module, (name,)), value
        return
    prefix = CodeKey(value.__name__, ()) if isinstance(value, ModuleType) else CodeKey(module, (name,))
    if is_own_code(value.__name__) if isinstance(value, ModuleType) else is_users(value):
        for attribute in sorted(named & vars(value).keys()):
            if not hasattr(type(vars(value)[attribute]), "__get__"):
                yield CodeKey(prefix.module, (*prefix.names, attribute)), vars(value)[attribute]
