"""Leaves a rank with its own share of the module: what belongs to other stages becomes a placeholder on the meta device.

A placeholder keeps name, shape, dtype and ``requires_grad``, so that the user's ``configure_optimizers``, a model summary and a
state dict still see the whole module.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_fxpipe.cost import canonical_fqns
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.exchange import named_tensors
from lightning_fxpipe.plan import PartitionPlan


def drop_other_stages(root: nn.Module, plan: PartitionPlan, stage_index: int, device: torch.device) -> None:
    """Moves the stage's own tensors to ``device`` and drops those of the other stages, in place.

    Raises:
        UnsupportedError: The module has lost parameters already, to another strategy.
    """
    gone = [fqn for fqn, parameter in root.named_parameters() if parameter.is_meta]
    if gone:
        raise UnsupportedError(
            "The module does not have all of its parameters.",
            observed=f"no data for {gone[0]}" + (f" and {len(gone) - 1} others" if len(gone) > 1 else ""),
            expected="a module that no other strategy has split",
            todo="Use the same Trainer again, or make a new module and load a checkpoint into it.",
        )
    placeholders: dict[int, Tensor] = {}
    names = canonical_fqns(root)
    for module, name, fqn, tensor in list(named_tensors(root)):
        holders = plan.stages_of(names[fqn])
        if not holders or stage_index in holders:
            move_to(module, name, tensor, device)
            continue
        placeholder = placeholders.setdefault(id(tensor), _placeholder(tensor))
        setattr(module, name, placeholder)


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
