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
from lightning_fxpipe.tracing.comparable import Held, Steps, comparable, parts_of
from lightning_fxpipe.tracing.guards import (
    AttributeOfOther,
    GuardKey,
    Varying,
    name_of_guard,
    value_of,
)
from lightning_fxpipe.user_code.paths import kind_of_step, look

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
        words = (f"[{key!r}]" if kind in ("index", "key") else f".{key}" for kind, key in self.steps)
        return name_of_guard(self.guard) + "".join(words)

    def look(self, root: nn.Module) -> Any:
        """Returns what is there now; None where there is nothing."""
        found = value_of(root, self.guard)
        try:
            for step in self.steps:
                found = look(found, step)
        except (KeyError, IndexError, AttributeError):
            return None
        return found

    def owner(self, root: nn.Module) -> Any:
        """Returns the object or container whose own attribute or entry the number is; None where it is computed, or fixed."""
        if self.steps:
            owner = NumberPlace(self.guard, self.steps[:-1]).look(root)
            is_own = NumberPlace(self.guard).owner(root) is not None
            return owner if is_own and kind_of_step(owner, self.steps[-1][0]).can_change else None
        if isinstance(self.guard, CodeKey):
            return self.guard.owner()
        if isinstance(self.guard, AttributeOfOther):
            module, name = self.guard.module, self.guard.name
        elif isinstance(self.guard, tuple) and self.guard[0] is not None:
            module, name = root.get_submodule(self.guard[0]), self.guard[1]
        else:
            return None
        owner = next((each for each in (module, *type(module).__mro__) if name in vars(each)), None)
        return None if owner is None or hasattr(type(vars(owner)[name]), "__get__") else owner

    @property
    def is_computed(self) -> bool:
        """True if reads of a module's or the Trainer's attribute can return a symbol though nothing stores the number."""
        return not self.steps and isinstance(self.guard, tuple)

    def set(self, root: nn.Module, value: Any) -> None:
        """Puts another value there."""
        owner = self.owner(root)
        if self.steps:
            kind, key = self.steps[-1]
            kind_of_step(owner, kind).set(owner, key, value)
        elif isinstance(owner, type):
            setattr(owner, self._name, value)
        else:
            vars(owner)[self._name] = value

    @property
    def _name(self) -> str:
        if isinstance(self.guard, CodeKey):
            return self.guard.names[-1]
        return self.guard.name if isinstance(self.guard, AttributeOfOther) else str(self.guard[1])  # type: ignore[index]


@dataclass(frozen=True)
class CallArgument:
    """A number among the arguments of a call that the step makes itself, between its calls of the model.

    Nothing need have stored it: it may be a local variable. Only the step's own code tells its value, in a dry run.

    Attributes:
        call: Number of the call among the step's.
        name: Name of what is called.
        position: Position among the flattened arguments.
    """

    call: int
    name: str
    position: int

    def __str__(self) -> str:
        return f"a number that the step passes to {self.name}"


def is_number(value: Any) -> bool:
    """True for what may become a symbol: an integer or a finite float, of Python or of numpy."""
    is_integer = type(value) is int or isinstance(value, np.integer)
    return is_integer or ((type(value) is float or isinstance(value, np.floating)) and math.isfinite(value))


