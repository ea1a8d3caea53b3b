"""Stages and schedules of ``torch.distributed.pipelining`` with what its public classes do not offer.

In torch 2.13 and 2.14 a stage makes its receive buffers for all microbatches at its first step, and keeps them, as it keeps
what evaluation has sent. torch 2.15 makes a buffer right before it receives into it, and gives it back with the computation
that uses it. Where torch does so itself, there is nothing to do here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed.distributed_c10d as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.torch_version import TorchVersion

from lightning_fxpipe._compat.torch import patched_attributes

# Before 2.13 each tensor that a stage gives to another of its rank must have a gradient, which whole numbers cannot have.
_GIVES_ANY_DTYPE = TorchVersion(torch.__version__) >= TorchVersion("2.13")


class Skips(Protocol):
    """What goes past stages, for a stage (``schedules.skips``)."""

    def extended(self, index: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What is differentiated for a microbatch."""

    def send_back(self, index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Takes the gradients of the inputs that were added."""


class FrugalStage(PipelineStage):
    """As ``PipelineStage``, but

    - what its module receives is the module's own; nothing is received into it again;
    - stages of one rank may give each other what they have in passes without backward, too;
    - where the backward pass of a microbatch must not be split, all of it runs where its first half should;
    - it may have inputs and outputs that torch does not know of.

    Args:
        *args: As of ``PipelineStage``.
        splits: Says of a microbatch whether the gradients of weights may come later than those of inputs. torch finds what
            computes them by walking from the inputs, so that without one that trains they would be lost.
        skips: Inputs and outputs besides.
        **kwargs: As of ``PipelineStage``.
    """

    # The methods have public names. So have `args_recv_info`, `grad_recv_info`, their `buffer`, `bwd_cache` and `fwd_cache`,
    # and what `backward_maybe_with_nosync` takes, but nothing says what they are. torch 2.13-2.15, which has no more
    # `fwd_cache`.

    def __init__(
        self, *args: Any, splits: Callable[[int], bool] = lambda index: True, skips: Skips | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.splits = splits
        self.skips = skips
        self._going_back = 0  # the microbatch
        self._is_done: set[int] = set()  # microbatches whose gradients of weights are there
        self._begun: list[dict[int, tuple[Any, ...]]] = []  # what has been received into in this step

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # torch greets the ranks of the neighbours. Before 2.13 also the only rank, which gloo cannot send to.
        return super()._get_init_p2p_neighbors_ops() if self.group_size > 1 else []

    def _validate_fwd_outputs(self, outputs: tuple[torch.Tensor, ...]) -> None:
        # torch 2.11 compares what a stage gives with what was announced; 2.13 does not. The last stage sends nothing: what it
        # gives may have any type, such as float64 with `precision="64-true"`.
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)  # type: ignore[misc]

    def clear_runtime_states(self) -> None:
        """Between two steps."""
        super().clear_runtime_states()
        self._begun.clear()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Makes the buffers as well."""
        self._make_buffers(self.args_recv_info, fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """What another stage of this rank gives; gives buffers that nobody needs away."""
        self._drop_at_first(self.args_recv_info)
        if _GIVES_ANY_DTYPE:
            super().set_local_fwd_input(prev_stage_outputs, mb_index)
            return
        for info, tensor in zip(self.args_recv_info[mb_index], prev_stage_outputs, strict=True):
            info.buffer = tensor.detach().requires_grad_(tensor.requires_grad)

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

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """The gradients for another stage of this rank; none without a backward pass, at which torch raises."""
        if not self.has_backward:
            return ()
        return super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """The gradients from another stage of this rank; zeros where there is none, which torch before 2.13 forgets."""
        if self.has_backward:
            self._drop_at_first(self.grad_recv_info)
            if any(gradient is None for gradient in next_stage_bwd_outputs):
                self._make_buffers(self.grad_recv_info, mb_index)
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
            for info, gradient in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True):
                if gradient is None and info.buffer is not None:
                    info.buffer.zero_()

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Gives the buffers away; runs all of a backward pass that must not be split."""
        if not full_backward and self.has_backward and not self.splits(bwd_chunk_id):
            full_backward = True
            self._is_done.add(bwd_chunk_id)
        self._going_back = bwd_chunk_id
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if self.has_backward:
            # Half a backward pass leaves gradients as the operations give them, and transports take contiguous ones only.
            gradients = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(None if each is None else each.contiguous() for each in gradients)
            self._drop_buffers(self.grad_recv_info[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Nothing where all of the backward pass has run."""
        if bwd_chunk_id in self._is_done:
            self._is_done.remove(bwd_chunk_id)
        else:
            self._going_back = bwd_chunk_id
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        """With what torch does not know of, where gradients of inputs are computed: all at once, or in the first half."""
        if self.skips is None or backward_type == "weight":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        num_known, index = len(bwd_kwargs["input_values"]), self._going_back
        arguments = self.skips.extended(index, bwd_kwargs)
        gradients, groups = super().backward_maybe_with_nosync(backward_type, arguments, last_backward)
        self.skips.send_back(index, gradients[num_known:])
        return gradients[:num_known], groups

    def _make_buffers(self, infos: dict[int, tuple[Any, ...]], index: int) -> None:
        self._drop_at_first(infos)
        for info in infos[index]:
            if (like := info.buffer) is not None:
                info.buffer = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device)

    def _drop_at_first(self, infos: dict[int, tuple[Any, ...]]) -> None:
        if not any(infos is begun for begun in self._begun):  # a table may begin with any microbatch
            self._begun.append(infos)
            for each in infos.values():
                self._drop_buffers(each)

    def _drop_buffers(self, infos: tuple[Any, ...]) -> None:
        """Leaves tensors without memory in their places, which say what is to be made."""
        for info in infos:
            if info.buffer is not None and not info.buffer.is_meta:
                info.buffer = _without_memory(info.buffer.shape, info.buffer.stride(), info.buffer.dtype)


