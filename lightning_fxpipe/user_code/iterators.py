"""Iterators that user code keeps and draws from in a step: a second loader's, ``itertools.cycle``, a generator.

A step that runs once more than the user knows of draws from them once more, and Python cannot put an item back. So such an
iterator is exchanged for one around it that can: items drawn while a mark is held are kept until then. Everything
else is asked of the iterator itself. One that a step makes anew (``except StopIteration: self.batches = iter(self.loader)``) is
made once for all the times that the step runs on a batch.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from operator import eq
from types import GeneratorType
from typing import Any, Protocol
from weakref import WeakSet, ref

from torch.utils.data import DataLoader

from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe._compat.torch import outside_fakes, patched_attributes
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.rng import rng_state, same_rng, set_rng_state
from lightning_fxpipe.user_code.contents import Kind, no_entries
from lightning_fxpipe.user_code.frames import user_source


class Undoing(Protocol):
    """Will make everything what it was."""

    def passing_over(self) -> AbstractContextManager[None]:
        """But for what changes in this context."""


_EXAMPLES: tuple[Any, ...] = ([], (), {}, {}.items(), {}.values(), set(), range(0), range(2**70), "", b"")
_BUILTIN_TYPES: frozenset[type] = frozenset(
    (
        *(GeneratorType, enumerate, zip, map, filter, reversed, type(reversed([])), type(reversed({}))),
        *(type(iter(example)) for example in _EXAMPLES),
        *(value for value in vars(itertools).values() if isinstance(value, type) and hasattr(value, "__next__")),
    )
)


def is_iterator(value: Any) -> bool:
    """Returns True if an object is an iterator of Python's or of torch's loader; one of a user's own class is an object like
    others.
    """
    cls: Any = type(value)
    return cls in _BUILTIN_TYPES or (cls.__module__ == DataLoader.__module__ and hasattr(cls, "__next__"))


def _random(iterator: Any) -> UnsupportedError:
    return UnsupportedError(
        "The step draws from an iterator whose items depend on random numbers.",
        where=user_source(),
        observed=f"a {type(iterator).__name__}, which used the global generators in the trial of the step before the run",
        expected="the random numbers of one device: an item that was drawn cannot be drawn again",
        todo="Use a separate generator, as in DataLoader(..., generator=torch.Generator()), let the Trainer load the batches "
        "(CombinedLoader), or draw the numbers in the step.",
    )


class Mark:
    """A position to return to, as long as it is held."""

    __slots__ = ("__weakref__", "position", "undoing")

    def __init__(self, position: int, undoing: Undoing | None) -> None:
        self.position = position
        self.undoing = None if undoing is None else ref(undoing)


class Rewindable(Iterator[Any]):
    """An iterator with the items of another, that can go back.

    Items are made as they would be in a step on one device: with data, seen by no recorder, with random numbers drawn once;
    what else changes then (a counter, a generator's state) is undone with no dry run.

    Args:
        inner: The iterator.

    Attributes:
        position: Number of the next item.
    """

    def __init__(self, inner: Iterator[Any]) -> None:
        self._inner = inner
        self.position = self._first = 0  # the first that is kept
        self._kept: deque[tuple[Any, dict[str, Any], dict[str, Any]]] = deque()  # with the generators before and after
        self._marks: WeakSet[Mark] = WeakSet()

    def __next__(self) -> Any:
        with outside_fakes(), unwatched_torch():
            if self.position - self._first == len(self._kept):
                before = rng_state()
                item = self._draw()
                self._kept.append((item, before, rng_state()))
            else:
                item, before, after = self._kept[self.position - self._first]
                if not _drawn_again(before, after):
                    raise _random(self._inner)
        self.position += 1
        needed = min((mark.position for mark in self._marks), default=self.position)
        while self._first < min(needed, self.position):
            self._kept.popleft()
            self._first += 1
        return item

    def _draw(self) -> Any:
        with ExitStack() as stack:
            for mark in [*self._marks]:
                if mark.undoing is not None and (undoing := mark.undoing()) is not None:
                    stack.enter_context(undoing.passing_over())
            return next(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_inner" not in vars(self):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        return itertools.chain, ([item for item, *_ in self._kept][self.position - self._first :], self._inner)

    def mark(self, undoing: Undoing | None = None) -> Mark:
        """Marks the present position. Items from there on are kept as long as the mark is; ``undoing`` ignores effects of
        making them.
        """
        mark = Mark(self.position, undoing)
        self._marks.add(mark)
        return mark

    def go_to(self, position: int) -> None:
        """Makes the item of this number the next; one before needs a mark.

        Raises:
            UnsupportedError: Those on the way draw random numbers, which are other ones than where they were drawn first.
        """
        if position > self.position:
            with outside_fakes(), unwatched_torch():
                before = rng_state()
                for _ in range(position - self.position):
                    next(self, None)
                if not same_rng(before, rng_state()):
                    raise _random(self._inner)
        self.position = max(min(position, self.position), self._first)


def _drawn_again(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Takes the random numbers again that something took; False where they would be other ones."""
    if same_rng(rng_state(), before):
        set_rng_state(after)
        return True
    return same_rng(before, after)


@dataclass
class _Made:
    loader: DataLoader[Any]
    iterator: Rewindable
    before: dict[str, Any]  # the generators, when it was made, and then
    after: dict[str, Any]
    start: Mark | None = None  # while the step may run again


class StepIterators:
    """The iterators of dataloaders that a step makes for one batch: the same ones each time that it runs on it.

    An item is then the same object in a dry run and in the step itself, and random numbers are drawn once.
    """

    def __init__(self) -> None:
        self._made: list[_Made] = []

    def forget(self) -> None:
        """Another batch comes."""
        self._made = []

    @contextmanager
    def one_run(self, undoing: Undoing | None = None) -> Iterator[None]:
        """The block runs the step on the batch once.

        Args:
            undoing: Undoes the block, a dry run; None for the step itself.
        """
        number = 0
        for made in self._made:
            made.iterator.go_to(0)
            made.start = None if undoing is None else made.start
        marks = [] if undoing is None else [made.iterator.mark(undoing) for made in self._made]
        make = DataLoader.__iter__

        def iterate(loader: DataLoader[Any]) -> Any:
            nonlocal number
            number += 1
            with outside_fakes(), unwatched_torch():
                if number > len(self._made) or not _are_alike(self._made[number - 1].loader, loader):
                    del self._made[number - 1 :]  # the step takes another path
                    before = rng_state()
                    with nullcontext() if undoing is None else undoing.passing_over():
                        iterator = Rewindable(make(loader))
                    made = _Made(loader, iterator, before, rng_state())
                    self._made.append(made)
                    if undoing is not None:
                        marks.append(made.iterator.mark(undoing))
                        made.start = made.iterator.mark()
                    return made.iterator
                made = self._made[number - 1]
                if not _drawn_again(made.before, made.after):
                    if loader.num_workers:  # the seeds of these are drawn, too
                        raise _random(made.iterator._inner)
                    make(loader)
                return made.iterator

        with patched_attributes((DataLoader, "__iter__", iterate)):
            yield

    def place_of(self, value: Any) -> tuple[int, int] | None:
        """The number of an iterator, and that of its next item; None where it is none of these."""
        found = (index for index, made in enumerate(self._made) if made.iterator is value)
        return next(((index, value.position) for index in found), None)

    def at(self, place: tuple[int, int]) -> Rewindable:
        """The iterator of this number, which goes to that item; on a rank that has made it, too."""
        index, position = place
        iterator = self._made[index].iterator
        iterator.go_to(position)
        return iterator


def _are_alike(one: DataLoader[Any], other: DataLoader[Any]) -> bool:
    """Returns True if two loaders may be made by the same code, if they are not one."""
    kinds = [(type(each), type(each.dataset), type(each.sampler), each.batch_size) for each in (one, other)]
    return one is other or kinds[0] == kinds[1]


ITERATOR = Kind("iterator", lambda value: value.position, entries=no_entries, put=Rewindable.go_to, is_same=eq)
