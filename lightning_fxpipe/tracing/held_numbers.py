"""Plain numbers that recorded code reads, and that change: from their second value on they are inputs of the graph.

    self.temperature = max(0.5, 1 - self.global_step / 1000)    # by a hook, or by the step before it calls the model
    return self.net(x) / self.temperature                        # recorded

A graph has the numbers that its code has read as constants, and is guarded by their values (``tracing.guards``). One that has
another value later stands in the next recording as a symbol: arithmetic on it is kept as an expression, and a comparison
becomes a condition on its value, as with sizes. Stages read it anew in each batch, when the step has come to the model's call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import fx, nn
from torch.fx.node import map_aggregate

from lightning_fxpipe.pytree.sizes import SymbolicSize, as_size_of
from lightning_fxpipe.tracing.code_guards import CodeKey
from lightning_fxpipe.tracing.guards import ATTRIBUTE, ITEM, GuardKey, Steps, Varying, name_of_guard, snapshot, value_of

_MAX_NUMBERS = 16


@dataclass(frozen=True)
class NumberPlace:
    """A number in what a guard names.

    Attributes:
        guard: The guard.
        steps: Steps from there to the number; none where it is the number itself.
    """

    guard: GuardKey
    steps: Steps = ()

    def __str__(self) -> str:
        words = (f".{key}" if kind == ATTRIBUTE else f"[{key!r}]" for kind, key in self.steps)
        return name_of_guard(self.guard) + "".join(words)

    def look(self, root: nn.Module) -> Any:
        """Returns what is there now; None where there is nothing."""
        found = value_of(root, self.guard)
        try:
            for kind, key in self.steps:
                found = vars(found)[key] if kind == ATTRIBUTE else found[key]
        except (KeyError, IndexError, TypeError):
            return None
        return found

    def owner(self, root: nn.Module) -> Any:
        """Returns the object, list or dict whose own entry or attribute the number is; None where it is computed, or fixed."""
        if self.steps:
            owner = NumberPlace(self.guard, self.steps[:-1]).look(root)
            is_own = NumberPlace(self.guard).owner(root) is not None
            return owner if is_own and (self.steps[-1][0] == ATTRIBUTE or isinstance(owner, (list, dict))) else None
        if isinstance(self.guard, CodeKey):
            return self.guard.owner()
        path, name = self.guard if isinstance(self.guard, tuple) else (None, "")
        if path is None:
            return None
        module = root.get_submodule(path)
        owner = next((each for each in (module, *type(module).__mro__) if name in vars(each)), None)
        return None if owner is None or hasattr(type(vars(owner)[name]), "__get__") else owner

    @property
    def is_computed(self) -> bool:
        """True if reads of a module's or the Trainer's attribute can return a symbol though nothing stores the number."""
        return not self.steps and isinstance(self.guard, tuple)

    def set(self, root: nn.Module, value: Any) -> None:
        """Puts another value there."""
        kind, key = self.steps[-1] if self.steps else (ATTRIBUTE, self._name)
        owner = self.owner(root)
        if kind == ITEM:
            owner[key] = value
        elif isinstance(owner, type):
            setattr(owner, key, value)
        else:
            vars(owner)[key] = value

    @property
    def _name(self) -> str:
        return self.guard.names[-1] if isinstance(self.guard, CodeKey) else str(self.guard[1])  # type: ignore[index]


def is_number(value: Any) -> bool:
    """True for what may become a symbol: an integer or a finite float, of Python or of numpy."""
    return (isinstance(value, (int, np.integer)) and not isinstance(value, bool)) or (
        isinstance(value, (float, np.floating)) and math.isfinite(value)
    )


@dataclass(frozen=True, eq=False)
class HeldNumbers:
    """The numbers of one graph that are its inputs.

    Attributes:
        root: The module.
        places: Where they are, by their symbols.
        recorded: Their values when the graph was recorded.
        now: Their values in the running batch.
        computed: Symbols that reads of computed numbers return while the graph is recorded: a property's, ``global_step``.
    """

    root: nn.Module
    places: dict[Any, NumberPlace] = field(default_factory=dict)
    recorded: dict[Any, int | float] = field(default_factory=dict)
    now: dict[Any, int | float] = field(default_factory=dict)
    computed: dict[GuardKey, Any] = field(default_factory=dict)

    def look(self) -> dict[Any, int | float] | None:
        """Returns the values of this moment; None where one is no number of the same type any more."""
        found = {symbol: place.look(self.root) for symbol, place in self.places.items()}
        if all(is_number(value) and type(_plain(value)) is type(self.recorded[symbol]) for symbol, value in found.items()):
            return {symbol: _plain(value) for symbol, value in found.items()}
        return None

    @cached_property
    def varying(self) -> Varying:
        """Steps to the numbers, by guard, which guards do not compare."""
        found: dict[GuardKey, set[Steps]] = {}
        for place in self.places.values():
            found.setdefault(place.guard, set()).add(place.steps)
        return found

    def calls_of(self, graph: fx.Graph) -> list[tuple[str, str, str]]:
        """Returns the calls of a graph, with the recorded values of the numbers."""

        def plain(value: Any) -> Any:
            if isinstance(value, SymbolicSize):
                value = as_size_of(value.expression, self.recorded)
            if isinstance(value, float):
                return f"{value:.12g}"  # sums of several numbers may be rounded in another order
            return str(value) if isinstance(value, fx.Node) else value

        # Some functions are made anew in each recording.
        names = [getattr(node.target, "__qualname__", str(node.target)) for node in graph.nodes]
        arguments = [str(map_aggregate((node.args, node.kwargs), plain)) for node in graph.nodes]
        return [(node.op, name, given) for node, name, given in zip(graph.nodes, names, arguments, strict=True)]

    def reader(self, symbol: Any) -> Callable[[], int | float]:
        """Returns the function by which a stage reads a number."""

        def number() -> int | float:
            return self.now[symbol]

        return number


@contextmanager
def as_symbols(
    root: nn.Module, places: Collection[NumberPlace], symbol_of: Callable[[int | float], tuple[Any, Any]]
) -> Iterator[tuple[Callable[[], Mapping[Any, int | float]], HeldNumbers]]:
    """Yields a function that puts symbols in the place of numbers, until the block ends, and what it has put there.

    Args:
        root: The module.
        places: Where the numbers are.
        symbol_of: Makes of a number its symbol, and what code gets for it.
    """
    found = HeldNumbers(root)
    originals: dict[Any, Any] = {}

    def exchange() -> Mapping[Any, int | float]:
        for place in places:
            value = place.look(root)
            has_owner = place.owner(root) is not None
            if is_number(value) and (has_owner or place.is_computed):
                symbol, number = symbol_of(_plain(value))
                if has_owner:
                    place.set(root, number)
                else:
                    found.computed[place.guard] = number
                found.places[symbol], found.recorded[symbol] = place, _plain(value)
                originals[symbol] = value
        found.now.update(found.recorded)
        return found.recorded

    try:
        yield exchange, found
    finally:
        for symbol, place in found.places.items():
            if place.owner(root) is not None:  # the code may have taken it away
                place.set(root, originals[symbol])


def _plain(value: Any) -> int | float:
    number: int | float = value.item() if isinstance(value, np.generic) else value
    return number


def changed_numbers(root: nn.Module, key: GuardKey, before: Any) -> list[NumberPlace]:
    """Returns where numbers differ in what a guard names, which was ``before``; none where there are many."""
    found: list[NumberPlace] = []

    def compare(value: Any, old: Any, steps: Steps) -> None:
        if is_number(value):
            is_numpys = isinstance(value, np.generic) and isinstance(old, tuple)
            if (type(old) is type(value) or is_numpys) and old != snapshot(value):
                found.append(NumberPlace(key, steps))
            return
        for step, item, other in _entries(value, old):
            compare(item, other, (*steps, step))

    compare(value_of(root, key), before, ())
    return found if len(found) <= _MAX_NUMBERS else []


def _entries(value: Any, old: Any) -> Iterator[tuple[tuple[str, Any], Any, Any]]:
    """Yields what is in a container or an object, with what a snapshot has of it."""
    if not isinstance(old, tuple):
        return
    if isinstance(value, (list, tuple)) and len(value) == len(old):
        yield from (((ITEM, index), item, other) for index, (item, other) in enumerate(zip(value, old, strict=True)))
        return
    kind = ITEM if isinstance(value, dict) else ATTRIBUTE
    entries = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    if len(entries) == len(old) and all(isinstance(entry, tuple) and len(entry) == 2 for entry in old):
        for (key, item), (name, other) in zip(entries.items(), old, strict=True):
            if str(key) == name:
                yield (kind, key), item, other


def failing_numbers(
    numbers: tuple[NumberPlace, ...],
    constant: Sequence[NumberPlace],
    attempt: Callable[[tuple[NumberPlace, ...]], Sequence[NumberPlace]],
) -> Sequence[NumberPlace]:
    """Returns those numbers that cannot be inputs, of which an ``attempt`` with all of them has shown ``constant``.

    An attempt that fails names all of its numbers, so halves are tried; where each half succeeds, all of them.
    """
    if len(constant) < len(numbers) or len(numbers) == 1:
        return constant
    halves = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
    found = [place for half in halves if (failed := attempt(half)) for place in failing_numbers(half, failed, attempt)]
    return found or numbers
