"""How much memory there is, and how much of it autograd takes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from lightning_fxpipe._compat.torch import storage_key

# Of the memory that is free; the rest is for what runs beside us.
_USABLE_SHARE = 0.8


def has_room(num_bytes: int) -> bool:
    """True if this machine has the memory for so many bytes more, or its memory is unknown."""
    available = available_memory()
    return available is None or num_bytes <= available * _USABLE_SHARE


def available_memory() -> int | None:
    """Bytes of memory that processes of this machine or container can still take; None if unknown."""
    found = [amount for amount in (_of_machine(), _of_container()) if amount is not None]
    return min(found, default=None)


def memory_for_rank(device: torch.device, num_ranks: int) -> int | None:
    """Bytes that a rank can still take on its device; None if unknown.

    Args:
        device: The rank's.
        num_ranks: Ranks that share the machine's memory, where the device has none of its own.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = available_memory()
    return None if available is None else available // num_ranks


class SavedBytes:
    """Counts what autograd keeps for the backward pass of what a block computes.

    Args:
        others: Tensors whose memory is there anyway, such as parameters.
    """

    def __init__(self, others: Iterable[Tensor]) -> None:
        self._seen = {_memory(tensor)[0] for tensor in others if not tensor.is_meta}
        self._alive: list[Tensor] = []  # so that their memory's keys stay their own
        self.num_bytes = 0

    def counting(self) -> AbstractContextManager[None]:
        """In the block it counts."""
        hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        return hooks

    def _pack(self, tensor: Tensor) -> Tensor:
        key, num_bytes = _memory(tensor)
        alone = tensor.detach()  # a result would keep its operation, which keeps the result: for ever
        if key not in self._seen:
            self._seen.add(key)
            self._alive.append(alone)
            self.num_bytes += num_bytes
        return alone


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Returns a key of a tensor's memory, and its bytes; of a sparse tensor at most."""
    if tensor.layout is torch.strided:
        return storage_key(tensor), tensor.untyped_storage().nbytes()
    return id(tensor), tensor.numel() * tensor.element_size()


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _of_container() -> int | None:
    """Returns the memory that the container may take in addition; its file cache counts as free."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - used + int(statistics["inactive_file"])
    except (OSError, ValueError, KeyError):
        return None  # no limit reads "max"
