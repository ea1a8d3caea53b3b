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
_LEAST_ROOM = 24  # for a column of text, such as the name of a schedule


def render_table(
    title: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right_aligned: Sequence[str] = (),
    caption: str | None = None,
) -> str:
    """Returns a plain-text table: 80 characters wide, or more if the numbers need it.

    Args:
        title: Line above the table.
        headers: One per column.
        rows: Cells of each row, as many as headers; of several lines if they have line breaks.
        right_aligned: Headers of the columns of numbers, which are never broken.
        caption: Lines below the table.
    """
    table, width = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, title_justify="left"), 1
    for index, header in enumerate(headers):
        is_number = header in right_aligned
        longest = max(len(line) for row in (headers, *rows) for line in row[index].split("\n"))
        width += _GAP + (longest if is_number else min(longest, _LEAST_ROOM))
        table.add_column(header, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    looks = {"color_system": None, "markup": False, "highlight": False, "emoji": False, "legacy_windows": False}
    Console(file=out, width=max(WIDTH, width), _environ={}, **looks).print(table)  # type: ignore[arg-type]
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    for paragraph in (caption or "").splitlines():
        lines += textwrap.wrap(paragraph, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).strip("\n")


def human_bytes(num_bytes: float) -> str:
    """``1536`` → ``"1.5 KiB"``."""
    if num_bytes < 1024:
        return f"{num_bytes:g} B"
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


def _scale(count: float, factor: int, units: Sequence[str], text: Callable[[float], str]) -> str:
    """In the first unit in which the rounded number is below the next one."""
    value, unit = float(count), ""
    for unit in units:  # noqa: B007  (used after the loop)
        value /= factor
        if float(text(value)) < factor:
            break
    return f"{text(value)} {unit}"
