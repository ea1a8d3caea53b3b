"""Files that user code writes are written once: on the last stage's rank, and in no dry run.

Hooks run on every rank, and a step runs on every rank up to the model's call. A row that each of them appends to a file would
be there once for each rank. So elsewhere ``open`` and ``os.open`` return a file that leads nowhere where their mode writes,
``sqlite3.connect`` a copy in memory, and what removes or renames files does nothing. In hooks ranks meet before a file is
opened to be written, so that all have read what was there, and before such a file is read. Log files and summaries that were
opened before receive records of one rank.

What ``tempfile`` makes has a name that only its rank knows: such files every rank writes.

Not seen are files that code opens in C, as h5py does.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import torch

with suppress(ImportError):  # not every Python has it
    import sqlite3  # noqa: F401

from lightning_fxpipe._compat.torch import patched_attributes
from lightning_fxpipe.user_code.frames import is_machinery

_KINDS_OF_PATHS = (str, bytes, os.PathLike)
_WRITING = set("wax+")  # in modes
_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
# Besides torch: compiled code is written to files, and read from there.
_COMPILERS = ("triton",)
_SQLITE = ("sqlite3", "sqlite3.dbapi2")
# Python's own, which open files for their callers.
_FOR_CALLERS = {"os", "pathlib", "shutil", "tempfile", "io", "codecs", "gzip", "zipfile", "logging", "sqlite3"}
# What changes a folder, by the functions that pathlib and others call.
_CHANGES: tuple[tuple[Any, str], ...] = (
    *((os, name) for name in ("mkdir", "rmdir", "remove", "unlink", "rename", "replace", "symlink", "link", "truncate")),
    (shutil, "rmtree"),  # it looks for what is there as it goes
)
# Methods that write to files which may have been opened before, of modules that need not be there.
_SINKS = (
    ("logging", "FileHandler", "emit"),
    ("tensorboard.summary.writer.event_file_writer", "EventFileWriter", "add_event"),
    ("tensorboardX.event_file_writer", "EventFileWriter", "add_event"),
)

# Returns rank 0's value of a call that every rank makes.
Share = Callable[[Any], Any]


class writing:
    """In the block user code of this thread writes files, or does not.

    Args:
        is_real: False where what is written goes nowhere.
        share: Called by every rank before a file is opened for writing, and before such a file is read; None where only some
            ranks come.
        temporary: Paths that ``tempfile`` has made in such blocks.

    Attributes:
        is_active: False while other code than the user's runs.
    """

    # No generator: such a block is around each microbatch.
    def __init__(self, *, is_real: bool, share: Share | None = None, temporary: set[str] | None = None) -> None:
        self.is_active = True
        self._is_real = is_real
        self._share = share
        self._temporary = set() if temporary is None else temporary
        self._written: set[str] = set()
        self._thread = threading.get_ident()
        self._open: Callable[..., Any] = builtins.open

    def __enter__(self) -> writing:
        self._open, self._save, self._low = builtins.open, torch.save, os.open
        patches: list[tuple[Any, str, Any]] = [
            (builtins, "open", self._opened),
            (io, "open", self._opened),
            (torch, "save", self._saved),  # which opens a path in C++
            (os, "open", self._opened_low),
            *[(owner, name, functools.partial(self._changing, name, getattr(owner, name))) for owner, name in _CHANGES],
        ]
        for sqlite in (sys.modules.get(name) for name in _SQLITE):
            if sqlite is not None:
                patches.append((sqlite, "connect", self._connecting(sqlite.connect)))
        if not self._is_real:
            sinks = ((getattr(sys.modules.get(module), kind, None), name) for module, kind, name in _SINKS)
            patches += [(kind, name, self._sink(getattr(kind, name))) for kind, name in sinks if kind is not None]
        self._patches = patched_attributes(*patches)
        self._patches.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._patches.__exit__(*exception)

    # ------------------------------------------------------------------ what is patched

    def _opened(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        opens = self._open_for_user if self._is_users(file, reads=not set(mode) & _WRITING) else self._open
        return opens(file, mode, *args, **kwargs)

    def _opened_low(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if str(sys._getframe(1).f_globals.get("__name__")) == "tempfile":
            self._temporary.add(_absolute(path))
        if not flags & _WRITING_FLAGS or kwargs.get("dir_fd") is not None or not self._is_users(path):
            return self._low(path, flags, *args, **kwargs)
        with self._paused():
            self._meet()
            self._written.add(_absolute(path))
            nowhere = flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
            return self._low(path, flags, *args, **kwargs) if self._is_real else self._low(os.devnull, nowhere)

    def _saved(self, obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if not self._is_users(f):
            self._save(obj, f, *args, **kwargs)
            return
        with self._open_for_user(f, "wb") as file:
            self._save(obj, file, *args, **kwargs)

    def _changing(self, name: str, change: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        """Changes a folder; all ranks come to it before the change, and go on after it."""
        if name == "mkdir" and str(sys._getframe(1).f_globals.get("__name__")) == "tempfile":
            self._temporary.add(_absolute(path))
        makes_only = self._share is None and name == "mkdir"  # in a step, which goes on in the folder
        if makes_only or kwargs.get("dir_fd") is not None or not self._is_users(path):
            return change(path, *args, **kwargs)
        error: OSError | None = None
        with self._paused():
            self._meet()
            self._written |= {_absolute(each) for each in (path, *args) if isinstance(each, _KINDS_OF_PATHS)}
            try:
                result = change(path, *args, **kwargs) if self._is_real else None
            except OSError as raised:
                error = raised
            error = error if self._share is None else self._share(error)
        if error is not None:
            raise error
        return result

    def _connecting(self, connect: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(connect)
        def run(database: Any, *args: Any, **kwargs: Any) -> Any:
            if os.fsdecode(database).startswith((":memory:", "file:")) or not self._is_users(database):
                return connect(database, *args, **kwargs)
            with self._paused():
                self._meet()
                connection = connect(database if self._is_real else ":memory:", *args, **kwargs)
                if not self._is_real and os.path.exists(database):
                    with closing(connect(database)) as source:
                        source.backup(connection)
                self._meet()  # what rank 0 goes on to write is not in the copies
                return connection

        return run

    def _sink(self, write: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(write)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.is_active or threading.get_ident() != self._thread:
                return write(*args, **kwargs)
            return None

        return run

    # ------------------------------------------------------------------ user code

    def _is_users(self, file: Any, *, reads: bool = False) -> bool:
        """True if ``file`` is a path, not a temporary one, and user code has called what calls this, or to read any code."""
        if not self.is_active or threading.get_ident() != self._thread or not isinstance(file, _KINDS_OF_PATHS):
            return False
        path = _absolute(file)
        if any(path == made or path.startswith(made + os.sep) for made in self._temporary):
            return False
        frame = sys._getframe(2)
        while (caller := str(frame.f_globals.get("__name__", ""))).split(".")[0] in _FOR_CALLERS and frame.f_back is not None:
            frame = frame.f_back
        return reads or (not is_machinery(caller) and caller.split(".")[0] not in _COMPILERS)

    def _meet(self) -> None:
        if self._share is not None:
            self._share(None)

    def _open_for_user(self, file: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        path, writes = _absolute(file), bool(set(mode) & _WRITING)
        if not writes and path not in self._written:
            return self._open(file, mode, *args, **kwargs)
        with self._paused():
            self._meet()
            if not writes:
                return self._open(file, mode, *args, **kwargs)
            self._written.add(path)
            if self._is_real or (os.path.exists(path) and not os.path.isfile(path)):
                return self._open(file, mode, *args, **kwargs)
            if "+" in mode:
                return self._open_copy(path, mode, *args, **kwargs)
            return self._open(os.devnull, mode.replace("x", "w"), *args, **kwargs)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self.is_active = False
        try:
            yield
        finally:
            self.is_active = True

    def _open_copy(self, path: str, mode: str, *args: Any, **kwargs: Any) -> Any:
        """A file without a name, with what is in that of the path."""
        descriptor, name = tempfile.mkstemp()
        os.close(descriptor)
        try:
            if os.path.exists(path):
                shutil.copyfile(path, name)
            return self._open(name, mode.replace("x", "w"), *args, **kwargs)
        finally:
            os.unlink(name)


def _absolute(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))


def lead_nowhere(owners: Iterable[Any]) -> None:
    """Has the files that objects have opened for writing, and hold as attributes, lead nowhere."""
    for owner in owners:
        for value in list(vars(owner).values()):
            if not isinstance(value, io.IOBase) or value.closed or not value.writable():
                continue
            try:
                descriptor = value.fileno()
            except OSError:  # no file
                continue
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                value.flush()
                with builtins.open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), descriptor)
