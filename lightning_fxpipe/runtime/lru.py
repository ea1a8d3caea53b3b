"""A dictionary that keeps what was used last, so that what is made for each shape of a batch takes bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class LruCache(Generic[Key, Value]):
    """Keeps the most recently used values. Every rank uses it in the same order, so all drop the same ones."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of a key, made where there is none."""
        if key not in self._values:
            self._values[key] = make()
            if len(self._values) > self._capacity:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return self._values[key]

    def put(self, key: Key, value: Value) -> None:
        """Exchanges the value of a key."""
        self._values.pop(key, None)
        self.get(key, lambda: value)
