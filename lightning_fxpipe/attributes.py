"""What a step leaves on the LightningModule, on every rank.

After the model's call only the last stage runs the step. What it sets there (``self.outputs.append(loss)``, ``self.last_loss =
loss``, a moving average in a buffer that no stage holds) hooks read on every rank, and the next step may read it before the
model's call. So the last stage compares the module's attributes after the step with what they were before, and the other ranks
take over what differs. A list that grows is sent by its new entries only. Lists, dicts and sets are looked into, objects of
other types are not: one that a step changes inside keeps the change on the last stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat import tree_map, version_of
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.sending import sendable

# torch's own dictionaries: parameters belong to stages, buffers are compared by name, modules and hooks are not the step's.
_TORCHS_OWN = frozenset(vars(nn.Module()))
_CHANGEABLE = (list, dict, set, Tensor)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A value that a step changed.

    Attributes:
        path: Name of the attribute, then keys and indices inside it.
        start: For a list that has grown, the index of the first new entry; else None.
        value: The new value, or the new entries; :class:`Gone` where there is none any more.
    """

    path: tuple[Any, ...]
    start: int | None
    value: Any


@dataclass(frozen=True)
class Gone:
    """Stands for an attribute or key that was deleted."""


class StepAttributes:
    """A module's own attributes and some of its buffers, as they are now.

    Args:
        module: The LightningModule.
        buffers: Its buffers that every rank has, by FQN.
    """

    def __init__(self, module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
        self._module = module
        self._buffers = {fqn: (buffer, version_of(buffer)) for fqn, buffer in buffers.items()}
        self._before = _Snapshot(_own(module))

    def changes(self) -> tuple[list[Change], dict[str, Tensor]]:
        """What differs now: attributes, and buffers by FQN. Tensors are on the CPU and outside of any graph.

        Raises:
            UnsupportedError: A new value cannot be sent to the other ranks.
        """
        found = [_sendable(change) for change in self._before.changes(_own(self._module), ())]
        buffers: dict[str, Tensor] = {}
        for fqn, (buffer, version) in self._buffers.items():
            now = self._module.get_buffer(fqn)
            if now is not buffer or version_of(now) != version:
                buffers[fqn] = now.detach().cpu()
        return found, buffers


def take_over(module: nn.Module, changes: Iterable[Change], buffers: Mapping[str, Tensor], device: torch.device) -> None:
    """Makes the same changes to this rank's module."""
    for change in changes:
        value = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, change.value)
        owner: Any = vars(module)
        for key in change.path[:-1] if change.start is None else change.path:
            owner = owner[key]
        if change.start is not None:
            owner[change.start :] = value
        elif isinstance(value, Gone):
            owner.pop(change.path[-1], None)
        else:
            owner[change.path[-1]] = value
    with torch.no_grad():
        for fqn, value in buffers.items():
            path, _, name = fqn.rpartition(".")
            setattr(module.get_submodule(path), name, value.to(device))


class _Snapshot:
    """A value that can change, and what is in it where it is a list, dict or set."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._version = version_of(value) if _has_version(value) else 0
        self._entries = {key: _Snapshot(entry) if isinstance(entry, _CHANGEABLE) else entry for key, entry in _entries(value)}

    def changes(self, now: Any, path: tuple[Any, ...]) -> Iterator[Change]:
        """What is different in ``now``, which is at ``path`` where the value was."""
        if isinstance(now, (list, dict)) and (now is self._value or not path):
            yield from self._changed_entries(now, path)
        elif isinstance(now, set) and now is self._value:
            if now != set(self._entries.values()):
                yield Change(path=path, start=None, value=now)
        elif now is not self._value or (_has_version(now) and version_of(now) != self._version):
            yield Change(path=path, start=None, value=now)

    def _changed_entries(self, now: list[Any] | dict[Any, Any], path: tuple[Any, ...]) -> Iterator[Change]:
        entries = dict(_entries(now))
        for key, before in self._entries.items():
            if key not in entries:
                if isinstance(now, dict):
                    yield Change(path=(*path, key), start=None, value=Gone())
            elif isinstance(before, _Snapshot):
                yield from before.changes(entries[key], (*path, key))
            elif not _same(before, entries[key]):
                yield Change(path=(*path, key), start=None, value=entries[key])
        if isinstance(now, dict):
            for key in [key for key in entries if key not in self._entries]:
                yield Change(path=(*path, key), start=None, value=entries[key])
        elif len(now) != len(self._entries):
            start = min(len(now), len(self._entries))
            yield Change(path=path, start=start, value=now[start:])


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _TORCHS_OWN}


def _same(one: Any, other: Any) -> bool:
    """Whether a value that cannot change is the same; equal numbers and strings need not be the same object."""
    return one is other or (type(one) is type(other) and isinstance(one, (int, float, str)) and one == other)


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, set):
        return [(entry, entry) for entry in value]
    return enumerate(value) if isinstance(value, list) else ()


def _has_version(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference()


def _sendable(change: Change) -> Change:
    def refusal(observed: str) -> UnsupportedError:
        return UnsupportedError(
            f"The step sets self.{change.path[0]} to something that the other ranks cannot get.",
            observed=observed,
            expected="tensors and plain values: after the model's call only the last stage runs the step",
            todo="Keep a number or a tensor instead, or set the attribute in a hook, which runs on every rank.",
        )

    return Change(path=change.path, start=change.start, value=sendable(change.value, refusal))
