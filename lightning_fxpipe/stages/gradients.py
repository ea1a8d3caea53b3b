"""Gradients over the stages: those of parameters that several hold, and the norm by which all are clipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor, nn

from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.distributed.values import broadcast_tensor


class SharedParameters:
    """Parameters of which several stages hold a copy, such as an embedding that is also the output layer.

    The copies start equal, and equal gradients keep them equal: each batch their gradients are summed. Buffers that several
    stages read start equal, too.

    Args:
        copies: For each shared tensor its holders' global ranks, first holder first, and this rank's copy if it has one.
            In the same order on every rank: the constructor asks for process groups, so it is called by every rank.
        topology: This rank's place.
    """

    def __init__(self, copies: Iterable[tuple[tuple[int, ...], Tensor | None]], topology: Topology) -> None:
        self._mine: list[tuple[Tensor, tuple[dist.ProcessGroup, dist.ProcessGroup]]] = []  # with groups of its holders
        self._secondary: set[int] = set()
        for ranks, tensor in copies:
            group, control_group = topology.group_of(ranks), topology.group_of(ranks, controls=True)
            if tensor is None:
                continue
            self._mine.append((tensor, (group, control_group)))
            broadcast_tensor(tensor, ranks[0], group)
            if dist.get_rank() != ranks[0]:
                self._secondary.add(id(tensor))

    @property
    def are_held(self) -> bool:
        """True if this rank has a copy of any."""
        return bool(self._mine)

    @contextmanager
    def summed_gradients(self) -> Iterator[None]:
        """Sums, over the copies, the gradients that the block computes. Called by every rank that holds one."""
        before = [(tensor, tensor.grad) for tensor, _ in self._mine if tensor.requires_grad]
        for tensor, _ in before:
            tensor.grad = None  # those of earlier batches have been summed
        try:
            yield
            self._sum_gradients()
        finally:
            for tensor, earlier in before:
                if earlier is not None:
                    tensor.grad = earlier if tensor.grad is None else earlier.add_(tensor.grad)

    def _sum_gradients(self) -> None:
        by_groups: dict[tuple[dist.ProcessGroup, dist.ProcessGroup], list[Tensor]] = {}
        for tensor, groups in self._mine:
            if tensor.requires_grad:
                by_groups.setdefault(groups, []).append(tensor)
        for (group, control_group), parameters in by_groups.items():
            # No copy may have one, as when the loss does not depend on it; then it must stay None, or AdamW would decay it.
            flags = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device="cpu")
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=control_group)
            for parameter, flag in zip(parameters, flags.tolist(), strict=True):
                if flag:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    dist.all_reduce(parameter.grad, group=group)

    def is_secondary(self, parameter: nn.Parameter) -> bool:
        """Returns True if the parameter is a copy that another rank counts and saves."""
        return id(parameter) in self._secondary


def clip_by_global_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, shared: SharedParameters, topology: Topology
) -> Tensor:
    """Clips by the norm of the whole model's gradients, and returns that norm. Called by every rank of the pipeline.

    As ``torch.nn.utils.clip_grad_norm_``, whose norm would be that of one stage. The host does not wait for the norm.
    """
    mine = [parameter for parameter in parameters if parameter.grad is not None]
    counted = [parameter.grad for parameter in mine if not shared.is_secondary(parameter) and parameter.grad is not None]
    local = torch.nn.utils.get_total_norm(counted) if counted else torch.zeros((), device=topology.device)
    square = local.to(topology.device, torch.float64).square()
    dist.all_reduce(square, group=topology.group)
    total = square.sqrt()
    torch.nn.utils.clip_grads_with_norm_(mine, max_norm, total.to(torch.float32))
    return total
