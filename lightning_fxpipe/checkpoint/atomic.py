"""Files and folders that get their name when they are complete, and lose it all at once.

What is written lies in a hidden folder beside its place until then, under a name that nobody takes for a checkpoint: Lightning
finds the last one by patterns (``last*.ckpt``, ``*hpc_ckpt_*``). A process may be killed between any two calls of the system:
under the name is then the old one or the new one, whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_HIDDEN = ".unfinished"
_NEW, _OLD, _REMOVED, _LINK = ".new", ".old", ".removed", ".link"


def begin(path: Path) -> Path:
    """Makes room for what is to become ``path``, and removes what a process that was killed has left there.

    Returns:
        Where to write it: a place where nothing is yet, in a folder that exists.
    """
    recover(path)
    new = _beside(path, _NEW)
    for left in (new, _beside(path, _OLD), _beside(path, _REMOVED)):
        _delete(left)
    new.parent.mkdir(parents=True, exist_ok=True)
    return new


def finish(path: Path) -> None:
    """Gives what was written after :func:`begin` its name, in place of what had it. It is on the disk when this returns."""
    new, old = _beside(path, _NEW), _beside(path, _OLD)
    if new.is_dir():
        sync_folder(new)
    if not os.path.lexists(path):
        new.rename(path)
    elif not _exchange(new, path):
        path.rename(old)  # `recover` puts it back after a death right here
        new.rename(path)
    sync_folder(path.parent)
    cancel(path)


def cancel(path: Path) -> None:
    """Removes what was written after :func:`begin`, as far as possible: a full disk needs the room."""
    recover(path)
    for left in (_beside(path, _NEW), _beside(path, _OLD)):
        with contextlib.suppress(OSError):
            _delete(left)
    _tidy(path)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what gets the name after the block, if that ends well."""
    try:
        yield begin(path)
        finish(path)
    except BaseException:
        cancel(path)
        raise


@contextmanager
def synced_file(path: Path) -> Iterator[IO[bytes]]:
    """A new file, which is on the disk after the block."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Removes a file or folder, if there is one. Half of a folder never has the name."""
    if os.path.lexists(path):
        removed = _beside(path, _REMOVED)
        _delete(removed)
        removed.parent.mkdir(parents=True, exist_ok=True)
        path.rename(removed)
        _delete(removed)
        _tidy(path)


def link(target: Path, path: Path) -> None:
    """Makes ``path`` a symbolic link to ``target``, relative to it, in place of what was there."""
    temporary = _beside(path, _LINK)
    _delete(temporary)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    temporary.symlink_to(os.path.relpath(target, path.parent))  # right where it goes to, not where it is
    if path.is_dir() and not path.is_symlink():
        remove(path)
    temporary.replace(path)
    _tidy(path)


def is_linked(path: Path) -> bool:
    """Whether a symbolic link beside a path leads to it."""
    with contextlib.suppress(OSError):
        return any(entry.is_symlink() and entry.resolve() == path.resolve() for entry in path.parent.iterdir())
    return False


def recover(path: Path) -> None:
    """Puts back what a process that was killed had set aside to replace it. May be called by several processes at once."""
    if not os.path.lexists(path):
        with contextlib.suppress(OSError):
            _beside(path, _OLD).rename(path)


def recover_all(folder: Path) -> None:
    """:func:`recover` for all that was in a folder."""
    for old in (folder / _HIDDEN).glob(f"*{_OLD}"):
        recover(folder / old.name.removesuffix(_OLD))


def sync_folder(folder: Path) -> None:
    """Has the system write a folder's entries to the disk."""
    with contextlib.suppress(OSError):  # not every file system, or system, can
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _beside(path: Path, suffix: str) -> Path:
    return path.parent / _HIDDEN / f"{path.name}{suffix}"


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _tidy(path: Path) -> None:
    """Removes the hidden folder once it is empty."""
    with contextlib.suppress(OSError):
        (path.parent / _HIDDEN).rmdir()


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step, by a call that Python does not offer; False where the system or the file system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):  # not on Linux
        return False
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)