@dataclass(frozen=True, eq=False)
class HeldNumbers:
    """The numbers of one graph that are its inputs.

    Attributes:
        root: The module.
        places: Where they are, by their symbols.
        recorded: Their values when the graph was recorded.
        now: Their values in the running batch.
        computed: Symbols that reads of computed numbers return while the graph is recorded: a property's, ``global_step``.
        aliases: Other ways to the same numbers, by their symbols: several layers may have one object with settings.
    """

    root: nn.Module
    places: dict[Any, NumberPlace | CallArgument] = field(default_factory=dict)
    recorded: dict[Any, int | float] = field(default_factory=dict)
    now: dict[Any, int | float] = field(default_factory=dict)
    computed: dict[GuardKey, Any] = field(default_factory=dict)
    aliases: dict[Any, list[NumberPlace]] = field(default_factory=dict)

    def look(self) -> dict[Any, int | float] | None:
        """Returns the values of this moment; None where one is no number of the same type any more, or an alias is none."""
        found = {symbol: place.look(self.root) for symbol, place in self._stored}
        are_one = all(place.look(self.root) is found[symbol] for symbol, places in self.aliases.items() for place in places)
        if are_one and all(self._fits(symbol, value) for symbol, value in found.items()):
            return {**self.now, **{symbol: _plain(value) for symbol, value in found.items()}}
        return None

    def take_argument(self, place: CallArgument, value: Any) -> bool:
        """Takes the number of the running batch; False where the place has no symbol, or the value is of another type."""
        symbol = next((symbol for symbol, each in self.places.items() if each == place), None)
        if symbol is None or not self._fits(symbol, value):
            return False
        self.now[symbol] = _plain(value)
        return True

    @property
    def has_arguments(self) -> bool:
        """True if a dry run of the step has to tell some of the numbers."""
        return any(isinstance(place, CallArgument) for place in self.places.values())

    @property
    def _stored(self) -> Iterator[tuple[Any, NumberPlace]]:
        return ((symbol, place) for symbol, place in self.places.items() if isinstance(place, NumberPlace))

    def _fits(self, symbol: Any, value: Any) -> bool:
        return is_number(value) and type(_plain(value)) is type(self.recorded[symbol])

    @cached_property
    def varying(self) -> Varying:
        """Steps to the numbers, by guard, which guards do not compare."""
        found: dict[GuardKey, set[Steps]] = {}
        for symbol, stored in self._stored:
            for place in (stored, *self.aliases.get(symbol, ())):
                found.setdefault(place.guard, set()).add(place.steps)
        return found

    def ways_to(self, symbols: Collection[Any]) -> list[NumberPlace | CallArgument]:
        """Returns the places of some numbers, aliases among them."""
        return [each for symbol, place in self.places.items() if symbol in symbols for each in self._ways(symbol, place)]

    def _ways(self, symbol: Any, place: NumberPlace | CallArgument) -> list[NumberPlace | CallArgument]:
        return [place, *self.aliases.get(symbol, ())]

    def calls_of(self, graph: fx.Graph) -> list[tuple[str, str, str]]:
        """Returns the calls of a graph, with the recorded values of the numbers."""

        def plain(value: Any) -> Any:
            if isinstance(value, SymbolicSize):
                value = as_size_of(value, self.recorded)
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
    root: nn.Module, places: Collection[NumberPlace | CallArgument], symbol_of: Callable[[int | float], tuple[Any, Any]]
) -> Iterator[tuple[Callable[[], Mapping[Any, int | float]], Callable[[CallArgument, Any], Any], HeldNumbers]]:
    """Yields a function that puts symbols in the place of stored numbers, until the block ends, one that returns what a call
    gets for an argument, and what they have put there.

    Args:
        root: The module.
        places: Where the numbers are.
        symbol_of: Makes of a number its symbol, and what code gets for it.
    """
    found = HeldNumbers(root)
    originals: dict[Any, Any] = {}
    numbers: dict[Any, Any] = {}  # what code gets, by symbol

    def symbol_for(place: NumberPlace | CallArgument, value: Any) -> Any:
        symbol, number = symbol_of(_plain(value))
        found.places[symbol], found.recorded[symbol], originals[symbol] = place, _plain(value), value
        found.now[symbol], numbers[symbol] = found.recorded[symbol], number
        return number

    def alias_of(value: Any) -> Any:
        return next((symbol for symbol, number in numbers.items() if number is value), None)

    def exchange() -> Mapping[Any, int | float]:
        for place in places:
            if isinstance(place, CallArgument):
                continue
            value = place.look(root)
            if (symbol := alias_of(value)) is not None:
                found.aliases.setdefault(symbol, []).append(place)
                continue
            has_owner = place.owner(root) is not None
            if is_number(value) and has_owner:
                place.set(root, symbol_for(place, value))
            elif is_number(value) and place.is_computed:
                found.computed[place.guard] = symbol_for(place, value)
        return found.recorded

    def argument(place: CallArgument, value: Any) -> Any:
        return symbol_for(place, value) if place in places and is_number(value) else value

    try:
        yield exchange, argument, found
    finally:
        for symbol, place in found.places.items():
            if isinstance(place, NumberPlace) and place.owner(root) is not None:  # the code may have taken it away
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
            if (type(old) is type(value) or is_numpys) and old != comparable(value):
                found.append(NumberPlace(key, steps))
        elif isinstance(old, Held):
            parts = list(parts_of(value))
            if [kind for (kind, _), _ in parts] == [kind for (kind, _), _ in old.entries]:
                for (step, item), (_, other) in zip(parts, old.entries, strict=True):
                    compare(item, other, (*steps, step))

    compare(value_of(root, key), before, ())
    return found if len(found) <= _MAX_NUMBERS else []


def failing_numbers(
    numbers: tuple[NumberPlace | CallArgument, ...],
    constant: Sequence[NumberPlace | CallArgument],
    attempt: Callable[[tuple[NumberPlace | CallArgument, ...]], Sequence[NumberPlace | CallArgument]],
) -> Sequence[NumberPlace | CallArgument]:
    """Returns those numbers that cannot be inputs, of which an ``attempt`` with all of them has shown ``constant``.

    An attempt that fails names all of its numbers, so halves are tried; where each half succeeds, all of them.
    """
    if len(constant) < len(numbers) or len(numbers) == 1:
        return constant
    halves = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
    found = [place for half in halves if (failed := attempt(half)) for place in failing_numbers(half, failed, attempt)]
    return found or numbers
