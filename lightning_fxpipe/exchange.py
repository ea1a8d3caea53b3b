"""Exchanges all tensors of a module for others while it runs, and leaves it afterwards exactly as it was.

A model that counts its calls, caches a mask or fills a list while it runs on stand-ins must not keep any of that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_ABSENT = object()
_CONTAINERS = (list, dict, set)


@contextmanager
def exchanged_tensors(root: nn.Module, replacement: Callable[[Tensor, str], Tensor]) -> Iterator[None]:
    """During the block every parameter, buffer and tensor that is a plain attribute is another tensor.

    Args:
        root: The module.
        replacement: Makes the other tensor, once for each tensor, from it and the first of its FQNs.
    """
    made: dict[int, Tensor] = {}
    attributes = [Attributes(module) for module in root.modules()]
    weights: list[Callable[[], None]] = []

    def exchange(tensor: Tensor, fqn: str) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = replacement(tensor, fqn)
        return made[id(tensor)]

    try:
        for module, name, fqn, tensor in list(named_tensors(root)):
            # Through setattr, not the dict: recurrent modules keep a second list of their weights.
            setattr(module, name, exchange(tensor, fqn))
            weights.append(partial(setattr, module, name, tensor))
        for path, module in root.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    vars(module)[name] = exchange(value, f"{path}.{name}" if path else name)
        yield
    finally:
        # Attributes first: a recurrent module that made itself a new list of weights gets its own back, then the weights.
        for before in attributes:
            before.restore()
        for restore in weights:
            restore()


@contextmanager
def kept_generators(root: nn.Module) -> Iterator[None]:
    """Restores, after the block, the random generators that the module and its submodules have as attributes."""
    restore = remembered_generators(root)
    try:
        yield
    finally:
        restore()


def remembered_generators(root: nn.Module) -> Callable[[], None]:
    """Sets the random generators that the module and its submodules have as attributes to what they are now."""
    found = {id(value): value for module in root.modules() for value in vars(module).values() if _is_generator(value)}
    states = [(generator, _state_of(generator)) for generator in found.values()]

    def restore() -> None:
        for generator, state in states:
            if isinstance(generator, torch.Generator):
                generator.set_state(state)
            elif isinstance(generator, random.Random):
                generator.setstate(state)
            else:
                generator.bit_generator.state = state

    return restore


def _is_generator(value: Any) -> bool:
    return isinstance(value, (torch.Generator, random.Random)) or hasattr(value, "bit_generator")  # numpy's


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def named_tensors(root: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    """Every parameter and buffer as (module, name in it, FQN, tensor), under each of its names."""
    for path, module in root.named_modules(remove_duplicate=False):
        for name, tensor in (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ):
            yield module, name, f"{path}.{name}" if path else name, tensor


class Attributes:
    """A module's attributes, and what is in its containers, at one moment.

    Attributes:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._values = dict(vars(module))
        self._contents = {name: _contents(value) for name, value in self._values.items() if isinstance(value, _CONTAINERS)}

    def restore(self) -> None:
        """Makes the module what it was."""
        vars(self.module).clear()
        vars(self.module).update(self._values)
        for name, contents in self._contents.items():
            container = self._values[name]
            if not _same(_contents(container), contents):
                container.clear()
                if isinstance(container, list):
                    container.extend(contents)
                else:
                    container.update(contents)

    def changed(self) -> list[str]:
        """Names of the attributes that are other objects now, or contain others."""
        now = vars(self.module)
        names = _differing(self._values, now)
        for name, before in self._contents.items():
            after = _contents(now.get(name))
            if not _same(after, before):
                # torch's own containers (_buffers, ...) hold attributes under their names
                names += _differing(before, after) if name.startswith("_") and isinstance(before, dict) else [name]
        return names


def assigned_tensors(before: Mapping[str, Attributes]) -> dict[tuple[str, str], Tensor]:
    """Tensors that modules have got as plain attributes since: by the module's path and the attribute's name."""
    found = {}
    for path, attributes in before.items():
        for name in attributes.changed():
            value = vars(attributes.module).get(name)
            if isinstance(value, Tensor):
                found[path, name] = value
    return found


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names whose values are not the same object."""
    return [name for name in {*one, *other} if one.get(name, _ABSENT) is not other.get(name, _ABSENT)]


def _contents(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container or ())


def _same(one: Any, other: Any) -> bool:
    """Whether two lists or dicts hold the same objects; equality would compare tensors."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(value is other[key] for key, value in one.items())
    return all(a is b for a, b in zip(one, other, strict=True))
