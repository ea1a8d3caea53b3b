"""Tracebacks without the frames of Lightning, torch and this package: they show the user's code.

Whoever wants all frames sets the logger ``lightning_fxpipe`` to DEBUG.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

from lightning_fxpipe.errors import FxPipeError, add_note, interpreters, set_interpreters
from lightning_fxpipe.reporting.own_faults import is_own_fault
from lightning_fxpipe.user_code.frames import is_framework

_logger = logging.getLogger("lightning_fxpipe")
_HIDDEN = "The frames of Lightning and torch are hidden. The logger lightning_fxpipe shows them at level DEBUG."


def shorten(error: Exception) -> None:
    """Removes frames from an error's traceback, and from those of the errors that led to it, also when it is printed.

    The frames of the user's code stay. An error without any, or of this package's own code, keeps all.
    """
    if isinstance(error, FxPipeError) or (interpreters(error, "__traceback__") is not None and not is_own_fault(error)):
        _logger.debug("Full traceback:", exc_info=error)
        _remove_frames(error)
        # By its id, not the error itself: its frames hold the model, and the error may be caught.
        sys.excepthook = partial(_print_shortened, without_shortening(sys.excepthook), (id(error), type(error)))


def without_shortening(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for uncaught errors that was there before an error was shortened, or the hook itself."""
    return hook.args[0] if isinstance(hook, partial) and hook.func is _print_shortened else hook


def _print_shortened(
    print_uncaught: Callable[..., Any],
    shortened: tuple[int, type[BaseException]],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Takes the place of ``sys.excepthook``: between the user's script and the error there are Lightning's frames again."""
    if (id(error), type(error)) == shortened:
        _remove_frames(error)
        trace = interpreters(error, "__traceback__")
        if not isinstance(error, FxPipeError):
            add_note(error, _HIDDEN)
    print_uncaught(kind, error, trace)


def _remove_frames(error: BaseException) -> None:
    for one in _chain(error):
        trace: TracebackType | None = None
        for entry in reversed([entry for entry in _entries(interpreters(one, "__traceback__")) if _is_users(entry)]):
            trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        set_interpreters(one, "__traceback__", trace)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it, without what only this package uses to find its way."""
    seen: set[int] = set()  # an error may be raised again from what it has led to
    current: BaseException | None = error
    while current is not None:
        seen.add(id(current))
        yield current
        before = interpreters(current, "__cause__")
        if before is None and not interpreters(current, "__suppress_context__"):
            before = interpreters(current, "__context__")
        while before is not None and _is_signal(before) and id(before) not in seen:
            seen.add(id(before))
            cause = interpreters(before, "__cause__")
            before = interpreters(before, "__context__") if cause is None else cause
        if before is not None and id(before) in seen:
            before = None
        set_interpreters(current, "__cause__", before)  # and its context is not shown
        current = before


def _is_signal(error: BaseException) -> bool:
    return type(error).__module__.startswith("lightning_fxpipe.") and not isinstance(error, FxPipeError)


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_users(entry: TracebackType) -> bool:
    return not is_framework(_module_name(entry))


def _module_name(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__", ""))
