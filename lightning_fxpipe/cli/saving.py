"""Files that commands write besides what they print."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_fxpipe.errors import FxPipeError


@dataclass(frozen=True)
class Wanted:
    """A file that an option asks for.

    Attributes:
        option: Such as ``--output``.
        path: Where; None where it is not asked for.
        write: Writes it.
    """

    option: str
    path: Path | None
    write: Callable[[Path], None]


def save(*files: Wanted) -> None:
    """Writes the files that are asked for, and says so.

    Raises:
        FxPipeError: Nothing can be written at a path.
    """
    before = "\n"  # between what was printed and the first
    for file in files:
        if file.path is None:
            continue
        try:
            file.write(file.path)
        except OSError as error:
            raise FxPipeError(
                f"Cannot save what {file.option} asks for.",
                where=str(file.path),
                observed=str(error),
                todo=f"Give {file.option} a path in a folder that exists and can be written.",
            ) from error
        print(f"{before}Saved to {file.path}")
        before = ""
