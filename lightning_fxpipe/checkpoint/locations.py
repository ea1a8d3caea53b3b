"""Location of a checkpoint: a path on this machine, or a URL of any file system that fsspec knows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol

from lightning_fxpipe.checkpoint.atomic import replacing, synced_file
from lightning_fxpipe.errors import UnsupportedError


@dataclass(frozen=True, kw_only=True)
class Location:
    """A file or folder.

    Attributes:
        text: As the user wrote it.
        path: Of a file or folder of this machine; None for one elsewhere.
        options: For the file system that a URL names.
    """

    text: str
    path: Path | None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Location:
        """The location that a user names by a path or URL.

        Raises:
            ValueError: No file system is known for the URL.
            TypeError: There are options for a path of this machine.
        """
        text = os.fspath(path)
        system, inner = url_to_fs(text, **(options or {}))
        is_local = isinstance(system, LocalFileSystem)
        if is_local and options:
            raise TypeError(
                f"storage_options apply to URLs only, but {text} is a local path: {', '.join(options)} would have no effect."
            )
        return cls(text=text, path=Path(inner) if is_local else None, options=dict(options or {}))

    @property
    def system(self) -> Any:
        """The file system, for URLs."""
        return url_to_fs(self.text, **self.options)[0]

    def exists(self) -> bool:
        """Returns True if there is a file or folder."""
        return self.path.exists() if self.path is not None else bool(self.system.exists(self.text))

    @property
    def num_bytes(self) -> int | None:
        """Returns the size of a file; None if there is none."""
        try:
            return self.path.stat().st_size if self.path is not None else int(self.system.size(self.text))
        except FileNotFoundError:
            return None

    def version(self) -> str:
        """Returns a text that differs for a later file of the same name; the same on every machine that sees the file."""
        if self.path is None:
            return str(self.system.ukey(self.text))
        found = self.path.stat()
        return f"{found.st_size} bytes, written at {found.st_mtime_ns} ns"

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """The file, to be read."""
        with open(self.path, "rb") if self.path is not None else self.system.open(self.text, "rb") as file:
            yield file

    def inside(self, name: str) -> Location:
        """A file of this folder."""
        path = None if self.path is None else self.path / name
        return Location(text=f"{self.text.rstrip('/')}/{name}", path=path, options=self.options)

    def remove(self) -> None:
        """Removes the file or folder behind a URL, if there is one."""
        if self.system.exists(self.text):
            self.system.rm(self.text, recursive=True)

    @contextmanager
    def local_copy(self) -> Iterator[Path]:
        """The file on this machine. Of a file from elsewhere a copy, which is gone after the block but for what is open."""
        if self.path is not None:
            yield self.path
            return
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / Path(self.text).name
            self.system.get_file(self.text, str(copy))
            yield copy

    @contextmanager
    def writing(self) -> Iterator[IO[bytes]]:
        """A file that takes its place when the block has ended well; until then what was there stays.

        On a machine's own file system it is renamed; object stores show a file when it has been written to its end.
        """
        if self.path is None:
            system = self.system
            with system.transaction, system.open(self.text, "wb") as file:
                yield file
            return
        with replacing(self.path) as new, synced_file(new) as file:
            yield file


def check_seen_by_all(location: Location, num_ranks: int) -> None:
    """Raises :class:`UnsupportedError` for a file system that is in one process's memory."""
    if location.path is None and num_ranks > 1 and get_protocol(location.text) == "memory":
        raise UnsupportedError(
            "A memory:// checkpoint is visible to one process only, but the stages run in several processes.",
            where=location.text,
            expected="a folder or URL that all processes can access",
            todo="Save to a local path, a file:// URL or an object store.",
        )
