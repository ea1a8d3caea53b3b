"""Lines of the user's code at which something happened: frames of torch or of this package do not help a reader of a
message.
"""

from __future__ import annotations

import sys
from types import FrameType

from lightning_fxpipe.errors import text_of

_FRAMEWORKS = frozenset(
    {
        *("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"),
        *("functools", "importlib", "multiprocessing", "runpy", "threading"),
    }
)


def user_source() -> str | None:
    """``file:line`` of the innermost frame that belongs to no framework."""
    frame = user_frame()
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def user_frame() -> FrameType | None:
    """The innermost frame that runs now and belongs to no framework: in a step, a hook, or where the Trainer is called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_framework(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame


def framework_calls() -> tuple[str, ...]:
    """Names of the functions, from the innermost to that which user code has called, that have led here."""
    names = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_framework(frame.f_globals.get("__name__", "")):
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return tuple(names)


def is_machinery(module_name: str) -> bool:
    """Returns True if a module is torch's or this package's."""
    return module_name.split(".")[0] in ("torch", "lightning_fxpipe", "contextlib")


def is_framework(module_name: str) -> bool:
    """Returns True if a module's frames say nothing to a user: machinery, Lightning's loops, and what has started the
    program.
    """
    return is_machinery(module_name) or (
        module_name.split(".")[0] in _FRAMEWORKS and ".demos" not in module_name  # whose modules are models
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, not too long."""
    return (text_of(error).splitlines() or [""])[0][:200]


def raising_source(error: BaseException) -> str | None:
    """``file:line`` of the innermost user frame of an error's traceback."""
    source, trace = None, error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        if not is_machinery(name):
            source = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return source
