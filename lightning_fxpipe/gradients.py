"""Gradients between the schedule and Lightning, and over the stages.

Lightning's closure calls the step, then ``zero_grad``, then ``backward``; a schedule has run backward before the step
returns. So the gradients are parked while ``zero_grad`` and its hooks run, and installed in ``Strategy.backward``: every hook
sees the gradients that it sees on one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ParkedGradients:
    """Holds one batch's gradients from the end of its schedule to ``Strategy.backward``."""

    def __init__(self) -> None:
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []

    @contextmanager
    def collect(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Parks the gradients that the block computes; ``.grad`` is afterwards what it was before."""
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
            self._gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient

    def install(self) -> None:
        """Adds the parked gradients to ``.grad``, as a backward pass does."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._gradients = []

    def discard(self) -> None:
        """Drops the parked gradients."""
        self._gradients = []


class SharedParameters:
    """Parameters of which several stages hold a copy, such as an embedding that is also the output layer.

    The copies start equal, and equal gradients keep them equal: each batch their gradients are summed. Buffers that several
    stages read start equal, too.

    Args:
        copies: For each shared tensor its holders' global ranks, first holder first, and this rank's copy if it has one.
            In the same order on every rank: the constructor makes process groups, so it is called by every rank.
    """

    def __init__(self, copies: Iterable[tuple[tuple[int, ...], Tensor | None]]) -> None:
        self._mine: list[tuple[Tensor, dist.ProcessGroup]] = []
        self._secondary: set[int] = set()
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for ranks, tensor in copies:
            if ranks not in groups:
                groups[ranks] = dist.new_group(sorted(ranks))
            if tensor is None:
                continue
            self._mine.append((tensor, groups[ranks]))
            dist.broadcast(tensor.data, src=ranks[0], group=groups[ranks])
            if dist.get_rank() != ranks[0]:
                self._secondary.add(id(tensor))

    def sum_gradients(self) -> None:
        """Sums the gradients over the copies. Called by every rank that holds one, after the schedule."""
        for group, parameters in self._trainable_by_group():
            # No copy may have one, as when the loss does not depend on it; then it must stay None, or AdamW would decay it.
            has_gradient = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
            flags = has_gradient.to(parameters[0].device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
            for parameter, flag in zip(parameters, flags.tolist(), strict=True):
                if flag:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    dist.all_reduce(parameter.grad, group=group)

    def _trainable_by_group(self) -> list[tuple[dist.ProcessGroup, list[Tensor]]]:
        found: dict[dist.ProcessGroup, list[Tensor]] = {}
        for tensor, group in self._mine:
            if tensor.requires_grad:
                found.setdefault(group, []).append(tensor)
        return list(found.items())

    def is_secondary(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is a copy that another rank counts and saves."""
        return id(parameter) in self._secondary


def clip_by_global_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, shared: SharedParameters, group: dist.ProcessGroup | None
) -> Tensor:
    """Clips by the norm of the whole model's gradients, and returns that norm. Called by every rank of the pipeline.

    As ``torch.nn.utils.clip_grad_norm_``, whose norm would be that of one stage.
    """
    mine = [parameter for parameter in parameters if parameter.grad is not None]
    counted = [parameter.grad for parameter in mine if not shared.is_secondary(parameter) and parameter.grad is not None]
    local = torch.nn.utils.get_total_norm(counted) if counted else torch.zeros(())
    square = local.to(device="cpu", dtype=torch.float64).square()
    dist.all_reduce(square, group=group)
    total = square.sqrt()
    for device, members in _by_device(mine).items():
        torch.nn.utils.clip_grads_with_norm_(members, max_norm, total.to(device=device, dtype=torch.float32))
    return total


def _by_device(parameters: Iterable[nn.Parameter]) -> Mapping[torch.device, list[nn.Parameter]]:
    found: dict[torch.device, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.device, []).append(parameter)
    return found
