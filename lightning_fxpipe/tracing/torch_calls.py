"""Properties of a torch call that the recorder needs: if it makes a node, the tensors that it changes in place, its modes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat.fake_sizes import number_hint
from lightning_fxpipe._compat.torch import (
    FakeTensor,
    modules_inside,
    parametrizations_are_cached,
    storage_key,
    tree_leaves,
    tree_map,
    version_of,
)
from lightning_fxpipe.tracing.signals import NoRegion, RecordError
from lightning_fxpipe.user_code.frames import user_source
from lightning_fxpipe.user_code.objects import PLAIN_TYPES

# Attributes and methods that ask about a tensor and make none; they are answered by the fake tensor and leave no node.
_QUERY_ATTRIBUTES = frozenset(
    """shape dtype device ndim layout requires_grad is_cuda is_cpu is_meta is_sparse is_quantized is_nested is_leaf grad_fn
    is_mps is_xpu itemsize nbytes names _version grad output_nr is_mkldnn retains_grad is_xla _backward_hooks""".split()  # noqa: SIM905
)
_QUERY_METHODS = """size dim ndimension numel nelement stride is_floating_point is_contiguous __len__ element_size get_device
    __repr__ __format__ is_complex storage_offset data_ptr __hash__ is_signed untyped_storage is_same_size
    is_inference""".split()  # noqa: SIM905
_QUERIES = frozenset(getattr(torch.Tensor, name) for name in _QUERY_METHODS) | {
    torch.is_floating_point,
    torch.numel,
    torch.is_tensor,
    torch.is_complex,
    # What torch calls where a symbolic number is calculated with.
    *(torch.sym_float, torch.sym_int, torch.sym_not, torch.sym_max, torch.sym_min, torch.sym_ite, torch.sym_sum),
}

# Ways in which code looks at a tensor's values, and the same outside of torch's dispatch.
LOOKS: dict[Callable[..., Any], Callable[[Tensor], Any]] = {
    Tensor.item: Tensor.item,
    Tensor.tolist: Tensor.tolist,
    Tensor.numpy: Tensor.numpy,
    Tensor.__array__: Tensor.numpy,
    Tensor.__bool__: bool,
    Tensor.__float__: float,
    Tensor.__int__: int,
    Tensor.__index__: int,
}

# torch changes running statistics without marking them as changed: its kernels' schemas do not say so. For each function that
# does: where the first of the two is among its arguments, the name of the argument at 5 that says whether it does, and what
# this is by default.
NORMALISATIONS: dict[Callable[..., Any], tuple[int, str, bool]] = {
    nn.functional.batch_norm: (1, "training", False),
    nn.functional.instance_norm: (1, "use_input_stats", True),
    torch.batch_norm: (3, "training", False),
    torch.instance_norm: (3, "use_input_stats", False),
    torch.native_batch_norm: (3, "training", False),
}


# Methods that bear another's name, as `Tensor.__pow__` does, which calls itself `pow`.
_RENAMED_METHODS: dict[Any, str] = {
    value: name for name, value in vars(torch.Tensor).items() if inspect.isfunction(value) and value.__name__ != name
}


class CallContext(NamedTuple):
    """The modes that a call was recorded under."""

    grad_enabled: bool
    device_type: str
    autocast_enabled: bool
    autocast_dtype: torch.dtype | None

    @classmethod
    def current(cls, device_type: str) -> CallContext:
        """The modes of this moment."""
        autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocast else None
        return cls(torch.is_grad_enabled(), device_type, autocast, dtype)

    def current_if_other(self) -> CallContext | None:
        """The modes of this moment; None if they are these."""
        current = CallContext.current(self.device_type)
        return None if current == self else current

    @contextmanager
    def active(self) -> Iterator[None]:
        """Runs the block under these modes."""
        with (
            torch.set_grad_enabled(self.grad_enabled),
            torch.autocast(self.device_type, enabled=self.autocast_enabled, dtype=self.autocast_dtype),
        ):
            yield


def check_parametrizations() -> None:
    """Raises :class:`NoRegion` in a block of ``parametrize.cached()``, which would reach over microbatches and calls."""
    if parametrizations_are_cached():
        raise NoRegion(
            "A block of torch.nn.utils.parametrize.cached() is around a call of the model.",
            where=user_source(),
            observed="parametrized tensors that one microbatch computes and the next ones use again",
            expected="a call outside the block: each microbatch computes its own, from the same weights",
            todo="Remove the block, or move it into the forward of a submodule.",
        )


@contextmanager
def watch_mutation(tensors: list[Tensor]) -> Iterator[Any]:
    """Yields a set that holds, after the block, the storages that the block changed in place."""
    before = [(tensor, version_of(tensor)) for tensor in tensors if isinstance(tensor, FakeTensor)]
    mutated: set[int] = set()
    yield mutated
    mutated.update(storage_key(tensor) for tensor, version in before if version_of(tensor) != version)


def changed_statistics(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The running statistics that a call of one of :data:`NORMALISATIONS` changes; none for other functions."""
    if func not in NORMALISATIONS:
        return []
    first, switch, default = NORMALISATIONS[func]
    if not (args[5] if len(args) > 5 else kwargs.get(switch, default)):
        return []
    places = enumerate(("running_mean", "running_var"), first)
    found = (args[place] if len(args) > place else kwargs.get(name) for place, name in places)
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def running_statistics(module: nn.Module) -> set[int]:
    """Storages that the module's normalisation layers change; see :data:`NORMALISATIONS`."""
    layers = [child for child in modules_inside(module).values() if child.training]
    tensors = [getattr(layer, name, None) for layer in layers for name in ("running_mean", "running_var")]
    return {storage_key(tensor) for tensor in tensors if isinstance(tensor, Tensor)}


