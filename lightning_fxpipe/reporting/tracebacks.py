"""Tracebacks without the machinery: a refusal shows the user's code only, and an error of that code no frames of this package.

Who wants to see all of them sets the logger to DEBUG.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

from lightning_fxpipe.errors import FxPipeError, interpreters, set_interpreters
from lightning_fxpipe.user_code.frames import is_framework

_logger = logging.getLogger("lightning_fxpipe")


_OWN = ("lightning_fxpipe", "torch.distributed.pipelining", "contextlib")


def shorten(error: Exception) -> None:
    """Takes frames out of an error's traceback, and of those of what led to it.

    A refusal keeps those of the user's code, also when it is printed. Any other error loses those of this package only, and
    none where this package raised it.
    """
    entries = list(_entries(interpreters(error, "__traceback__")))
    if isinstance(error, FxPipeError):
        _logger.debug("The whole traceback:", exc_info=error)
        _leave(error, is_shown=_is_users)
        sys.excepthook = partial(_print_shortened, without_shortening(sys.excepthook), weakref.ref(error))
    elif entries and not _is_own(entries[-1]):
        _logger.debug("The whole traceback:", exc_info=error)
        _leave(error, is_shown=lambda entry: not _is_own(entry))


def without_shortening(hook: Callable[..., Any]) -> Callable[..., Any]:
    """What is called in the end by a hook for uncaught errors: the hook that was there before a refusal, or the hook itself."""
    return hook.args[0] if isinstance(hook, partial) and hook.func is _print_shortened else hook


def _print_shortened(
    print_uncaught: Callable[..., Any],
    refusal: weakref.ref[FxPipeError],  # its frames hold the model, and somebody may have caught it
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """In place of ``sys.excepthook``: between the user's script and the refusal there are Lightning's frames again."""
    if error is refusal():
        _leave(error, is_shown=_is_users)
        trace = interpreters(error, "__traceback__")
    print_uncaught(kind, error, trace)


def _leave(error: BaseException, is_shown: Callable[[TracebackType], bool]) -> None:
    for one in _chain(error):
        trace: TracebackType | None = None
        for entry in reversed([entry for entry in _entries(interpreters(one, "__traceback__")) if is_shown(entry)]):
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


def _is_own(entry: TracebackType) -> bool:
    return _module_name(entry).startswith(_OWN)


def _module_name(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__", ""))
