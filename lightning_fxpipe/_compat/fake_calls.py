"""Operators on fake tensors that are called again: a model repeats its layers, and what an operator makes of tensors without
data follows from their sizes, strides and kinds.

torch has a memory for such calls, too. But where sizes are symbols, it takes half a millisecond to put a result together from
them, with a dozen steps of arithmetic in Python, and a third of all operators are not remembered. Here a result is a copy of an
earlier one, for which nothing is calculated but the size of its memory. torch 2.9-2.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from lightning_fxpipe._compat.modes import TorchDispatchMode
from lightning_fxpipe._compat.operators import is_writing, written_arguments

_PLAIN = frozenset({int, float, bool, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device})
_BY_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_LIFTS = frozenset({"aten::lift", "aten::lift_fresh", "aten::lift_fresh_copy"})  # their result may know its value
_DEVICE_OF = torch.ops.prim.device.default


class Unlike(Exception):
    """A call cannot be compared: for a part of it equality is undefined."""


@dataclass(frozen=True)
class Made:
    """A tensor that a call has made.

    Attributes:
        example: A tensor on the meta device with its sizes and strides.
        offset: Where in its memory it begins.
        device: Its device.
        base: Which of the call's tensors it shares memory with; None where it has its own.
    """

    example: Tensor
    offset: int | torch.SymInt
    device: torch.device
    base: int | None


@dataclass(frozen=True)
class _Known:
    """Result of a call: a tensor, or ``container`` of several; for a number one of its arguments."""

    results: tuple[Made | int, ...]
    container: type | None


class Likeness:
    """When a fake mode's tensors are alike but for their values, and copies of them."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        with torch._C._DisableTorchDispatch():
            plain = FakeTensor(mode, torch.empty(0, device="meta"), torch.device("cpu"))
        self._attributes = frozenset({*vars(plain), "_is_param"})

    def is_bare(self, tensor: Tensor) -> bool:
        """Returns True if a tensor has no attributes but torch's."""
        return vars(tensor).keys() <= self._attributes

    def describe(self, values: Iterable[Any], parts: list[Any], tensors: list[FakeTensor]) -> None:
        """Adds to ``parts`` all that is to know of ``values`` but what is in their tensors, and those to ``tensors``.

        Raises:
            Unlike: One is none that can be described.
        """
        for value in values:
            kind = type(value)
            if kind in _PLAIN:
                parts += (kind, value)
            elif isinstance(value, FakeTensor):
                if value.fake_mode is not self._mode or value.layout is not torch.strided:
                    raise Unlike
                parts += (value.dtype, value.fake_device, value.constant is not None)
                parts += (value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference())
                parts += (tuple(map(_size, value.shape)), tuple(map(_size, value.stride())), _size(value.storage_offset()))
                tensors.append(value)
            elif kind is torch.SymInt:
                parts += (kind, _size(value))
            elif kind is list or kind is tuple or kind is torch.Size:
                parts += (kind, len(value))
                self.describe(value, parts, tensors)
            elif kind is dict:
                parts += (kind, len(value))
                for key, entry in value.items():
                    self.describe((key, entry), parts, tensors)
            else:
                raise Unlike

    def made(self, results: Iterable[Any], tensors: Sequence[FakeTensor]) -> Iterator[Made | int]:
        """Yields for each result of a call with ``tensors`` the index of one of these, or the data that a copy can be made
        of.

        Raises:
            Unlike: One is none of both.
        """
        memory = [_memory(tensor) for tensor in tensors]
        own: set[int] = set()
        for tensor in results:
            same = [index for index, other in enumerate(tensors) if other is tensor]
            if same:
                yield _only(same)
                continue
            if type(tensor) is not FakeTensor or not _is_plain(tensor) or free_unbacked_symbols(tensor):
                raise Unlike
            key, offset, base = _memory(tensor), tensor.storage_offset(), None
            if key in memory:
                base = _only([index for index, other in enumerate(memory) if other == key])
                if tensors[base].is_conj() or tensors[base].is_neg() or tensors[base].dtype != tensor.dtype:
                    raise Unlike
            elif key in own or _size(offset) != 0:
                raise Unlike
            own.add(key)
            shape, strides = tensor.shape, tensor.stride()
            with torch._C._DisableTorchDispatch():
                example = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
            yield Made(example, offset, tensor.fake_device, base)

    def copy(self, made: Made, tensors: Sequence[FakeTensor]) -> FakeTensor:
        """A tensor like one that an earlier call has made, of the tensors of this one."""
        with torch._C._DisableTorchDispatch():
            if made.base is None:
                like = made.example
                copy = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
            else:
                with in_kernel_invocation_manager(self._mode):
                    copy = tensors[made.base].as_strided(made.example.shape, made.example.stride(), made.offset)
            return FakeTensor(self._mode, copy, made.device)