# What computes gradients of a step's own.
DIFFERENTIATING = frozenset({torch.autograd.grad, Tensor.backward})


def tensors_among(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in arguments of a torch call: those that ``tree_leaves`` finds, which takes four times as long."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (tuple, list):
            yield from tensors_among(value)
        elif type(value) is dict:
            yield from tensors_among(value.values())
        elif value is not None and type(value) not in PLAIN_TYPES:
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


# Functions with a size that follows from a float.
_SIZED_BY_FLOATS = frozenset(
    {torch.arange, torch.range, nn.functional.interpolate, nn.functional.upsample}
    | {nn.functional.fractional_max_pool2d, nn.functional.fractional_max_pool3d}
)


def call_on_fakes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function on fakes, with the traced values of symbolic floats.

    Most kernels would ask for these, as that of dropout for its probability, and fix them for good. What is made of such a
    value, as by ``torch.tensor``, has none that code could read.
    """
    if func in _SIZED_BY_FLOATS or not any(isinstance(leaf, torch.SymFloat) for leaf in tree_leaves((args, kwargs))):
        return func(*args, **kwargs)
    args, kwargs = tree_map(number_hint, (args, kwargs))
    result = func(*args, **kwargs)
    for leaf in tree_leaves(result):
        if isinstance(leaf, FakeTensor):
            leaf.constant = None
    return result


def is_query(func: Callable[..., Any]) -> bool:
    """Returns True if a torch function only asks about a tensor; it leaves no node and has no number in a step."""
    if getattr(func, "__name__", "") == "__get__":
        return func.__self__.__name__ in _QUERY_ATTRIBUTES  # type: ignore[attr-defined]
    return func in _QUERIES


def target_of(func: Callable[..., Any]) -> tuple[str, Any, tuple[Any, ...]]:
    """Fx operation, target and extra arguments of a torch function."""
    name = getattr(func, "__name__", None)
    if name == "__get__":
        return "call_function", getattr, (func.__self__.__name__,)  # type: ignore[attr-defined]
    if name == "__set__":
        raise RecordError(f"assigning to Tensor.{func.__self__.__name__} cannot be recorded")  # type: ignore[attr-defined]
    if name is not None and getattr(torch.Tensor, name, None) is func:
        return "call_method", name, ()
    if func in _RENAMED_METHODS:
        return "call_method", _RENAMED_METHODS[func], ()
    return "call_function", func, ()
