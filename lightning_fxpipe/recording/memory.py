"""How much memory a rank takes."""

from __future__ import annotations

import resource
import sys

import torch


def allocated_bytes(device: torch.device) -> int | None:
    """Returns the bytes of tensors on a device now; None on a CPU, which keeps no count."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def peak_bytes(device: torch.device) -> int:
    """The most that tensors have taken on a GPU since its peak was last reset; on a CPU the most that the process has had
    resident since it started.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
