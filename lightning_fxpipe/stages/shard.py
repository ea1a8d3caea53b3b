"""Leaves a rank with its own share of the module: what belongs to other stages becomes a placeholder on the meta device.

A placeholder keeps name, shape, dtype and ``requires_grad``, so that the user's ``configure_optimizers``, a model summary and a
state dict still see the whole module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat.torch import return_memory
from lightning_fxpipe.deferred_init.materialise import Materials, check_is_whole, placeholder_for, put_in_place
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.planner.cost import canonical_fqns
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.user_code.exchange import named_tensors
from lightning_fxpipe.user_code.placement import move


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A parameter of another stage.

    Attributes:
        placeholder: What the module has in its place.
        parameter: The parameter, without its data.
    """

    placeholder: Tensor
    parameter: nn.Parameter


def drop_other_stages(
    root: nn.Module, plan: PartitionPlan, stages: Sequence[int], device: torch.device, materials: Materials | None = None
) -> list[Dropped]:
    """Drops the tensors of the other stages, in place, and moves the rest of the module to ``device`` as Lightning does.

    Args:
        root, plan: The module, and which stage holds what.
        stages, device: This rank's.
        materials: Values for the tensors that have no data.

    Returns:
        The parameters that were dropped, so that they can get their data back.

    Raises:
        UnsupportedError: The module has lost parameters, and there are no materials.
    """
    placeholders: dict[int, Tensor] = {}
    dropped: list[Dropped] = []
    names = canonical_fqns(root)

    def is_own(fqn: str) -> bool:
        holders = plan.stages_of(names[fqn])
        return not holders or any(stage in stages for stage in holders)

    if materials is None:
        check_is_whole(root.named_parameters())
    else:
        _materialise(root, is_own, materials)
    for module, name, fqn, tensor in list(named_tensors(root)):
        if is_own(fqn):
            continue
        if id(tensor) not in placeholders:
            placeholders[id(tensor)] = placeholder_for(tensor)
            if type(tensor) is nn.Parameter:
                dropped.append(Dropped(placeholder=placeholders[id(tensor)], parameter=tensor))
        setattr(module, name, placeholders[id(tensor)])
    for entry in dropped:
        entry.parameter.data = _without_memory(entry.parameter.data)
    move(root, device)
    return_memory()
    return dropped


def check_is_as_split(added: Sequence[str], removed: Sequence[str]) -> None:
    """Refuses a module whose parameters are not those that were split.

    Args:
        added: FQNs of parameters that have been made since.
        removed: FQNs of those that are no longer there.

    Raises:
        UnsupportedError: There are some.
    """
    if added:
        raise UnsupportedError(
            "Parameters were added to the module after it was split into stages.",
            where="configure_optimizers, or a hook of the run",
            observed=_first_of(added),
            expected="layers created in the constructor, setup or configure_model",
            todo="Create these layers in configure_model, where the Trainer, its datamodule and the data are also available.",
        )
    if removed:
        raise UnsupportedError(
            "Parameters were removed from the module after it was split into stages.",
            where="a hook of the run",
            observed=_first_of(removed),
            expected="the same layers during the whole run",
            todo="Skip the layer by a flag that its forward reads, or start another run with the changed module.",
        )


def _first_of(fqns: Sequence[str]) -> str:
    return fqns[0] + (f" and {len(fqns) - 1} others" if len(fqns) > 1 else "")


def _materialise(root: nn.Module, is_own: Callable[[str], bool], materials: Materials) -> None:
    """Gives the rank's own tensors that have no data theirs."""
    blank = [(module, name, fqn, tensor) for module, name, fqn, tensor in named_tensors(root) if tensor.is_meta and is_own(fqn)]
    first = {id(tensor): fqn for *_, fqn, tensor in reversed(blank)}
    values = dict(zip(first, materials.values(list(first.values())), strict=True))
    made: dict[int, Tensor] = {}
    for module, name, fqn, tensor in blank:
        key = id(tensor)
        if key not in made:
            value = values.pop(key)
            made[key] = put_in_place(tensor, value) if isinstance(tensor, nn.Parameter) else value
            materials.note_placed(fqn, made[key])
        if made[key] is not tensor:
            setattr(module, name, made[key])


def _without_memory(data: Tensor) -> Tensor:
    """Returns a tensor of the same shape, and nan everywhere, for other references to the parameter."""
    byte = 255 if data.is_floating_point() or data.is_complex() else 0
    element = torch.full((data.element_size(),), byte, dtype=torch.uint8, device=data.device).view(data.dtype)
    return element.reshape(()).expand(data.shape)
