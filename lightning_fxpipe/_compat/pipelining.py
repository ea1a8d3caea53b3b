"""A stage of ``torch.distributed.pipelining`` whose buffers live as long as they are needed.

In torch 2.13 and 2.14 a stage makes its receive buffers for all microbatches at its first step, and keeps them, as it keeps
what evaluation has sent. torch 2.15 makes a buffer right before it receives into it, and gives it back with the computation
that uses it. Where torch does so itself, there is nothing to do here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed.distributed_c10d as dist
from torch.distributed.pipelining import PipelineStage


class FrugalStage(PipelineStage):
    """As ``PipelineStage``. What its module receives is the module's own; nothing is received into it again."""

    # The methods have public names. So have `args_recv_info`, `grad_recv_info`, their `buffer`, and `fwd_cache`, but nothing
    # says what they are. torch 2.13-2.15, which has no more `fwd_cache`.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Makes the buffers as well."""
        self._make_buffers(self.args_recv_info, fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Gives the buffers away."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._drop_buffers(self.args_recv_info[fwd_chunk_id])
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Without a backward pass, gives what is sent into the hands of those who send it."""
        found = super().get_fwd_send_ops(fwd_chunk_id)
        if not self.has_backward:
            getattr(self, "fwd_cache", {}).pop(fwd_chunk_id, None)
        return found

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Makes the buffers as well."""
        if self.has_backward and not self.is_last:
            self._make_buffers(self.grad_recv_info, bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Gives the buffers away."""
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            self._drop_buffers(self.grad_recv_info[bwd_chunk_id])

    def _make_buffers(self, infos: dict[int, tuple[Any, ...]], index: int) -> None:
        if index == 0:  # the first that any schedule asks for
            for each in infos.values():
                self._drop_buffers(each)
        for info in infos[index]:
            if (like := info.buffer) is not None:
                info.buffer = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device)

    def _drop_buffers(self, infos: tuple[Any, ...]) -> None:
        """Leaves tensors without memory in their places, which say what is to be made."""
        for info in infos:
            if info.buffer is not None and not info.buffer.is_meta:
                info.buffer = _without_memory(info.buffer.shape, info.buffer.stride(), info.buffer.dtype)


@lru_cache(maxsize=1024)
def _without_memory(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this kind; torch takes longer to make one than to make one with memory."""
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
