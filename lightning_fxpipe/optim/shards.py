"""Replicas that share out an optimizer: each steps its share of the parameters, keeps the states of those, and gives the others
what has become of them.

This is stage 1 of ZeRO (Rajbhandari et al. 2020, section 5), by whole parameters: whatever an optimizer does with a parameter,
the replica that owns it does as one device would, so all have the values that they would have without. While gradients of
microbatches accumulate a pipeline needs the parameters and gradients of its stages whole, also where FSDP shards them
(``reshard_after_forward=False``, one reduction for each step); what is sharded then as well is what is sharded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed.distributed_c10d as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe._compat.step_hooks import innermost_step_hooks
from lightning_fxpipe.distributed.topology import Replicas
from lightning_fxpipe.distributed.values import receive_value, send_value
from lightning_fxpipe.stages.replicas import share_tensors


class Shards:
    """Which of the replicas steps which of an optimizer's parameters. Made by the ranks with the same stages, in all replicas.

    All of them see all parameters and averaged gradients; only while the optimizer itself runs, its groups have those that
    this replica owns.

    Args:
        optimizer: The optimizer.
        replicas: The replicas.
    """

    def __init__(self, optimizer: Optimizer, replicas: Replicas) -> None:
        self._optimizer = optimizer
        self._replicas = replicas
        self._owners: dict[Tensor, int] = {}
        self._owned_bytes = [0] * replicas.count
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._depth = 0  # of steps: that of a class may call its base's, and torch has hooks around both
        self._is_stepping = False
        self._hidden: list[tuple[dict[str, Any], list[Tensor]]] = []  # groups, and their parameters

    def attach(self) -> None:
        """From here on the optimizer steps what this replica owns."""
        self.detach()
        self._hooks = innermost_step_hooks(self._optimizer, self._before_step, self._after_step, self._after_hooks)

    def detach(self) -> None:
        """The optimizer is the user's alone again; whoever owns what is forgotten."""
        self.end_step()
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
        self._owners.clear()
        self._owned_bytes = [0] * self._replicas.count

    def owns(self, parameter: Tensor) -> bool:
        """Returns True if this replica steps a parameter."""
        if parameter not in self._owners:
            self._share_out()
        return self._owners.get(parameter) == self._replicas.index

    def _share_out(self) -> None:
        """The largest parameter first, each to the replica that has least; those that do not train after those that do."""
        with unwatched_torch():
            new = [
                p for group in self._optimizer.param_groups for p in group["params"] if p not in self._owners and not p.is_meta
            ]
            for parameter in sorted(new, key=lambda p: (p.requires_grad, p.nbytes), reverse=True):
                owner = min(range(self._replicas.count), key=self._owned_bytes.__getitem__)
                self._owners[parameter] = owner
                self._owned_bytes[owner] += parameter.nbytes

    # ------------------------------------------------------------------ a step

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._begin()
            return None

        def run() -> Any:
            """The closure is user code, and sees all parameters."""
            self.pause()
            self._is_stepping = False
            loss = closure()
            self._begin()
            return loss

        return (args, {**kwargs, "closure": run}) if "closure" in kwargs else ((args[0], run, *args[2:]), kwargs)

    def _begin(self) -> None:
        self._is_stepping = True
        self.resume()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hooks that follow are the user's, and see all parameters as they are now."""
        self.pause()
        self._is_stepping = False
        self._depth -= 1
        self._share_values()

    def _after_hooks(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The step of a base class is over: that of the class goes on, with the states of this replica's share."""
        if self._depth:
            self._begin()

    def end_step(self) -> None:
        """After a step, also one that has failed."""
        self.pause()
        self._depth, self._is_stepping = 0, False

    def pause(self) -> None:
        """User code runs in the middle of a step: the groups have all parameters again."""
        for group, parameters in self._hidden:
            group["params"] = parameters
        self._hidden = []

    def resume(self) -> None:
        """Ends a :meth:`pause`, if a step is on."""
        if self._is_stepping and not self._hidden:
            for group in self._optimizer.param_groups:
                self._hidden.append((group, group["params"]))
                group["params"] = [parameter for parameter in group["params"] if self.owns(parameter)]

    def _share_values(self) -> None:
        """Every replica gets what has become of the parameters that others own."""
        stepped = [
            parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and not parameter.is_meta
        ]
        for owner in range(self._replicas.count):
            share_tensors([p for p in stepped if self._owners.get(p) == owner], self._replicas, source=owner)

    # ------------------------------------------------------------------ states

    def collect(self, states: Mapping[Any, Any]) -> dict[Any, Any]:
        """The states of all replicas, on the first; the others give theirs, and keep them. Called by the ranks with the same
        stages, in all replicas.

        Args:
            states: This replica's, by the parameters' names; tensors of others come on the CPU.
        """
        found = dict(states)
        group = self._replicas.control_group
        first, *others = range(self._replicas.count) if group is None else dist.get_process_group_ranks(group)
        if not self._replicas.is_first:
            send_value(found, first, group)
            return found
        for rank in others:
            found |= receive_value(rank, group)
        return found
