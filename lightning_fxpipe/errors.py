"""The errors a user can see.

Every message has the same four parts, so that a user can act on it without reading our code: what failed, where it failed, what
was observed against what was expected, and what to do next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class FxPipeError(Exception):
    """Base of all errors raised by this package.

    Args:
        what: What failed, one sentence.
        where: Stage, module path, or file and line.
        observed: What was found.
        expected: What was needed instead.
        todo: What the user can do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        observed: str | None = None,
        expected: str | None = None,
        todo: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.observed = observed
        self.expected = expected
        self.todo = todo
        parts = (("Where", where), ("Observed", observed), ("Expected", expected), ("What to do", todo))
        super().__init__("\n  ".join([what, *(f"{label}: {text}" for label, text in parts if text)]))

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling, and errors travel between processes.
        return _rebuild, (type(self), self.what, self.where, self.observed, self.expected, self.todo)


def _rebuild(
    kind: type[FxPipeError], what: str, where: str | None, observed: str | None, expected: str | None, todo: str | None
) -> FxPipeError:
    return kind(what, where=where, observed=observed, expected=expected, todo=todo)


class TraceError(FxPipeError):
    """The model call inside the step could not be found or recorded as a graph."""


class PartitionError(FxPipeError):
    """The graph cannot be cut into the number of stages asked for, or a given plan does not fit the model."""


class ScheduleError(FxPipeError):
    """A schedule's order of actions cannot be run, or not within the memory that is allowed."""


class BatchError(FxPipeError):
    """A batch cannot be split into microbatches."""


class UnsupportedError(FxPipeError):
    """The module, the Trainer or the step asks for something that a pipeline cannot honour (yet)."""


class PeerError(FxPipeError):
    """Another rank of the pipeline failed; a note (``__notes__``) carries its original traceback."""


def text_of(error: BaseException) -> str:
    """Returns the text of an error, even if its class raises when asked; all of it can be printed and sent."""
    try:
        text = str.__str__(str(error))  # not what a subclass of str makes of itself
    except BaseException as why:
        text = f"(no text: its __str__ raised {type(why).__name__})"
    return printable(text)


def printable(text: str) -> str:
    """A text without characters that cannot be encoded."""
    return text.encode("utf-8", "backslashreplace").decode()


def interpreters(error: BaseException, name: str) -> Any:
    """An error's ``__cause__``, ``__context__`` or ``__traceback__``, whatever its class has put in the place."""
    return vars(BaseException)[name].__get__(error)


def set_interpreters(error: BaseException, name: str, value: Any) -> None:
    """Sets what :func:`interpreters` gives; a frozen dataclass refuses an assignment."""
    vars(BaseException)[name].__set__(error, value)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        cause = interpreters(current, "__cause__")
        current = interpreters(current, "__context__") if cause is None else cause


def add_note(error: BaseException, note: str) -> None:
    """Adds a note, whatever the error's class has put in the place of ``add_note`` and ``__notes__``."""
    values: dict[str, Any] = BaseException.__getattribute__(error, "__dict__")
    before = values.get("__notes__", [])
    values["__notes__"] = [*(before if isinstance(before, (list, tuple)) else [before]), note]


@contextmanager
def no_end_of_epoch(where: str) -> Iterator[None]:
    """Raises :class:`FxPipeError` in place of a StopIteration of the block: Lightning's loops take that for the end of data.

    Args:
        where: Which user code the block is.
    """
    try:
        yield
    except StopIteration as error:
        raise FxPipeError(
            "User code raised StopIteration, which would end the epoch on this rank alone.",
            where=where,
            observed="an uncaught StopIteration, such as from next() on an exhausted iterator",
            todo="Pass a default to next(), or catch StopIteration. To end training, set trainer.should_stop.",
        ) from error
