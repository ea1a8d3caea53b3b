"""Files of ``torch.save``, read with care: only trusted code runs, and damage is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from lightning_fxpipe._compat.checkpoints import NamesOnly
from lightning_fxpipe.checkpoint.checksums import check_archive, names_in_archive
from lightning_fxpipe.checkpoint.damage import damage_error, damage_told, unknown_error
from lightning_fxpipe.errors import FxPipeError

_PICKLE_START = b"\x80"


def _all(number: int) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a checkpoint is read.

    Attributes:
        weights_only: For ``torch.load``. None is torch's default, by which unknown classes are an error.
        names_only: Whether it is only looked at: objects of unknown classes become stand-ins, and no code of theirs runs.
        is_checked: Says by its number in a single file whether a tensor is compared with its checksum; ranks share the work.
    """

    weights_only: bool | None = None
    names_only: bool = False
    is_checked: Callable[[int], bool] = _all


def unpickled(file: Path | IO[bytes], where: str, reading: Reading) -> Any:
    """Reads a file of ``torch.save``; its tensors are mapped from the file if that has a path.

    Raises:
        FxPipeError: It is damaged, or nothing of torch's.
        pickle.UnpicklingError: It holds objects of classes that are not known to be harmless.
    """
    with damage_told(where):
        start = _start_of(file)
        is_archive = start == b"PK"
        if is_archive:
            check_archive(file, where, reading.is_checked)
            _refuse_program(file, where)
        elif start[:1] != _PICKLE_START:
            raise unknown_error(where, f"a file that begins with {start!r}") if start else damage_error(where, "it is empty")
        weights_only, module = (False, NamesOnly) if reading.names_only else (reading.weights_only, None)
        if not isinstance(file, Path):
            file.seek(0)
        # torch's format from before 1.6 cannot be mapped.
        is_mapped = is_archive and isinstance(file, Path)
        return torch.load(file, "cpu", module, weights_only=weights_only, mmap=is_mapped)


def _start_of(file: Path | IO[bytes]) -> bytes:
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return opened.read(2)
    return file.read(2)


def _refuse_program(file: Path | IO[bytes], where: str) -> None:
    """TorchScript has the same kind of file: ``torch.load`` would make its code, and could run it."""
    if any(Path(name).name == "constants.pkl" for name in names_in_archive(file, where)):
        raise FxPipeError(
            "The file is a TorchScript program, not a checkpoint.",
            where=where,
            expected="a file written by torch.save",
            todo="If you trust the file, load it with torch.jit.load and save its state_dict().",
        )
