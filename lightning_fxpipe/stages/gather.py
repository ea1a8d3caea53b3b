"""Makes a module whole again after its runs: every rank gets the tensors of the other stages from the ranks that hold them.

On one device a module can be called, saved and moved once ``trainer.fit`` has returned, so it can here. The parameters are the
objects that they were before the module was split. Where copies of the whole model would not fit into the machine's memory,
the module stays split.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_fxpipe.deferred_init.materialise import put_in_place
from lightning_fxpipe.distributed.agreement import any_rank
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.distributed.values import broadcast_value
from lightning_fxpipe.planner.cost import canonical_fqns
from lightning_fxpipe.planner.plan import PartitionPlan
from lightning_fxpipe.stages.holders import first_held
from lightning_fxpipe.stages.memory import has_room
from lightning_fxpipe.stages.shard import Dropped
from lightning_fxpipe.user_code.exchange import named_tensors


def gather(root: nn.Module, plan: PartitionPlan, topology: Topology, dropped: Sequence[Dropped]) -> None:
    """Fills the placeholders. Called by every rank of the pipeline; errors of one leave the others waiting for its connection.

    Args:
        root, plan, topology: The module, which stage holds what, and this rank's place.
        dropped: What this rank has dropped, to get back into the same objects.
    """
    received: dict[str, Tensor] = {}
    for stage, mine in first_held(root, plan).items():
        sent = broadcast_value(mine, topology.rank_of(stage), topology.control_group)
        if stage not in topology.stages:
            received.update(sent)
    parameters = {id(entry.placeholder): entry.parameter for entry in dropped}
    names = canonical_fqns(root)
    made: dict[int, Tensor] = {}
    for module, name, fqn, tensor in list(named_tensors(root)):
        if not tensor.is_meta or names[fqn] not in received:
            continue
        if id(tensor) not in made:
            made[id(tensor)] = _fill(tensor, parameters.get(id(tensor)), received[names[fqn]])
        setattr(module, name, made[id(tensor)])


def _fill(placeholder: Tensor, parameter: nn.Parameter | None, value: Tensor) -> Tensor:
    """A tensor with the values; the parameter that the placeholder stands for, if there is one."""
    if not isinstance(placeholder, nn.Parameter):
        return value
    if parameter is None:
        return nn.Parameter(value, requires_grad=placeholder.requires_grad)
    if parameter.is_meta:  # it had no data before the run either
        return put_in_place(parameter, value).requires_grad_(placeholder.requires_grad)
    parameter.data = value
    return parameter.requires_grad_(placeholder.requires_grad)  # callbacks freeze and unfreeze what they find


def has_room_for_copies(num_bytes: int, num_copies: int, topology: Topology) -> bool:
    """Returns True if every machine has the memory for copies of the whole model. Called by every rank, with one answer for
    all.
    """
    return not any_rank(not has_room(num_bytes * num_copies), topology)
