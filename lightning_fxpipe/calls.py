"""The calls that user code makes, seen from outside: which torch functions count, what they are called, where they stand.

A torch function reaches a ``TorchFunctionMode``; module calls and ``autograd.Function.apply`` do not, so they are patched for
the time that somebody watches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from lightning_fxpipe._compat import patched_attributes

# Attributes and methods that ask about a tensor and make none; they are answered by the fake tensor and leave no node.
_QUERY_ATTRIBUTES = frozenset(
    """shape dtype device ndim layout requires_grad is_cuda is_cpu is_meta is_sparse is_quantized is_nested is_leaf grad_fn
    is_mps is_xpu itemsize nbytes names _version grad output_nr is_mkldnn retains_grad is_xla _backward_hooks""".split()  # noqa: SIM905
)
_QUERY_METHODS = """size dim ndimension numel nelement stride is_floating_point is_contiguous __len__ element_size get_device
    __repr__ __format__ is_complex storage_offset data_ptr __hash__ is_signed untyped_storage is_same_size""".split()  # noqa: SIM905
_QUERIES = frozenset(getattr(torch.Tensor, name) for name in _QUERY_METHODS) | {
    torch.is_floating_point,
    torch.numel,
    torch.is_tensor,
    torch.is_complex,
}


def is_query(func: Callable[..., Any]) -> bool:
    """Whether a torch function only asks about a tensor; it leaves no node and has no number in a step."""
    if getattr(func, "__name__", "") == "__get__":
        return func.__self__.__name__ in _QUERY_ATTRIBUTES  # type: ignore[attr-defined]
    return func in _QUERIES


def call_name(func: Callable[..., Any]) -> str:
    """Name of a torch function, getters by their attribute."""
    name = getattr(func, "__name__", type(func).__name__)
    return f"{name} {func.__self__.__name__}" if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]


class CallMode(Protocol):
    """A ``TorchFunctionMode`` that is shown module calls, too."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any: ...

    def call_module(self, original_call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Makes the call ``original_call(module, *args, **kwargs)``, or something in its place."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: Any) -> Any: ...


@contextmanager
def calls_through(mode: CallMode) -> Iterator[None]:
    """Runs the block under ``mode``, with module and autograd-function calls routed through it."""
    original_call = nn.Module.__call__
    original_apply = vars(torch.autograd.Function)["apply"].__func__
    original_from_numpy = torch.from_numpy

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return mode.call_module(original_call, module, args, kwargs)

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        # ``Function.apply`` never reaches a TorchFunctionMode, so its inner calls would be recorded and its backward lost.
        def autograd_function(*args: Any, **kwargs: Any) -> Any:
            return original_apply(cls, *args, **kwargs)

        return mode.__torch_function__(autograd_function, (), args, kwargs)

    def from_numpy(array: Any) -> Any:
        # The only maker of tensors that a TorchFunctionMode does not see.
        return mode.__torch_function__(original_from_numpy, (), (array,))

    patches = (
        (nn.Module, "__call__", call),
        (torch.autograd.Function, "apply", classmethod(apply)),
        (torch, "from_numpy", from_numpy),
    )
    with patched_attributes(*patches), mode:
        yield


def user_source() -> str | None:
    """``file:line`` of the innermost frame that belongs to neither torch nor this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not is_machinery(name):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def raising_source(error: BaseException) -> str | None:
    """``file:line`` of the innermost user frame of an error's traceback."""
    source, trace = None, error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        if not is_machinery(name):
            source = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return source


def is_machinery(module_name: str) -> bool:
    """Whether a module is torch's or this package's."""
    return module_name.split(".")[0] in ("torch", "lightning_fxpipe", "contextlib")
