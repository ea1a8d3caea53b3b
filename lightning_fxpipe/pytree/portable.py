"""Values of user code on their way to the other ranks."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fxpipe._compat.torch import tree_leaves, tree_map
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.pytree.sizes import as_bytes

_HOST = torch.device("cpu")
_SMALL_BYTES = 1 << 16
# torch 2.13 pickles tensors of the others (unsigned integers, floats of 8 bits, complex halves), and cannot read them.
_PICKLED_DTYPES = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)


def packed(value: Any) -> bytes:
    """Pickles a value with tensors of any dtype; ``pickle.loads`` reads the result."""
    buffer = io.BytesIO()
    _Packing(buffer).dump(value)
    return buffer.getvalue()


class _Packing(pickle.Pickler):
    """Writes the memory of tensors whose dtype torch cannot read back."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.dtype in _PICKLED_DTYPES or obj.is_meta:
            return NotImplemented
        if obj.layout is not torch.strided or obj.is_quantized:
            return NotImplemented
        return _from_bytes, (as_bytes(obj.contiguous()), obj.dtype, tuple(obj.shape))


def _from_bytes(memory: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return memory.view(dtype).reshape(shape)


def sendable(value: Any, refusal: Callable[[str], UnsupportedError]) -> Any:
    """A copy of the value that can be sent, with its tensors on the CPU and without gradients.

    Args:
        value: Anything.
        refusal: Makes the error where the value cannot be pickled, from what was observed.
    """
    (value,) = on_host([value])
    require_picklable(value, refusal)
    return value


def on_host(values: Sequence[Any]) -> list[Any]:
    """The values with their tensors on the CPU and without gradients; one that they have several times, so once.

    Small ones of a device are copied together: for each copy the host waits until the device has done all that it was given.
    """
    tensors = {id(leaf): leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, Tensor)}
    small = [tensor for tensor in tensors.values() if _is_small(tensor)]
    copies = _copied_together(small) if len(small) > 1 else {}
    for key, tensor in tensors.items():
        if key not in copies:
            copies[key] = tensor.detach().cpu()
    return [tree_map(lambda leaf: copies[id(leaf)] if isinstance(leaf, Tensor) else leaf, value) for value in values]


def _is_small(tensor: Tensor) -> bool:
    if tensor.device == _HOST or type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return False
    return 0 < tensor.nbytes <= _SMALL_BYTES and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _copied_together(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """Copies by the tensor's identity."""
    # Those of larger elements first, so that each begins where its dtype may.
    ordered = sorted(tensors, key=lambda tensor: -tensor.element_size())
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in ordered:
        by_device.setdefault(tensor.device, []).append(tensor)
    copies: dict[int, Tensor] = {}
    for group in by_device.values():
        memory = torch.cat([as_bytes(tensor.contiguous()) for tensor in group]).cpu()
        for tensor, part in zip(group, torch.split(memory, [tensor.nbytes for tensor in group]), strict=True):
            # Pickle takes all the memory that a tensor is a view of.
            copies[id(tensor)] = part.view(tensor.dtype).reshape(tensor.shape).clone()
    return copies


def require_picklable(value: Any, refusal: Callable[[str], UnsupportedError]) -> None:
    """Raises the error that ``refusal`` makes from what was observed, where a value cannot be pickled."""
    if type(value) in (type(None), bool, int, float, str, Tensor):  # known to be, and tensors may be large
        return
    try:
        packed(value)
    except Exception as error:
        raise refusal(f"a {type(value).__name__}, which cannot be pickled: {error}") from error