class WritesData(RuntimeError):
    """Code that runs on fakes changes a tensor with data in place, as one that a list holds."""

    def __init__(self) -> None:
        super().__init__("a tensor is changed in place that is neither an argument nor an attribute of a module")


class _RepeatedCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lies above a fake mode, and answers operators that this has run before.

    Not those of others than torch, those whose result goes by data, and those that return anything but arguments and tensors
    with memory of their own or of one argument, or that change what an argument is.

    Nothing writes to a tensor with data: where an operator has no fakes, the fake mode would run it. torch 2.9-2.15.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._likeness = Likeness(mode)
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._follows: dict[Any, bool] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):  # asked twice for each operator
            return args[0].fake_device
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not self._mode:  # there is data in this call
            return func(*args, **kwargs)
        if is_writing(func) and any(not isinstance(tensor, FakeTensor) for tensor in written_arguments(func, args, kwargs)):
            raise WritesData
        follows = self._follows.get(func)
        if follows is None:
            follows = self._follows[func] = _follows_from_metadata(func)
        if not follows:
            return func(*args, **kwargs)
        try:
            key, tensors = self._described(func, args, kwargs)
        except Unlike:
            return func(*args, **kwargs)
        if func._schema.is_mutable and any(tensor.constant is not None for tensor in tensors):  # whose value it forgets
            return func(*args, **kwargs)
        known = self._known.get(key)
        if known is None:
            result = func(*args, **kwargs)
            self._remember(key, result, tensors, func, args, kwargs)
            return result
        results = [tensors[made] if isinstance(made, int) else self._likeness.copy(made, tensors) for made in known.results]
        return results[0] if known.container is None else known.container(results)

    def _described(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], list[FakeTensor]]:
        """All that the kind of a call's results may follow from, and the tensors among its arguments.

        Raises:
            Unlike: An argument is none that can be described.
        """
        tensors: list[FakeTensor] = []
        parts: list[Any] = [func, torch.get_default_dtype(), torch._C._get_default_device(), torch.is_inference_mode_enabled()]
        self._likeness.describe(args, parts, tensors)
        for name, value in kwargs.items():
            parts.append(name)
            self._likeness.describe((value,), parts, tensors)
        return tuple(parts), tensors

    def _remember(
        self,
        key: tuple[Any, ...],
        result: Any,
        tensors: Sequence[FakeTensor],
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        container = None if isinstance(result, Tensor) else type(result)
        if container not in (None, list, tuple):
            return
        try:
            if self._described(func, args, kwargs)[0] != key:  # it has given an argument another shape
                return
            made = tuple(self._likeness.made((result,) if container is None else result, tensors))
        except Unlike:
            return
        self._known[key] = _Known(made, container)


def _follows_from_metadata(func: Any) -> bool:
    """Returns True if what an operator returns, but for values, can only follow from its arguments, but for theirs."""
    is_torchs = isinstance(func, torch._ops.OpOverload) and func.namespace in ("aten", "prims")
    return is_torchs and func._schema.name not in _LIFTS and not _BY_VALUES.intersection(func.tags)


def _only(indices: Sequence[int]) -> int:
    """The one that there is.

    Raises:
        Unlike: There are several, of which another call may have another.
    """
    if len(indices) > 1:
        raise Unlike
    return indices[0]


def _is_plain(tensor: FakeTensor) -> bool:
    """Returns True if there is no more to a tensor than memory, sizes, strides, type and device."""
    is_more = tensor.constant is not None or tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return tensor.layout is torch.strided and not is_more


def _size(value: Any) -> Any:
    if type(value) is int:
        return value
    if value.node.hint is None:  # it depends on data
        raise Unlike
    return value.node.expr


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def repeated_calls(mode: FakeTensorMode) -> Iterator[None]:
    """In the block, in which the fake mode is active, it runs an operator once for arguments that differ in values only.

    The kernel of a convolution is chosen without a condition on sizes: on CPUs it depends on whether a batch has 16 samples,
    and the results' shapes do not.
    """
    select = torch._C._select_conv_backend

    def select_for_any_size(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() if mode.shape_env is None else mode.shape_env.suppress_guards():
            return select(*args, **kwargs)

    before, mode.cache_enabled = mode.cache_enabled, False  # a second memory costs more than it saves
    torch._C._select_conv_backend = select_for_any_size
    try:
        with _RepeatedCalls(mode):
            yield
    finally:
        mode.cache_enabled = before
        torch._C._select_conv_backend = select
