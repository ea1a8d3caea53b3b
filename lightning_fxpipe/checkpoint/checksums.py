"""Checksums by which damage shows, and parts of different checkpoints in one place.

A folder of ours has a file with the CRC-32 of each value and of the files beside them. A file of ``torch.save`` is a zip
archive with a CRC-32 for each of its records, which torch writes and does not compare.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from lightning_fxpipe.checkpoint.damage import damage_error
from lightning_fxpipe.pytree.sizes import as_bytes

# In a folder, beside what torch and Lightning write.
CHECKSUMS_FILE = "checksums.json"
_CHUNK_BYTES = 1 << 20


def checksum(value: Tensor | bytes | memoryview) -> int:
    """The CRC-32 of a tensor's values, whatever its device and layout, or of bytes."""
    if isinstance(value, Tensor):
        value = as_bytes(value.detach().cpu().contiguous()).numpy().data
    return zlib.crc32(value)


@dataclass(frozen=True)
class Checksums:
    """Checksums of the values in a folder or in a safetensors file.

    Attributes:
        values: Of tensors, and of other values as they are written, by their keys.
        files: Of files with other things than values, by their names.
    """

    values: Mapping[str, int]
    files: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The contents of the file."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Checksums:
        """Inverse of :meth:`to_json`; raises ValueError, KeyError or TypeError for anything else."""
        found = json.loads(content)
        return cls(values=dict(found["values"]), files=dict(found["files"]))

    def check_value(self, where: str, key: str, value: Tensor | bytes | memoryview) -> None:
        """Raises :class:`FxPipeError` where a value is not the one that was written."""
        _compare(where, key, self.values.get(key), checksum(value))

    def check_file(self, where: str, path: Path) -> None:
        """Raises :class:`FxPipeError` where a file is not the one that was written."""
        found = 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                found = zlib.crc32(chunk, found)
        _compare(where, path.name, self.files.get(path.name), found)


def _compare(where: str, what: str, written: int | None, found: int) -> None:
    if written != found:
        expected = "none" if written is None else f"{written:08x}"
        observed = f"{what} has checksum {found:08x}, but {expected} was saved"
        raise damage_error(where, f"{observed}: the data is damaged or belongs to another checkpoint")


def check_archive(file: Path | IO[bytes], where: str, is_checked: Callable[[int], bool] = lambda number: True) -> None:
    """Compares what a file of ``torch.save`` holds with its checksums.

    Args:
        file: The file.
        where: Its name.
        is_checked: Says by its number whether a tensor is read; everything else always is.

    Raises:
        FxPipeError: Something is not as it was written.
    """
    with _opened_archive(file, where) as archive:
        for number, record in enumerate(archive.infolist() if _are_there(archive) else ()):
            if not _is_tensor(record.filename) or is_checked(number):
                with archive.open(record) as content:
                    while content.read(_CHUNK_BYTES):
                        pass


def has_checksums(path: Path) -> bool:
    """Returns True if :func:`check_archive` has anything to compare."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return _are_there(archive)


def _are_there(archive: zipfile.ZipFile) -> bool:
    """Not so where it was written with torch.serialization.set_crc32_options(False)."""
    return any(record.CRC for record in archive.infolist())


def names_in_archive(file: Path | IO[bytes], where: str) -> list[str]:
    """The records of a file of ``torch.save``."""
    with _opened_archive(file, where) as archive:
        return archive.namelist()


def _is_tensor(record: str) -> bool:
    """Archive/data/0, archive/data/1, ..."""
    return Path(record).parent.name == "data"


@contextmanager
def _opened_archive(file: Any, where: str) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, zlib.error) as error:
        raise damage_error(where, error) from error
