"""What ends a recording, or the run of a batch, before its time."""

from __future__ import annotations

from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.frames import user_source


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


class CannotCut(Exception):
    """A region has too few places for cuts, and nothing in it is closed: neither another look at it nor a part of it has more.

    Args:
        reason: The error that says so.
    """

    def __init__(self, reason: FxPipeError) -> None:
        super().__init__(reason.what)
        self.reason = reason


class CannotFollow(Exception):
    """A step that trains nothing cannot be cut as the plan says. Raised on every rank.

    Args:
        reason: The error that says why.
    """

    def __init__(self, reason: FxPipeError) -> None:
        super().__init__(reason.what)
        self.reason = reason


class StepFailed(CannotFollow):
    """The same, found on the last stage's rank alone, after the others have done their part of the batch."""