@contextmanager
def watched(stage: FrugalStage, around: Callable[[str, int], AbstractContextManager[None]]) -> Iterator[None]:
    """In the block, what a stage computes for a microbatch runs in the context that ``around`` gives.

    Outside of it nothing is asked or called for that.

    Args:
        stage: The stage.
        around: Takes what is computed, as torch writes it (F, B, I or W), and the microbatch.
    """
    forward, backward, weights = stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk

    def watched_forward(index: int, *args: Any, **kwargs: Any) -> Any:
        with around("F", index):
            return forward(index, *args, **kwargs)

    def watched_backward(index: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> None:
        with around("B" if full_backward else "I", index):
            backward(index, loss, full_backward, last_backward)

    def watched_weights(index: int, last_backward: bool = False) -> None:
        with around("W", index):
            weights(index, last_backward)

    with patched_attributes(
        (stage, "forward_one_chunk", watched_forward),
        (stage, "backward_one_chunk", watched_backward),
        (stage, "backward_weight_one_chunk", watched_weights),
    ):
        yield


class TableSchedule(_PipelineScheduleRuntime):
    """Runs a table of actions.

    torch runs its own schedules of several stages a rank so, and has no public way to give it another table (its
    ``_load_csv`` reads a file). torch keeps losses in the order in which they come, and looks for them by the microbatch; here
    they are kept by that, since a table may take microbatches in any order. torch 2.13-2.15.

    Args:
        stages: This rank's.
        num_microbatches: As in the table.
        rows: The actions of each rank, as torch writes them.
        **options: As of torch's schedules.
    """

    def __init__(
        self, stages: Sequence[PipelineStage], num_microbatches: int, rows: Sequence[Sequence[str]], **options: Any
    ) -> None:
        super().__init__([*stages], num_microbatches, **options)  # type: ignore[no-untyped-call]
        self._losses: dict[int, Any] = {}
        self.pipeline_order = {rank: [_Action.from_str(action) for action in row] for rank, row in enumerate(rows)}
        self._prepare_schedule_with_comms(self.pipeline_order)

    def _maybe_compute_loss(self, stage: PipelineStage, output: Any, target_mbs: Any, mb_index: int, *args: Any) -> None:
        num_before = len(self._internal_losses)
        super()._maybe_compute_loss(stage, output, target_mbs, mb_index, *args)  # type: ignore[no-untyped-call]
        if len(self._internal_losses) > num_before:
            self._losses[mb_index] = self._internal_losses[-1]

    def _maybe_get_loss(self, stage: PipelineStage, mb_index: int) -> Any:
        return self._losses.pop(mb_index, None) if stage.is_last else None


def rows_of(schedule: Any) -> list[list[str]]:
    """The table that one of torch's schedules of several stages a rank runs: the actions of each rank, as torch writes them.

    An action that is two at once (DualPipeV) is written as these, one after the other. The attribute has a public name, but
    nothing says what it is.
    """
    order: dict[int, list[Any]] = schedule.pipeline_order
    rows = []
    for rank in sorted(order):
        actions = (action for action in order[rank] if action is not None)
        rows.append([str(part) for action in actions for part in (action.sub_actions or (action,))])
    return rows


def rows_of_class(kind: Any, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> list[list[str]]:
    """As :func:`rows_of`, of a schedule of this class, without stages or process groups: what it asks of a stage is made up."""
    stages = [
        SimpleNamespace(num_stages=num_ranks * stages_per_rank, group_size=num_ranks, group_rank=0, submod=None)
        for _ in range(stages_per_rank)
    ]
    return rows_of(kind(stages, num_microbatches))


@contextmanager
def unlogged() -> Iterator[None]:
    """In the block, torch does not print a whole schedule with the error of a stage, which is raised anyway."""
    logger = logging.getLogger(_PipelineScheduleRuntime.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@lru_cache(maxsize=1024)
def _without_memory(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this kind; torch takes longer to make one than to make one with memory."""
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
