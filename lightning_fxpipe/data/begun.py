"""Iterators given as dataloaders, which nobody can begin anew: their first batch is looked at, and then given to the run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any


class BegunIterators:
    """Takes the first batch out of iterators, and gives them back as if nothing had been taken."""

    def __init__(self) -> None:
        self._begun: list[tuple[Any, Any]] = []

    def first(self, iterator: Any) -> Any:
        """A copy of an iterator's first batch, at every call. Raises StopIteration where it has none."""
        for known, item in self._begun:
            if known is iterator:
                return copy.deepcopy(item)
        self._begun.append((iterator, next(iterator)))
        return self.first(iterator)

    def whole(self, loader: Any) -> Any:
        """The loader with what has been taken out of it, once."""
        for index, (known, item) in enumerate(self._begun):
            if known is loader:
                del self._begun[index]
                return _Whole(item, loader)
        return loader


class _Whole:
    def __init__(self, first: Any, rest: Any) -> None:
        self._items = [first]
        self._rest = rest

    def __iter__(self) -> Iterator[Any]:
        while self._items:
            yield self._items.pop()
        yield from self._rest
