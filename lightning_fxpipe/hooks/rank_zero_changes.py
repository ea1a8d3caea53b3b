"""Changes on every rank what rank 0 changes in a hook: ``if trainer.is_global_zero: p.data.mul_(0.5)``.

While a hook looks at the whole model, each rank has its own tensors and copies of the others'. When the hook ends, fingerprints
of both are compared, entry by entry. They differ

1. where rank 0 alone has changed its copy, or more than the rank that holds the tensor: that rank receives rank 0's value,
2. where rank 0 has changed nothing: the change was made on another rank alone, which one device would not make. It is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_fxpipe._compat.modes import without_modes
from lightning_fxpipe.distributed.agreement import fingerprint, gather_values
from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.distributed.values import broadcast_value
from lightning_fxpipe.errors import UnsupportedError

Entries = Mapping[Hashable, Any]


def rank_zero_changes(mine: Entries, before: Mapping[Hashable, str], topology: Topology, hook: str) -> dict[Hashable, Any]:
    """Returns rank 0's entries where this rank has others. Called by every rank of a pipeline.

    Args:
        mine: The rank's entries: what it holds, on rank 0 with copies of what it does not. Their names are strings and numbers.
        before: Fingerprints of entries when the copies were made.
        topology: The rank's place.
        hook: Name of the hook, for messages.

    Raises:
        UnsupportedError: Rank 0 has an entry as it was, and this rank another.
    """
    with without_modes():
        own = {name: fingerprint(value) for name, value in mine.items()}
        told = gather_values(topology.control_group, own)
        zeros = told[0]
        others = [{name for name in each if name in zeros and each[name] != zeros[name]} for each in told]
        differing = sorted(set[Any]().union(*others), key=str)
        lost = [name for name in differing if name in own and own[name] != zeros[name] == before.get(name)]
        if lost:
            raise _not_on_rank_zero(lost[0], hook, topology)
        if not differing:
            return {}
        values = [mine[name] for name in differing] if topology.is_last else None
        received = broadcast_value(values, topology.last_rank, topology.control_group)
        return {name: v for name, v in zip(differing, received, strict=True) if name in own and own[name] != zeros[name]}


def followed(present: Any, value: Any, device: torch.device) -> Any:
    """Returns a received value in place of the present one, in its memory where it has the same form."""
    if isinstance(value, Mapping):
        known = present if isinstance(present, Mapping) else {}
        return {key: followed(known.get(key), entry, device) for key, entry in value.items()}
    if not isinstance(value, Tensor):
        return value
    is_alike = isinstance(present, Tensor) and present.layout is value.layout is torch.strided
    if is_alike and (present.shape, present.dtype) == (value.shape, value.dtype):
        with torch.no_grad():
            return present.copy_(value)
    return value.to(present.device if isinstance(present, Tensor) else device)


def _not_on_rank_zero(name: Any, hook: str, topology: Topology) -> UnsupportedError:
    return UnsupportedError(
        f"A hook changes the {' '.join(map(str, name))} on one rank of the pipeline, but not on rank 0.",
        where=hook,
        observed=f"another value on rank {topology.global_rank(topology.rank)}",
        expected="changes made on rank 0, which holds copies of all tensors and propagates its changes to all ranks",
        todo="Make the change on every rank, or under `if trainer.is_global_zero`.",
    )
