"""Errors that are this package's own: they say so, and what a report of them needs."""

from __future__ import annotations

import dis
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType

from lightning_fxpipe.errors import FxPipeError, interpreters
from lightning_fxpipe.reporting.wording import error_words
from lightning_fxpipe.user_code.frames import is_framework, raising_source

_PACKAGE = "lightning_fxpipe"
_DEPENDENCIES = ("lightning-fxpipe", "torch", "lightning", "pytorch-lightning")
_NUM_FRAMES = 3
# `function(*args, **kwargs)`: most such calls are made for the user's code, and their errors are its own.
_PASSES_ON = "CALL_FUNCTION_EX"


def is_own_fault(error: BaseException) -> bool:
    """True if this package's code raised an error by itself, or no code of the user's ran."""
    entries = list(_entries(error))
    if isinstance(error, FxPipeError) or not entries:
        return False
    if all(is_framework(_module_name(entry)) for entry in entries):
        return True
    return _is_own(entries[-1]) and _failing_operation(entries[-1]) != _PASSES_ON


def own_fault_words(error: BaseException) -> dict[str, str | None]:
    """The parts of a message about such an error, by the names that :class:`FxPipeError` has for them."""
    own = [entry for entry in _entries(error) if _is_own(entry)][-_NUM_FRAMES:]
    frames = [f"{entry.tb_frame.f_code.co_filename}:{entry.tb_lineno} ({entry.tb_frame.f_code.co_name})" for entry in own]
    return {
        "where": raising_source(error),
        "observed": f"{error_words(error)}, raised at {', from '.join(reversed(frames))}",
        "expected": "a graph, or an error that names the unsupported code: the step is not at fault",
        "todo": (
            "This is a bug in lightning_fxpipe. Please report it with this message, the full traceback, the code of the step "
            f"and of the module at that point, and these versions: {versions()}. The logger lightning_fxpipe has more details "
            "at level DEBUG."
        ),
    }


def versions() -> str:
    """The versions of Python, of this package and of those it depends on."""
    found = [f"Python {platform.python_version()}"]
    for name in _DEPENDENCIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _failing_operation(entry: TracebackType) -> str:
    operations = dis.get_instructions(entry.tb_frame.f_code)
    return next((each.opname for each in operations if each.offset == entry.tb_lasti), "")


def _entries(error: BaseException) -> Iterator[TracebackType]:
    trace: TracebackType | None = interpreters(error, "__traceback__")
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_own(entry: TracebackType) -> bool:
    return _module_name(entry).split(".")[0] == _PACKAGE


def _module_name(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__", ""))
