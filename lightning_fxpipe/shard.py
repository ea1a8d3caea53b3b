"""Leaves a rank with its own share of the module: what belongs to other stages becomes a placeholder on the meta device.

A placeholder keeps name, shape, dtype and ``requires_grad``, so that the user's ``configure_optimizers``, a model summary and a
state dict still see the whole module.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_fxpipe.cost import canonical_fqns
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.exchange import named_tensors
from lightning_fxpipe.plan import PartitionPlan


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A parameter of another stage.

    Attributes:
        placeholder: What the module has in its place.
        parameter: The parameter, without its data.
    """

    placeholder: Tensor
    parameter: nn.Parameter


def drop_other_stages(root: nn.Module, plan: PartitionPlan, stage_index: int, device: torch.device) -> list[Dropped]:
    """Moves the stage's own tensors to ``device`` and drops those of the other stages, in place.

    Returns:
        The parameters that were dropped, so that they can get their data back.

    Raises:
        UnsupportedError: The module has lost parameters already, to another strategy.
    """
    gone = [fqn for fqn, parameter in root.named_parameters() if parameter.is_meta]
    if gone:
        raise UnsupportedError(
            "The module does not have all of its parameters.",
            observed=f"no data for {gone[0]}" + (f" and {len(gone) - 1} others" if len(gone) > 1 else ""),
            expected="a module that no other strategy has split",
            todo="Use the same Trainer again, or make a new module and load a checkpoint into it. A module is whole again "
            "after a run that ended well, unless FxPipeStrategy(gather_after_run=False) or a lack of memory forbids it.",
        )
    placeholders: dict[int, Tensor] = {}
    dropped: list[Dropped] = []
    names = canonical_fqns(root)
    for module, name, fqn, tensor in list(named_tensors(root)):
        holders = plan.stages_of(names[fqn])
        if not holders or stage_index in holders:
            move_to(module, name, tensor, device)
            continue
        if id(tensor) not in placeholders:
            placeholders[id(tensor)] = _placeholder(tensor)
            if type(tensor) is nn.Parameter:
                dropped.append(Dropped(placeholder=placeholders[id(tensor)], parameter=tensor))
        setattr(module, name, placeholders[id(tensor)])
    for entry in dropped:
        entry.parameter.data = _without_memory(entry.parameter.data)
    return dropped


def move_to(module: nn.Module, name: str, tensor: Tensor, device: torch.device) -> None:
    """Moves a tensor, a parameter in place so that whoever refers to it sees the move."""
    if tensor.device == device:
        return
    if isinstance(tensor, nn.Parameter):
        tensor.data = tensor.data.to(device)
    else:
        setattr(module, name, tensor.to(device))


def _placeholder(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _without_memory(data: Tensor) -> Tensor:
    """Of the same shape, and nan everywhere, for whoever still refers to the parameter."""
    value = float("nan") if data.is_floating_point() or data.is_complex() else 0
    return torch.full((), value, dtype=data.dtype, device=data.device).expand(data.shape)
