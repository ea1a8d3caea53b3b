"""Messages to the user: lines of the logger ``lightning_fxpipe``, and warnings that point to the user's own code.

The logger has a level and a handler of its own, as Lightning's has, so that a script without any logging set up shows what
matters: INFO is what a user should know of a run, DEBUG what was decided on the way to it, and why.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from tqdm import tqdm

from lightning_fxpipe.user_code.frames import user_frame

logger = logging.getLogger("lightning_fxpipe")

# After this, a silent program looks like one that has stopped.
_LONG_SECONDS = 5.0
_REFRESH_SECONDS = 0.2

_running: ContextVar[Any] = ContextVar("running", default=None)


class _Terminal(logging.Handler):
    """Prints records unless logging is set up; then they reach its handlers through the root logger."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            # Looked up now: a progress bar that is on the screen has put something of its own here.
            stream = getattr(sys.stderr, "not_silenced", sys.stderr)
            with tqdm.external_write_mode(file=stream):  # a bar makes room
                print(self.format(record), file=stream, flush=True)


if logger.level == logging.NOTSET:
    logger.setLevel(logging.INFO)
if not any(isinstance(handler, _Terminal) for handler in logger.handlers):
    logger.addHandler(_Terminal())


@rank_zero_only
def inform(message: str) -> None:
    """Says something on rank 0."""
    logger.info("%s", message)


@rank_zero_only
def warn(message: str) -> None:
    """Warns on rank 0; as the place that the warning is about, the innermost line of the user's code that runs now is named."""
    frame = user_frame()
    if frame is None:
        warnings.warn(message, stacklevel=3)
        return
    warnings.warn_explicit(
        message,
        UserWarning,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


@contextmanager
def telling(what: str, *, total: int | None = None) -> Iterator[None]:
    """Logs on rank 0 what takes longer than 5 seconds, with a progress bar. The time that it took is logged at DEBUG.

    Args:
        what: The work, as in ``"Tracing the training step"``.
        total: Number of calls of :func:`went_on` in the block, for the bar; None if it is unknown.
    """
    begin = time.perf_counter()
    timer = threading.Timer(_LONG_SECONDS, inform, [f"{what} …"])
    timer.daemon = True
    timer.start()
    try:
        with _bar(what, total):
            yield
    finally:
        timer.cancel()
    logger.debug("%s: %.1f s", what, time.perf_counter() - begin)


@contextmanager
def _bar(what: str, total: int | None) -> Iterator[None]:
    """Shows, on a terminal of rank 0 and after some seconds, a bar that moves with each :func:`went_on` of the block.

    It is erased at the end. A log file gets the lines of :func:`telling` only: each step of a bar would add a line.
    """
    stream = getattr(sys.stderr, "not_silenced", sys.stderr)  # what user code prints meanwhile is not seen
    is_main = getattr(rank_zero_only, "rank", 0) == 0
    is_quiet = not (is_main and stream.isatty() and logger.isEnabledFor(logging.INFO))
    looks = {
        "desc": what,
        "unit": " modules" if total is None else "",
        "total": total,
        "leave": False,
        "file": stream,
        "disable": is_quiet,
    }
    with tqdm(**looks, delay=_LONG_SECONDS, mininterval=_REFRESH_SECONDS) as bar:
        token = _running.set(bar)
        try:
            yield
        finally:
            _running.reset(token)


def went_on() -> None:
    """Advances the progress display of :func:`telling` by one module."""
    bar = _running.get()
    if bar is not None:
        bar.update()
