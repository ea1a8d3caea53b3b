"""Tensors that are neither parameters nor buffers and that modules change in place: a memory bank, a running scale.

    self.bank = bank                             # one tensor, in several modules
    self.bank[self.num_calls] = x.mean(0)

Each rank has a copy of such a tensor, as it has of a buffer. So a whole module owns those that its code reaches, and changes
those that it writes to, and what is known of buffers holds for them: no cut falls between a call that changes one and another
call of a module that reaches it. The same holds for parameters and buffers of another module that it writes to, by a reference
of its own (``self.teacher[0].weight.data.mul_(0.99)``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe._compat.torch import modules_inside, storage_key, version_of
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.tracing.parameter_use import changes_requires_grad, may_write, written_by
from lightning_fxpipe.tracing.reachable import has_own_code
from lightning_fxpipe.user_code.frames import user_source
from lightning_fxpipe.user_code.snapshot import Snapshot


class TensorsInPlace:
    """Finds such tensors, and the calls that change them, in one recording.

    Args:
        before: User state, when the recording begins.
        modules: All modules, by path.
        note_write: Called where a whole module writes to a tensor of another one: its call is like no other.

    Attributes:
        refusal: The error if a whole module has frozen or unfrozen a parameter of another one.
    """

    def __init__(self, before: Snapshot, modules: Mapping[str, nn.Module], note_write: Callable[[], None]) -> None:
        self._are_any = any(True for _ in before.tensors_reached_from("self"))
        self._by_module: dict[int, list[Tensor]] = {}
        self._modules, self._note_write = modules, note_write
        self.refusal: UnsupportedError | None = None
        self._running: tuple[nn.Module, set[int]] | None = None  # a whole module, and the memory that it has changed

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
    def watching(self, module: nn.Module, tensors: Collection[Tensor]) -> Iterator[set[int]]:
        """Yields a set that holds, after the block, the memory that a whole module's call in it has changed.

        Args:
            module: The module.
            tensors: Those to watch besides the parameters and buffers of other modules.
        """
        with unwatched_torch():
            before = [(tensor, version_of(tensor)) for tensor in tensors]
        changed: set[int] = set()
        self._running = module, changed
        try:
            yield changed
        finally:
            self._running = None
        with unwatched_torch():
            changed |= {storage_key(tensor) for tensor, version in before if version_of(tensor) != version}

    def note_call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes a torch call inside a whole module."""
        if self._running is None:
            return
        module, changed = self._running
        if changes_requires_grad(func, args, kwargs) and all(args[0] is not parameter for parameter in module.parameters()):
            self.refusal = self.refusal or _freezes(module, args[0])
        if may_write(func, kwargs) and (written := written_by(func, args, kwargs)):
            with unwatched_torch():
                elsewhere = written & (_memory_of(self._modules.values()) - _memory_of(module.modules()))
            if elsewhere:
                changed |= elsewhere
                self._note_write()


def _freezes(module: nn.Module, parameter: Tensor) -> UnsupportedError:
    return UnsupportedError(
        "A module's forward freezes or unfreezes a parameter of another module.",
        where=user_source(),
        observed=f"requires_grad of a parameter of shape {tuple(parameter.shape)}, set by {type(module).__name__}",
        expected="a forward that changes its own parameters only: the other module may be in another stage",
        todo="Set requires_grad in a hook, such as on_train_batch_start.",
    )


def _memory_of(modules: Iterable[nn.Module]) -> set[int]:
    tensors = (tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values()))
    return {storage_key(tensor) for tensor in tensors if tensor is not None and tensor.layout is torch.strided}
