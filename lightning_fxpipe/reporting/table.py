"""Rows of cells to an aligned text table, drawn by rich, the same in a terminal, a log file and a test."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 80
_GAP = 3  # spaces between columns
_LEAST_ROOM = 12


def render_table(
    title: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right_aligned: Sequence[str] = (),
    caption: str | None = None,
) -> str:
    """Returns a plain-text table.

    Args:
        title: Line above the table.
        headers: One per column.
        rows: Cells of each row, as many as headers; of several lines where they have line breaks.
        right_aligned: Headers of the columns of numbers.
        caption: Lines below the table.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for header in headers:
        is_number = header in right_aligned
        table.add_column(header, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
    rooms = _rooms(headers, rows, right_aligned)
    for row in rows:
        table.add_row(*(_broken_at_dots(cell, room) for cell, room in zip(row, rooms, strict=True)))
    out = io.StringIO()
    # A fixed width and no colour: ranks, logs and tests all see the same characters, on the narrowest terminal that is usual.
    width = max(WIDTH, _width(rooms))
    console = Console(
        file=out, width=width, color_system=None, markup=False, highlight=False, emoji=False, legacy_windows=False, _environ={}
    )
    console.print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    for paragraph in (caption or "").splitlines():
        lines += textwrap.wrap(paragraph, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).strip("\n")


def _rooms(headers: Sequence[str], rows: Sequence[Sequence[str]], right_aligned: Sequence[str]) -> list[int]:
    """Widths of the columns: the widest texts give way until the table fits; numbers are never cut off."""
    rooms = [len(header) for header in headers]
    for row in rows:
        rooms = [max(room, *map(len, cell.split("\n"))) for room, cell in zip(rooms, row, strict=True)]
    texts = [index for index, header in enumerate(headers) if header not in right_aligned]
    while texts and _width(rooms) > WIDTH and max(rooms[index] for index in texts) > _LEAST_ROOM:
        rooms[max(texts, key=rooms.__getitem__)] -= 1
    return rooms


def _width(rooms: Sequence[int]) -> int:
    return 1 + sum(rooms) + _GAP * len(rooms)


def _broken_at_dots(text: str, room: int) -> str:
    """A name that is too long for its column goes on in the next line after a dot, not in the middle of a word."""
    lines = []
    for line in text.split("\n"):
        while len(line) > room and "." in line[:room]:
            end = line.rindex(".", 0, room) + 1
            lines.append(line[:end])
            line = f"  {line[end:]}"
        lines.append(line)
    return "\n".join(lines)


def human_bytes(num_bytes: int) -> str:
    """``1536`` → ``"1.5 KiB"``."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    return _scale(num_bytes, 1024, ("KiB", "MiB", "GiB", "TiB"), lambda value: f"{value:.1f}")


def human_count(count: int) -> str:
    """``1536000`` → ``"1.54 M"``."""
    if count < 1000:
        return str(count)
    return _scale(count, 1000, ("K", "M", "B"), lambda value: f"{value:.3g}" if value < 999.5 else f"{value:.0f}")


def human_seconds(seconds: float) -> str:
    """``0.0123`` → ``"12.3 ms"``."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 0.9995:
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 999.5 else f"{seconds * factor:.0f} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _scale(count: int, factor: int, units: Sequence[str], text: Callable[[float], str]) -> str:
    """In the first unit in which the rounded number is below the next one."""
    value, unit = float(count), ""
    for unit in units:  # noqa: B007  (used after the loop)
        value /= factor
        if float(text(value)) < factor:
            break
    return f"{text(value)} {unit}"
