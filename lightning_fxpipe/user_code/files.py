"""Files that user code writes are written once: on the last stage's rank, and in no dry run.

Hooks run on every rank, and a step runs on every rank up to the model's call. A row that each of them appends to a file would
be there once for each rank. So elsewhere ``open`` returns a file that leads nowhere where its mode writes. In hooks ranks meet
before a file is opened to be written, so that all have read what was there, and before such a file is read.

Not seen are files that code opens below ``open``: by ``os.open``, or in C, as h5py and sqlite do.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_fxpipe._compat.torch import patched_attributes
from lightning_fxpipe.user_code.frames import is_machinery

_KINDS_OF_PATHS = (str, bytes, os.PathLike)
_WRITING = set("wax+")  # in modes
# Besides torch: compiled code is written to files, and read from there.
_COMPILERS = ("triton",)


class writing:
    """In the block, ``open`` writes for user code of this thread, or does not.

    Args:
        is_real: False where what is written goes nowhere.
        meet: Called by every rank before a file is opened for writing, and before such a file is read.

    Attributes:
        is_active: False while other code than the user's runs.
    """

    # No generator: such a block is around each microbatch.
    def __init__(self, *, is_real: bool, meet: Callable[[], object] = lambda: None) -> None:
        self.is_active = True
        self._is_real = is_real
        self._meet = meet
        self._written: set[str] = set()
        self._thread = threading.get_ident()
        self._open: Callable[..., Any] = builtins.open

    def __enter__(self) -> writing:
        self._open, self._save = builtins.open, torch.save
        saves = (torch, "save", self._saved)  # which opens a path in C++
        self._patches = patched_attributes((builtins, "open", self._opened), (io, "open", self._opened), saves)
        self._patches.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._patches.__exit__(*exception)

    def _opened(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        opens = self._open_for_user if self._is_users(file, reads=not set(mode) & _WRITING) else self._open
        return opens(file, mode, *args, **kwargs)

    def _saved(self, obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if not self._is_users(f):
            self._save(obj, f, *args, **kwargs)
            return
        with self._open_for_user(f, "wb") as file:
            self._save(obj, file, *args, **kwargs)

    def _is_users(self, file: Any, *, reads: bool = False) -> bool:
        """True if ``file`` is a path, and user code has called the method that calls this, or to read any code."""
        if not self.is_active or threading.get_ident() != self._thread or not isinstance(file, _KINDS_OF_PATHS):
            return False
        caller = str(sys._getframe(2).f_globals.get("__name__", ""))
        return reads or (not is_machinery(caller) and caller.split(".")[0] not in _COMPILERS)

    def _open_for_user(self, file: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
        path, writes = os.path.abspath(os.fsdecode(file)), bool(set(mode) & _WRITING)
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
