"""What ends a recording, or the run of a batch, before its time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.user_code.frames import user_source

if TYPE_CHECKING:
    from lightning_fxpipe.user_code.paths import Difference

# Path of a module inside a whole one, which of its calls, and which of the tensors in that call's result.
InnerPlace = tuple[str, int, int]
# Adds to what is learned; not while the recording goes on that has shown it.
Lesson = Callable[[], None]


class RecordError(BaseException):
    """A call cannot become a node. A ``BaseException``, so that a model's own ``except Exception`` does not hide it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.source = user_source()


class HiddenTensor(RecordError):
    """A tensor is used that no recorded call has made."""


class MustStayWhole(BaseException):
    """The Python of an opened module cannot be recorded; the trace starts again with the module whole."""

    def __init__(self, path: str, reason: str, source: str | None) -> None:
        super().__init__(path)
        self.path, self.reason, self.source = path, reason, source


class _Because(Exception):
    """A signal; ``reason`` is the error that says why."""

    def __init__(self, reason: FxPipeError) -> None:
        super().__init__(reason.what)
        self.reason = reason


class CannotCut(_Because):
    """A region has too few places for cuts, and nothing in it is closed: no other look at it, and no part of it, has more."""


class CannotFollow(_Because):
    """A step that trains nothing cannot be cut as the plan says. Raised on every rank."""


class StepFailed(CannotFollow):
    """The same, found on the last stage's rank alone, after the others have done their part of the batch."""


@dataclass
class Learned:
    """What earlier recordings of the same call have shown.

    Attributes:
        kept_whole: Modules whose Python cannot be recorded, with the reason.
        inner_results: What else than their results whole modules return, by path: results of modules inside them.
        probed_inside: Whole modules in which only the modules inside that look at values run on made-up data.
        watches_state: Whether it matters who sets what while the model runs.
        given: Paths of what the model has been given since.
        opened: Modules that must be open, as tensors come or go that are no arguments and no results.
        values_changed: Numbers that are others after a run, so that it matters who has changed them.
        calls_together: Torch calls that whole modules make where each finds what others have changed.
        values_are_settled: Whether it is known that nobody else reads them.
    """

    kept_whole: dict[str, str] = field(default_factory=dict)
    inner_results: dict[str, tuple[InnerPlace, ...]] = field(default_factory=dict)
    probed_inside: set[str] = field(default_factory=set)
    watches_state: bool = False
    given: set[tuple[Any, ...]] = field(default_factory=set)
    opened: set[str] = field(default_factory=set)
    values_changed: tuple[Difference, ...] = ()
    calls_together: tuple[str, ...] | None = None
    values_are_settled: bool = False

    def known_again(self, given: set[tuple[Any, ...]]) -> Learned:
        """The same for another recording, which has ``given`` other values, and may learn more."""
        return Learned(
            kept_whole=dict(self.kept_whole),
            inner_results=dict(self.inner_results),
            probed_inside=set(self.probed_inside),
            watches_state=self.watches_state,
            given=given,
            opened=set(self.opened),
            values_changed=self.values_changed,
            calls_together=self.calls_together,
            values_are_settled=self.values_are_settled,
        )

    def add_inner_result(self, path: str, place: InnerPlace) -> None:
        """A tensor is used that a module inside a whole one has returned: the whole one, at ``path``, is to return it, too."""
        self.inner_results[path] = tuple(dict.fromkeys((*self.inner_results.get(path, ()), place)))

    def open(self, paths: Collection[str]) -> None:
        """These modules leave tensors for each other: the graph has them only if they are open."""
        self.opened.update(paths)

    def watch_state(self) -> None:
        """An opened module has set something: it matters what else is set, and by whom."""
        self.watches_state = True

    def watch_values(self, changed: tuple[Difference, ...]) -> None:
        """These numbers have changed: the next recording begins with them, and shows who changes them again."""
        self.values_changed = changed

    def compare_calls(self, together: tuple[str, ...]) -> None:
        """The next recording shows whether whole modules make the same torch calls where each finds what it has left itself."""
        self.calls_together = together

    def settle_values(self) -> None:
        """Who changes numbers keeps them to itself."""
        self.values_changed, self.calls_together, self.values_are_settled = (), None, True


class RecordAgain(BaseException):
    """The trace starts again, and knows more: each of the ``lessons`` adds something to what is learned."""

    def __init__(self, lessons: Sequence[Lesson]) -> None:
        super().__init__()
        self.lessons = lessons


class FirstCallSets(BaseException):
    """The trace starts again, after the model has been given these values; ``otherwise``, where that has no end."""

    def __init__(self, values: tuple[Difference, ...], otherwise: MustStayWhole) -> None:
        super().__init__()
        self.values, self.otherwise = values, otherwise
