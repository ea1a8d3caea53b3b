"""Exchanges all tensors of a module for others while it runs, and leaves it afterwards exactly as it was.

A model that counts its calls, caches a mask or fills a list while it runs on stand-ins must not keep any of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe._compat.torch import modules_inside, version_of
from lightning_fxpipe.user_code.contents import MODULE, changed_in_module
from lightning_fxpipe.user_code.snapshot import Snapshot, user_state


@contextmanager
def exchanged_tensors(root: nn.Module, replacement: Callable[[Tensor, str], Tensor]) -> Iterator[Snapshot]:
    """During the block every parameter, buffer and tensor that is a plain attribute is another tensor.

    Args:
        root: The module.
        replacement: Makes the other tensor, once for each tensor, from it and the first of its FQNs.

    Yields:
        What the module's code can change, as it was before.
    """
    made: dict[int, Tensor] = {}
    before = user_state(root)
    own = list(named_tensors(root))

    def exchange(tensor: Tensor, fqn: str) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = replacement(tensor, fqn)
        return made[id(tensor)]

    try:
        for module, name, fqn, tensor in own:
            # Through setattr, not the dict: recurrent modules keep a second list of their weights.
            setattr(module, name, exchange(tensor, fqn))
        for path, module in root.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    vars(module)[name] = exchange(value, f"{path}.{name}" if path else name)
        yield before
    finally:
        # Attributes first: a recurrent module that made itself a new list of weights gets its own back, then the weights.
        before.restore()
        for module, name, _, tensor in own:
            setattr(module, name, tensor)


def named_tensors(root: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """Every parameter and buffer as (module, name in it, FQN, tensor), under each of its names."""
    for path, module in root.named_modules(remove_duplicate=False):
        for name, tensor in (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ):
            yield module, name, f"{path}.{name}" if path else name, tensor


class OwnAttributes:
    """A module's attributes at one moment."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = MODULE.take(module)
        tensors = [(key, value) for key, value in vars(module).items() if isinstance(value, Tensor)]
        with unwatched_torch() if tensors else nullcontext():
            self._versions = [(key, value, version_of(value)) for key, value in tensors if not value.is_inference()]

    def assigned_tensors(self) -> dict[str, Tensor]:
        """Tensors that the module has got as plain attributes since, by name, in the order of the names.

        The order in which a module holds its attributes is that in which they were first set, which is another one on a rank
        where a stage reads what another stage sets.
        """
        names = sorted(key for key in self._changed() if isinstance(key, str))
        return {name: value for name in names if isinstance(value := vars(self._module).get(name), Tensor)}

    def changed_values(self) -> list[str]:
        """Names of plain attributes that are something else since, and no new tensors: a tensor can have been written to."""
        now = vars(self._module)
        changed = [key for key in self._changed() if isinstance(key, str) and not isinstance(now.get(key), Tensor)]
        with unwatched_torch() if self._versions else nullcontext():
            written = [key for key, old, version in self._versions if now.get(key) is old and version_of(old) != version]
        return changed + written

    def _changed(self) -> list[Any]:
        return changed_in_module(self._before, MODULE.take(self._module))


def with_assigned_tensors(
    values: set[tuple[str, str]], call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> tuple[Any, dict[tuple[str, str], Tensor]]:
    """Returns the result of a call, and the tensors that it sets on the module and those inside it, by relative path and
    attribute; other values that it sets there are added to ``values``.
    """
    before = {path: OwnAttributes(child) for path, child in modules_inside(module).items()}
    result = call(module, *args, **kwargs)
    values.update((path, name) for path, own in before.items() for name in own.changed_values())
    return result, {(path, name): t for path, own in before.items() for name, t in own.assigned_tensors().items()}
