"""Exceptions that end a recording, or the run of a batch, before its time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_fxpipe.errors import FxPipeError, TraceError, UnsupportedError
from lightning_fxpipe.user_code.frames import user_source

if TYPE_CHECKING:
    from lightning_fxpipe.tracing.exchanges import Trial
    from lightning_fxpipe.user_code.paths import Difference, Path

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

    def refusal(self, label: str) -> TraceError:
        """Returns the error for a step, called ``label``, that uses it after the region."""
        return TraceError(
            f"{label} uses a tensor that the model stored outside its results during its call.",
            where=self.source,
            observed="a tensor that is neither a result of the call nor an attribute of a module",
            expected="only results, or attributes that the model's forward sets",
            todo="Return the tensor from the model's forward, or store it as an attribute of the module that computes it.",
        )


class NoRegion(UnsupportedError):
    """No region has the step's calls of the model; raised where the step makes one, it is no end of a smaller region."""


class MustStayWhole(BaseException):
    """The Python of an opened module cannot be recorded; the trace starts again with the module whole.

    Args:
        path: Its path.
        reason: What it does.
        source: Where.
        refusal: The error for a model that cannot be cut then; no other way to run the step is right either.
    """

    def __init__(self, path: str, reason: str, source: str | None, refusal: FxPipeError | None = None) -> None:
        super().__init__(path)
        self.path, self.reason, self.source, self.refusal = path, reason, source, refusal


class _Because(Exception):
    """A signal; ``reason`` is the error that says why."""

    def __init__(self, reason: FxPipeError) -> None:
        super().__init__(reason.what)
        self.reason = reason


class CannotCut(_Because):
    """A region has too few places for cuts, and nothing in it is closed: no other look at it, and no part of it, has more."""


class CannotFollow(_Because):
    """A step cannot be cut as the plan says. Raised on every rank, before a stage has run."""


class StepFailed(CannotFollow):
    """A step that trains nothing fails on the last stage's rank alone, after the others have done their part of the batch."""


@dataclass
class Learned:
    """Knowledge from earlier recordings of the same call.

    Attributes:
        kept_whole: Modules whose Python cannot be recorded, with the reason.
        refusal: The error where the model cannot be cut for one of these.
        inner_results: What else than their results whole modules return, by path: results of modules inside them.
        probed_inside: Whole modules in which only the modules inside that look at values run on made-up data.
        watches_state: Whether it matters who sets what while the model runs.
        given: Paths of what the model has been given since.
        opened: Modules that must be open, as tensors come or go that are no arguments and no results.
        trial: What modules may leave for each other, and are tried without (``tracing.shared_state``).
        harmless: Places and readers of what made no difference.
        settled: Places that modules read and in which a second run leaves what the first has left, and that.
        changed: Places with something else at some moment of the last recording, but for those that are settled.
    """

    kept_whole: dict[str, str] = field(default_factory=dict)
    refusal: FxPipeError | None = None
    inner_results: dict[str, tuple[InnerPlace, ...]] = field(default_factory=dict)
    probed_inside: set[str] = field(default_factory=set)
    watches_state: bool = False
    given: set[tuple[Any, ...]] = field(default_factory=set)
    opened: set[str] = field(default_factory=set)
    trial: Trial | None = None
    harmless: frozenset[tuple[Path, str]] = frozenset()
    settled: dict[Path, Any] = field(default_factory=dict)
    changed: frozenset[Path] = frozenset()

    def known_again(self, given: set[tuple[Any, ...]], *, has_same_state: bool) -> Learned:
        """Returns a copy for another recording, which may learn more.

        Args:
            given: The values that the model has been given for that.
            has_same_state: True if modules find the same in all places as in the earlier recordings.
        """
        return Learned(
            kept_whole=dict(self.kept_whole),
            refusal=self.refusal,
            inner_results=dict(self.inner_results),
            probed_inside=set(self.probed_inside),
            watches_state=self.watches_state,
            given=given,
            opened=set(self.opened),
            harmless=self.harmless if has_same_state else frozenset(),
            settled=dict(self.settled) if has_same_state else {},
        )

    def take(self, lessons: Sequence[Lesson]) -> None:
        """Learns. A trial goes on only where nothing else is learned: other modules run in the next recording then."""
        self.trial = None
        for learn in lessons:
            learn()
        if len(lessons) > 1:
            self.trial = None

    def keep_whole(self, stop: MustStayWhole, root: nn.Module) -> None:
        """Notes a module whose Python is not recorded, and others of its class that were opened for want of knowledge."""
        reason = f"{stop.reason}, {stop.source}" if stop.source else stop.reason
        kind = type(root.get_submodule(stop.path))
        alike = {path for path in self.opened if type(root.get_submodule(path)) is kind} if stop.path in self.opened else set()
        self.kept_whole |= dict.fromkeys(alike - self.kept_whole.keys() | {stop.path}, reason)
        self.refusal, self.trial = self.refusal or stop.refusal, None

    def add_inner_result(self, path: str, place: InnerPlace) -> None:
        """A tensor is used that a module inside a whole one has returned: the whole one, at ``path``, is to return it, too."""
        self.inner_results[path] = tuple(dict.fromkeys((*self.inner_results.get(path, ()), place)))

    def open(self, paths: Collection[str]) -> None:
        """These modules leave tensors for each other: the graph has them only if they are open."""
        self.opened.update(paths)

    def watch_state(self) -> None:
        """An opened module has set something: it matters what else is set, and by whom."""
        self.watches_state = True

    def try_exchanges(self, trial: Trial) -> None:
        """The next recording is a round of this trial."""
        self.trial = trial

    def settle_exchanges(self, trial: Trial, settled: Mapping[Path, Any]) -> None:
        """No module depends on what another one leaves for it, while there is in ``settled`` places what is there now."""
        self.trial = None
        self.harmless |= {(each.place, each.reader) for each in trial.exchanges}
        self.settled |= settled


class RecordAgain(BaseException):
    """The trace starts again, and knows more: each of the ``lessons`` adds something to what is learned."""

    def __init__(self, lessons: Sequence[Lesson]) -> None:
        super().__init__()
        self.lessons = lessons


@contextmanager
def lessons_first(lessons: Sequence[Lesson]) -> Iterator[None]:
    """Has a recording made again that has shown what it should have known: its end and its errors mean nothing then.

    Raises:
        RecordAgain: There are lessons when the block ends, or fails.
    """
    try:
        yield
    except (Exception, RecordError, MustStayWhole, FirstCallSets) as error:
        if lessons:
            raise RecordAgain(lessons) from error
        raise
    if lessons:
        raise RecordAgain(lessons)


class FirstCallSets(BaseException):
    """The trace starts again, after the model has been given these values; ``otherwise``, where that has no end."""

    def __init__(self, values: tuple[Difference, ...], otherwise: MustStayWhole) -> None:
        super().__init__()
        self.values, self.otherwise = values, otherwise
