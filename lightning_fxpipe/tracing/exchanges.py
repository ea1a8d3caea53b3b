"""Values that modules may leave for each other, and the recordings that try whether they do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from lightning_fxpipe.tracing.reachable import is_plain_value, place_of
from lightning_fxpipe.user_code.paths import Difference, Path


@dataclass(frozen=True)
class Exchange:
    """Something that one module, or the code around it, may leave for another.

    Attributes:
        difference: Where, and what.
        writers: Paths of the modules that have changed it, or :data:`AROUND`.
        reader: Path of the module that can reach it, or :data:`AROUND`.
    """

    difference: Difference
    writers: frozenset[str]
    reader: str

    @property
    def place(self) -> Path:
        """Path of the place."""
        return place_of(self.difference)

    @property
    def is_plain(self) -> bool:
        """False where it is a tensor, of one recording."""
        return is_plain_value(self.difference.value)


class Round(Enum):
    """Contents that whole modules find in the places of exchanges while a region is recorded."""

    TOGETHER = auto()  # what all of them leave there, as on one device in its second step
    ALONE = auto()  # what each has left there itself
    ALONE_AGAIN = auto()  # the same, as if each had been called before
    OTHER_VALUES = auto()  # the same, with other numbers, flags and texts where a second run leaves others
    OTHER_SETTLED = auto()  # the same, with others where a second run leaves what is there


@dataclass(frozen=True)
class Trial:
    """Exchanges that are tried, and what the recordings before have shown.

    Attributes:
        exchanges: All of them.
        left_by_all: What is in the places at the end, where that is not what it was.
        settled: Places that a second run leaves as they are.
        round: The recording that comes next.
        together: Torch calls by path of the module that makes them, in the round of that name.
        again: Readers that have made others when they were alone, perhaps because it was their first call.
        left: What these have left in the places.
    """

    exchanges: tuple[Exchange, ...]
    left_by_all: tuple[Difference, ...] = ()
    settled: frozenset[Path] = frozenset()
    round: Round = Round.TOGETHER
    together: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    again: frozenset[str] = frozenset()
    left: Mapping[str, list[Any]] = field(default_factory=dict)

    @property
    def finders(self) -> frozenset[str]:
        """Paths of the modules that may find other values in this round: those that have made a settled entry, too."""
        writers = (each.writers for each in self.exchanges if self.round is Round.OTHER_SETTLED)
        return frozenset({each.reader for each in self.exchanges}.union(*writers))

    def others_for(self, path: str) -> list[Exchange]:
        """Returns the exchanges in whose places a module finds other values in this round."""
        if self.round is Round.OTHER_VALUES:
            live = (each for each in self.exchanges if each.is_plain and each.place not in self.settled)
            return [each for each in live if each.reader == path]
        if self.round is Round.OTHER_SETTLED:
            return [each for each in self.exchanges if path in (each.reader, *each.writers) and each.place in self.settled]
        return []

    def settled_for(self, paths: Collection[str]) -> dict[Path, Any]:
        """Returns what is in the settled places in which some of these modules find it."""
        places = {each.place for each in self.exchanges if not {each.reader, *each.writers}.isdisjoint(paths)} & self.settled
        return {place: each.value for each in self.left_by_all if (place := place_of(each)) in places}
