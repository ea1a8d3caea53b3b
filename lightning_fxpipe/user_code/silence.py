"""Nothing of a dry run is heard: what user code prints, logs, warns of and writes to files while it runs once more than the
user knows of.

It does so again when it really runs, with values in place of symbols. Only the thread of the dry run is
silenced; progress bars are drawn by others.
"""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
import warnings
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TextIO

import torch

from lightning_fxpipe._compat.torch import patched_attributes
from lightning_fxpipe.errors import FxPipeError, add_note
from lightning_fxpipe.user_code.files import writing

_KEPT_LINES = 10
# Of the machinery itself: output that a developer has turned on to watch a dry run.
_HEARD_LOGGERS = ("lightning_fxpipe", "torch")


class silencing:
    """Around user code that runs once more than the user knows of. Its block gets what all that is printed and logged goes to.

    An error of that code leaves the block with what was printed before it, as a note.
    """

    # No generator: such a block is around each microbatch.
    def __enter__(self) -> io.StringIO:
        self._blocks: list[AbstractContextManager[Any]] = []
        if isinstance(sys.stdout, _Silenced) and sys.stdout.is_of_this_thread:
            return sys.stdout.printed
        self._printed = printed = io.StringIO()
        self._warns_always = torch.is_warn_always_enabled()
        out, err = _Silenced(sys.stdout, printed), _Silenced(sys.stderr, printed)
        quiet = (logging.Logger, "handle", _quiet_handle(printed))
        for block in (
            patched_attributes((sys, "stdout", out), (sys, "stderr", err), quiet),
            _NoWarnings(),
            writing(is_real=False),
        ):
            block.__enter__()
            self._blocks.append(block)
        torch.set_warn_always(True)  # what torch says once only, it must not say here
        return printed

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if not self._blocks:
            return
        torch.set_warn_always(self._warns_always)
        while self._blocks:
            self._blocks.pop().__exit__(kind, error, traceback)
        lines = self._printed.getvalue().splitlines()[-_KEPT_LINES:]
        if lines and isinstance(error, Exception) and not isinstance(error, FxPipeError):
            add_note(error, "\n".join(["Output of the code before the error (s0, s1, ... are symbolic sizes):", *lines]))


class _Silenced:
    """In place of ``sys.stdout``: keeps to itself what one thread writes; all else is that of the stream.

    Args:
        stream: The stream.
        printed: Gets what is written.
    """

    def __init__(self, stream: TextIO, printed: io.StringIO) -> None:
        self.not_silenced = stream
        self.printed = printed
        self._thread = threading.get_ident()

    @property
    def is_of_this_thread(self) -> bool:
        """True if the thread that asks is silenced."""
        return threading.get_ident() == self._thread

    def write(self, text: str) -> int:
        """Writes, or does not."""
        return (self.printed if self.is_of_this_thread else self.not_silenced).write(text)

    def writelines(self, lines: list[str]) -> None:
        """Writes, or does not."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Flushes the stream."""
        if not self.is_of_this_thread:
            self.not_silenced.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.not_silenced, name)


def _quiet_handle(printed: io.StringIO) -> Any:
    handle, thread = logging.Logger.handle, threading.get_ident()

    def quiet(logger: logging.Logger, record: logging.LogRecord) -> None:
        if threading.get_ident() != thread or logger.name.split(".")[0] in _HEARD_LOGGERS:
            handle(logger, record)
        else:
            printed.write(f"{record.msg}\n")

    return quiet


class _NoWarnings:
    """No warning is shown, none becomes an error, and none counts as shown.

    ``warnings.catch_warnings`` would let all be shown again that were shown once: it makes Python forget which.
    """

    def __enter__(self) -> None:
        self._entry = ("ignore", _ANY, Warning, None, 0)
        self._filters: list[Any] = warnings.filters  # type: ignore[assignment]
        self._filters.insert(0, self._entry)

    def __exit__(self, *exception: object) -> None:
        # What user code sets up meanwhile stays.
        self._filters[:] = [other for other in self._filters if other is not self._entry]


_ANY = re.compile("(?:dry run)?")
