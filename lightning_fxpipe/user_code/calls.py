"""The calls that user code makes, seen from outside.

A torch function reaches a ``TorchFunctionMode``; module calls, ``autograd.Function.apply`` and ``from_numpy`` do not, so they
are patched while they are watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from lightning_fxpipe._compat.torch import patched_attributes


def call_name(func: Callable[..., Any]) -> str:
    """Name of a torch function, getters by their attribute."""
    name = getattr(func, "__name__", type(func).__name__)
    return f"{name} {func.__self__.__name__}" if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]


def classes_with_own_call(modules: Iterable[nn.Module]) -> set[type[nn.Module]]:
    """Classes of modules, and their bases, that override ``nn.Module.__call__``."""
    bases = {base for module in modules for base in type(module).__mro__}
    return {base for base in bases if "__call__" in vars(base) and issubclass(base, nn.Module) and base is not nn.Module}


def is_scripted(func: Callable[..., Any]) -> bool:
    """Returns True if a function is one that :func:`calls_through` gives a mode in place of a ``torch.jit.ScriptFunction``."""
    return getattr(func, "__qualname__", "").startswith(f"{calls_through.__qualname__}.") and func.__name__ == "script_function"


class CallMode(Protocol):
    """A ``TorchFunctionMode`` that is shown module calls, too."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any: ...

    def call_module(self, original_call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Makes the call ``original_call(module, *args, **kwargs)``, or something in its place."""

    def classes_with_own_call(self) -> set[type[nn.Module]]:
        """Classes of the modules, and their bases, that override ``nn.Module.__call__``."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: Any) -> Any: ...


@contextmanager
def calls_through(mode: CallMode) -> Iterator[None]:
    """Runs the block under ``mode``, with the other calls routed through it."""
    original_call = nn.Module.__call__
    original_apply = vars(torch.autograd.Function)["apply"]  # bound by itself: a classmethod, since 2.14 one in C
    original_from_numpy, original_script_call = torch.from_numpy, vars(torch.jit.ScriptFunction)["__call__"]

    def routed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return mode.call_module(original, module, args, kwargs)

        return call

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        # ``Function.apply`` never reaches a TorchFunctionMode, so its inner calls would be recorded and its backward lost.
        def autograd_function(*args: Any, **kwargs: Any) -> Any:
            return original_apply.__get__(None, cls)(*args, **kwargs)

        if cls is CheckpointFunction:  # the function under a checkpoint makes calls of its own
            return autograd_function(*args, **kwargs)
        return mode.__torch_function__(autograd_function, (), args, kwargs)

    def script_call(scripted: torch.jit.ScriptFunction[Any, Any], *args: Any, **kwargs: Any) -> Any:
        # Neither does TorchScript; and generated code cannot name an object of that class.
        def script_function(*args: Any, **kwargs: Any) -> Any:
            return original_script_call(scripted, *args, **kwargs)

        return mode.__torch_function__(script_function, (), args, kwargs)

    def from_numpy(array: Any) -> Any:
        return mode.__torch_function__(original_from_numpy, (), (array,))

    patches = (
        (nn.Module, "__call__", routed(original_call)),
        # A class with a ``__call__`` of its own does more there than run its forward: that belongs to the call.
        *((cls, "__call__", routed(vars(cls)["__call__"])) for cls in mode.classes_with_own_call()),
        (torch.autograd.Function, "apply", classmethod(apply)),
        (torch.jit.ScriptFunction, "__call__", script_call),
        (torch, "from_numpy", from_numpy),
    )
    with patched_attributes(*patches), mode:
        yield
