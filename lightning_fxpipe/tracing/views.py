"""Shows each module what its stage would have in an object that others change, while all of them run in one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
from torch import nn

from lightning_fxpipe._compat.torch import SYMBOLIC_TYPES, FakeTensor, tree_leaves
from lightning_fxpipe.tracing.exchanges import Exchange, Trial
from lightning_fxpipe.tracing.reachable import AROUND, NEW
from lightning_fxpipe.user_code.code_contents import Globals
from lightning_fxpipe.user_code.contents import ABSENT, Kind
from lightning_fxpipe.user_code.paths import CONTENTS, at_path, kinds_at

_LARGE = 1_000_003  # odd, and past any threshold
_MANY = 1000


@dataclass(frozen=True)
class _Slot:
    """Contents of one object, or one attribute of a module."""

    owner: Any
    kind: Kind | None
    name: str | None
    keys: tuple[Any, ...]  # of exchanges in it

    def take(self) -> Any:
        return vars(self.owner).get(self.name, ABSENT) if self.kind is None else self.kind.take(self.owner)

    def put(self, contents: Any) -> None:
        if self.kind is not None:
            self.kind.put(self.owner, contents)
        elif contents is ABSENT:
            vars(self.owner).pop(self.name, None)
        else:
            vars(self.owner)[self.name] = contents

    def with_other_values(self, contents: Any, values: Mapping[Any, Any]) -> Any:
        """Returns contents with other values at the keys; ``values`` are those of the exchanges."""
        keys = [key for key in self.keys if key in values]
        if not keys:
            return contents
        if self.name is not None:
            return _other(contents if contents is not ABSENT else values[self.name])
        if isinstance(contents, dict):
            return contents | {key: _other(contents.get(key, values[key])) for key in keys}
        if isinstance(contents, set):
            return contents.union(range(_LARGE, _LARGE + _MANY))
        if isinstance(contents, list):
            is_any = any(isinstance(key, tuple) and key[0] == CONTENTS for key in keys)  # of a deque
            entries = [_other(entry) if is_any or index in keys else entry for index, entry in enumerate(contents)]
            return entries + [_other(contents[-1]) if contents else _LARGE] * (_MANY if any(map(_is_growth, keys)) else 0)
        return contents + 1 if isinstance(contents, np.ndarray) and contents.dtype.kind in "iuf" else contents


def _is_growth(key: Any) -> bool:
    return isinstance(key, tuple) and key[0] in (NEW, CONTENTS)


class Views:
    """Shows each whole module, and the code around them, only what it has left itself in the places of exchanges."""

    def __init__(self, roots: Mapping[str, Any], trial: Trial) -> None:
        self._slots = list(_slots(roots, trial.exchanges))
        self._start = self._contents()
        self._left: dict[str, list[Any]] = {path: self._without_fakes(contents) for path, contents in trial.left.items()}
        for path in trial.finders:
            values = {_key(each): each.difference.value for each in trial.others_for(path)}
            if not values:
                continue
            before = zip(self._slots, self._left.get(path, self._start), strict=True)
            self._left[path] = [slot.with_other_values(contents, values) for slot, contents in before]
        if AROUND in self._left:
            self._put(self._left[AROUND])

    @contextmanager
    def running(self, path: str) -> Iterator[None]:
        """The block runs a module."""
        around = self._contents()
        self._put(self._left.get(path, self._start))
        try:
            yield
        finally:
            self._left[path] = self._contents()
            self._put(around)

    def left_by(self, paths: Iterable[str]) -> dict[str, list[Any]]:
        """Returns what modules, and the code around them, have left in the places by the end."""
        left = {**self._left, AROUND: self._contents()}
        return {path: left[path] for path in paths if path in left}

    def _without_fakes(self, contents: list[Any]) -> list[Any]:
        """Fakes are of one recording."""
        has_fakes = (any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(own)) for own in contents)
        return [start if fakes else own for own, start, fakes in zip(contents, self._start, has_fakes, strict=True)]

    def _contents(self) -> list[Any]:
        return [slot.take() for slot in self._slots]

    def _put(self, contents: list[Any]) -> None:
        for slot, own in zip(self._slots, contents, strict=True):
            slot.put(own)


def _slots(roots: Mapping[str, Any], exchanges: Iterable[Exchange]) -> Iterator[_Slot]:
    """The objects in which exchanges are, and those that lie there: code may change what is in them, or exchange them."""
    keys: dict[Any, dict[Any, None]] = {}
    owners: dict[Any, Any] = {}
    for each in exchanges:
        for path in (each.place[:-1], each.place):
            with suppress(KeyError, IndexError, AttributeError):
                found = at_path(roots, path)
                if isinstance(found, Globals):
                    found = replace(found, names=frozenset([str(each.place[-1][1])]))
                identity = (found.module, found.names) if isinstance(found, Globals) else id(found)
                owners.setdefault(identity, found)
                if path is not each.place:
                    keys.setdefault(identity, {})[_key(each)] = None
    for identity, owner in owners.items():
        own = tuple(keys.get(identity, ()))
        if isinstance(owner, nn.Module):
            yield from (_Slot(owner, None, key, (key,)) for key in own if isinstance(key, str))
        else:
            yield from (_Slot(owner, kind, None, own) for kind in kinds_at(owner))


def _key(exchange: Exchange) -> Any:
    kind, key = exchange.place[-1]
    return (kind, key) if kind in (NEW, CONTENTS) else key


def _other(value: Any) -> Any:
    """Returns another value of a kind: what depends on it does something else then."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, SYMBOLIC_TYPES) or value is None:
        return _LARGE
    if isinstance(value, Enum):
        return next((member for member in type(value) if member is not value), value)
    if type(value) in (tuple, list):
        return type(value)(map(_other, value))
    if isinstance(value, str):
        return f"{value} {_LARGE}"
    if isinstance(value, (int, float, np.number)):
        return value + type(value)(_LARGE)
    return value
