"""Tensors that are neither parameters nor buffers and that modules change in place: a memory bank, a running scale.

    self.bank = bank                             # one tensor, in several modules
    self.bank[self.num_calls] = x.mean(0)

Each rank has a copy of such a tensor, as it has of a buffer. So a whole module owns those that its code reaches, and changes
those that it writes to, and what is known of buffers holds for them: no cut falls between a call that changes one and another
call of a module that reaches it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe._compat.torch import modules_inside, storage_key, version_of
from lightning_fxpipe.tracing.reachable import has_own_code
from lightning_fxpipe.user_code.snapshot import Snapshot


class TensorsInPlace:
    """Finds such tensors, and the calls that change them, in one recording.

    Args:
        before: User state, when the recording begins.
    """

    def __init__(self, before: Snapshot) -> None:
        self._are_any = any(True for _ in before.tensors_reached_from("self"))
        self._by_module: dict[int, list[Tensor]] = {}

    def reached_by(self, module: nn.Module) -> list[Tensor]:
        """Returns the tensors that a module's code reaches, as of its first call."""
        if not self._are_any or not has_own_code(module):
            return []
        if id(module) not in self._by_module:
            with unwatched_torch():
                found = Snapshot(modules_inside(module), enters_modules=False).tensors()
                self._by_module[id(module)] = [tensor for tensor in found if tensor.layout is torch.strided]
        return self._by_module[id(module)]

    @contextmanager
    def watching(self, tensors: Collection[Tensor]) -> Iterator[Set[int]]:
        """Yields a set that holds, after the block, the memory of those that it has changed."""
        with unwatched_torch():
            before = [(tensor, version_of(tensor)) for tensor in tensors]
        changed: set[int] = set()
        yield changed
        with unwatched_torch():
            changed |= {storage_key(tensor) for tensor, version in before if version_of(tensor) != version}
