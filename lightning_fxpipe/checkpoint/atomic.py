"""Files and folders that get their name when they are complete, and lose it all at once.

What is written lies in a hidden folder beside its place until then, where it is not taken for a checkpoint: Lightning finds
the last one by patterns (``last*.ckpt``, ``*hpc_ckpt_*``). A process may be killed between any two calls of the system: under
the name is then the old one or the new one, whole. Two runs may save one name at the same time: each writes in a room of its
own, and one of them is the last to give it the name.

    .unfinished/<token>/<name>   being written or removed, in the room of one process, which holds a lock on it while it lives
    .unfinished/old/<name>       set aside, where a file system cannot swap two names
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import shutil
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_HIDDEN, _OLD = ".unfinished", "old"
# After which a room counts as abandoned if the file system has no locks.
_ROOM_SECONDS = 24 * 60 * 60.0
_ATTEMPTS = 100


class Replacement:
    """A file or folder that is being written, and will become ``path``. One process makes it; others may write into it, too.

    Attributes:
        new: Where to write it: a place where nothing is yet, in a folder that exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        recover(path)
        _delete(_set_aside(path))
        self._room = _Room(path.parent)
        self.new = self._room.folder / path.name

    def finish(self) -> None:
        """Gives what was written its name, in place of what had it. It is on the disk when this returns."""
        if self.new.is_dir():
            sync_folder(self.new)
        _give_name(self.new, self._path)
        sync_folder(self._path.parent)
        self._room.leave()

    def cancel(self) -> None:
        """Removes what was written, as far as possible: a full disk needs the room."""
        recover(self._path)
        self._room.leave()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path to write to, which gets the final name after the block unless that fails."""
    replacement = Replacement(path)
    try:
        yield replacement.new
        replacement.finish()
    except BaseException:
        replacement.cancel()
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
        room = _Room(path.parent)
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            path.rename(room.folder / path.name)
        room.leave()


def link(target: Path, path: Path) -> None:
    """Makes ``path`` a symbolic link to ``target``, relative to it, in place of what was there."""
    room = _Room(path.parent)
    new = room.folder / path.name
    new.symlink_to(os.path.relpath(target, path.parent))  # right where it goes to, not where it is
    if path.is_dir() and not path.is_symlink():
        remove(path)
    new.replace(path)
    room.leave()


def is_linked(path: Path) -> bool:
    """Returns True if a symbolic link beside a path leads to it."""
    with contextlib.suppress(OSError):
        return any(entry.is_symlink() and entry.resolve() == path.resolve() for entry in path.parent.iterdir())
    return False


def recover(path: Path) -> None:
    """Puts back what a process that was killed had set aside to replace it. May be called by several processes at once."""
    if not os.path.lexists(path):
        with contextlib.suppress(OSError):
            _set_aside(path).rename(path)
            _tidy(path.parent)


def recover_all(folder: Path) -> None:
    """:func:`recover` for all that was in a folder."""
    for old in _entries(folder / _HIDDEN / _OLD):
        recover(folder / old.name)


def sync_folder(folder: Path) -> None:
    """Has the system write a folder's entries to the disk."""
    with contextlib.suppress(OSError):  # not every file system, or system, can
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---------------------------------------------------------------------------------------------------- rooms


class _Room:
    """A folder that one process has for itself while it lives. Making one removes those of processes that were killed.

    Attributes:
        folder: It.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        _remove_abandoned(parent)
        for _ in range(_ATTEMPTS):
            self.folder = parent / _HIDDEN / secrets.token_hex(8)
            # Another process may remove the hidden folder, as empty, or this one before it is locked, as abandoned.
            with contextlib.suppress(FileNotFoundError):
                self.folder.mkdir(parents=True)
                descriptor = os.open(self.folder, os.O_RDONLY)
                self._unlock = weakref.finalize(self, os.close, descriptor)
                if _lock(descriptor) is not False and _is_at(descriptor, self.folder):
                    return
                self._unlock()
        raise FileNotFoundError(f"{self.folder} is repeatedly removed by other processes")

    def leave(self) -> None:
        """Removes the room and what is in it, as far as possible. Further calls do nothing."""
        if self._unlock.alive:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._unlock()
            _tidy(self._parent)


def _lock(descriptor: int) -> bool | None:
    """Takes the lock of an open file until it is closed; False where another process has it, None where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Returns True if an open file is still the one with this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove_abandoned(parent: Path) -> None:
    """Removes the rooms of processes that are no more."""
    for folder in _entries(parent / _HIDDEN):
        if folder.name == _OLD:
            continue
        with contextlib.suppress(OSError):  # its owner was faster
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                is_free = _lock(descriptor)
                if is_free or (is_free is None and time.time() - folder.stat().st_mtime > _ROOM_SECONDS):
                    _delete(folder)
            finally:
                os.close(descriptor)


# ---------------------------------------------------------------------------------------------------- names


def _give_name(new: Path, path: Path) -> None:
    """Renames ``new``; what had the name is gone, or under the name of ``new``."""
    for attempt in range(_ATTEMPTS):
        try:
            if not os.path.lexists(path):
                new.rename(path)
            elif not _exchange(new, path):
                old = _set_aside(path)
                _delete(old)
                old.parent.mkdir(parents=True, exist_ok=True)
                path.rename(old)  # `recover` puts it back after a death right here
                new.rename(path)
                _delete(old)
            return
        except OSError:
            # Another process may have given or taken the name between the look at it and the call.
            if attempt == _ATTEMPTS - 1 or not os.path.lexists(new):
                raise


def _set_aside(path: Path) -> Path:
    return path.parent / _HIDDEN / _OLD / path.name


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _entries(folder: Path) -> list[Path]:
    """Lists a folder that another process may remove at any time; ``Path.glob`` checks first, and reads later.

    Nothing where it can be none, as a file is in its path: all ranks hear of that together, from the one that saves.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return [folder / entry.name for entry in entries]
    return []


def _tidy(parent: Path) -> None:
    """Removes the hidden folder once it is empty."""
    for folder in (parent / _HIDDEN / _OLD, parent / _HIDDEN):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step, by a call that Python does not offer; False where the system or the file system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):  # not on Linux
        return False
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)
