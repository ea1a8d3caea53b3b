"""Which dimensions of a call's inputs vary from batch to batch, and which of them vary together.

The first trace of a call is made for the sizes that it got, the batch's excepted. A dimension that comes with another size
later is one that varies, and the next trace holds for all its sizes: one symbol for all dimensions that have had the same size
as each other every time. Two that were equal by accident get symbols of their own once they have been seen to differ.
"""

from __future__ import annotations

from collections.abc import Sequence

Shapes = tuple[tuple[int, ...], ...]
Dim = tuple[int, int]  # (position among the input tensors, dimension)
DimGroups = tuple[tuple[Dim, ...], ...]  # dimensions of one group have one symbol

# One specialised trace may be an accident, such as the longest batch of all; the second one at another size is none.
_MAX_SPECIALISED = 2


def batch_dim_of(shape: Sequence[int], num_samples: int, batch_dim: int) -> int | None:
    """Which dimension of a tensor is the batch; None where no dimension has its size.

    The one that the user names, by default the first. A tensor with fewer dimensions, such as labels beside sequences of shape
    (time, batch, features), or one that has been transposed, has it first.
    """
    return next((dim for dim in (batch_dim, 0) if dim < len(shape) and shape[dim] == num_samples), None)


class ShapeHistory:
    """The sizes that the inputs of calls with one signature have had. It follows from the shapes alone, so that every rank that
    sees the same batches decides alike, and takes the same memory however many shapes there are.
    """

    def __init__(self) -> None:
        self._first_sizes: dict[Dim, int] = {}
        self._class_of: dict[Dim, int] = {}  # equal numbers: equal sizes so far
        self._varying: set[Dim] = set()
        self._not_batch: set[Dim] = set()
        self._specialised: dict[Dim, set[int]] = {}
        self._static: set[Dim] = set()

    def observe(self, shapes: Shapes, batch_size: int, batch_dim: int = 0) -> None:
        """Takes note of the shapes of a call."""
        numbers: dict[tuple[int | None, int, bool], int] = {}
        classes = {}
        for place, size in _sizes(shapes):
            if place[1] != batch_dim_of(shapes[place[0]], batch_size, batch_dim):
                self._not_batch.add(place)
            if self._first_sizes.setdefault(place, size) != size:
                self._varying.add(place)
            key = (self._class_of.get(place), size, place in self._not_batch)
            classes[place] = numbers.setdefault(key, len(numbers))
        self._class_of = classes

    def groups(self, shapes: Shapes) -> DimGroups:
        """The dimensions that a trace for these shapes should not depend on, besides the batch."""
        found: dict[int, list[Dim]] = {}
        for place, size in _sizes(shapes):
            # torch takes sizes of 0 and 1 for constants.
            if place in self._varying & self._not_batch - self._static and size > 1:
                found.setdefault(self._class_of[place], []).append(place)
        return tuple(map(tuple, found.values()))

    def keep_static(self, group: tuple[Dim, ...]) -> None:
        """These dimensions cannot be traced as symbols."""
        self._static.update(group)

    def note_specialised(self, group: tuple[Dim, ...], size: int) -> None:
        """A trace with a symbol for these dimensions came out to hold for one size only."""
        for place in group:
            seen = self._specialised.setdefault(place, set())
            seen.add(size)
            if len(seen) >= _MAX_SPECIALISED:
                self._static.add(place)


def _sizes(shapes: Shapes) -> list[tuple[Dim, int]]:
    return [((tensor, dim), size) for tensor, shape in enumerate(shapes) for dim, size in enumerate(shape)]
