"""Hooks that code registers on modules while it is recorded, and removes again.

    handle = self.encoder.register_forward_hook(keep)    # in a forward that is recorded
    y = self.net(x)                                      # one call of the graph, in whose stage no code registers anything
    handle.remove()

A module that runs as a whole registers them in its stage, too. Of opened code, only the calls are left. So the code has to stay
whole, or is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lightning_fxpipe._compat.torch import has_hooks, hooks_of
from lightning_fxpipe.tracing.signals import RecordError


class PassingHooks:
    """Watches the hooks of the modules that are called.

    Args:
        modules: All modules, when the recording begins.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before = {id(module): _hooks(module) for module in modules if has_hooks(module)}
        self._added: list[tuple[str, nn.Module, set[int]]] = []

    def note_call(self, path: str, inside: Iterable[nn.Module]) -> None:
        """A module is called by opened code, with the modules inside it."""
        for module in inside:
            if has_hooks(module) and (added := _hooks(module) - self._before.get(id(module), set())):
                self._added.append((path, module, added))

    def check(self) -> None:
        """Called when opened code has run; raises :class:`RecordError` if hooks of its calls are there no more."""
        for path, module, added in self._added:
            if not added <= _hooks(module):
                raise RecordError(f"it registers a hook on {path} and removes it again")


def _hooks(module: nn.Module) -> set[int]:
    return {*map(id, hooks_of(module))}
