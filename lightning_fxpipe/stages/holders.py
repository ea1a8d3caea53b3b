"""Which stage has which tensor of the module."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_fxpipe.planner.cost import canonical_fqns
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.user_code.exchange import named_tensors


def first_held(root: nn.Module, plan: PartitionPlan) -> dict[int, dict[str, Tensor]]:
    """By stage, what it is the first to hold, by the first FQN; the same in the same order on every rank. What no stage holds
    every rank has.
    """
    names = canonical_fqns(root)
    found: dict[int, dict[str, Tensor]] = {}
    for _, _, fqn, tensor in named_tensors(root):
        stages = plan.stages_of(names[fqn])
        if stages:
            found.setdefault(stages[0], {})[names[fqn]] = tensor
    return {stage: found[stage] for stage in sorted(found)}
