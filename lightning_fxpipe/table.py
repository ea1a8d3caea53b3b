"""Rows of cells to an aligned text table, drawn by rich, the same in a terminal, a log file and a test."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


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
        rows: Cells of each row, as many as headers.
        right_aligned: Headers of the columns of numbers.
        caption: Lines below the table.
    """
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    for header in headers:
        justify = "right" if header in right_aligned else "left"
        table.add_column(header, justify=justify, overflow="fold", no_wrap=header in right_aligned)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    # A fixed width and no colour: ranks, logs and tests all see the same characters.
    console = Console(
        file=out, width=120, color_system=None, markup=False, highlight=False, emoji=False, legacy_windows=False, _environ={}
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def human_bytes(num_bytes: int) -> str:
    """``1536`` → ``"1.5 KiB"``."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    return _scaled(num_bytes, 1024, ("KiB", "MiB", "GiB", "TiB"), lambda value: f"{value:.1f}")


def human_count(count: int) -> str:
    """``1536000`` → ``"1.54 M"``."""
    if count < 1000:
        return str(count)
    return _scaled(count, 1000, ("K", "M", "B"), lambda value: f"{value:.3g}" if value < 999.5 else f"{value:.0f}")


def _scaled(count: int, factor: int, units: Sequence[str], text: Callable[[float], str]) -> str:
    """In the first unit in which the rounded number is below the next one."""
    value, unit = float(count), ""
    for unit in units:  # noqa: B007  (used after the loop)
        value /= factor
        if float(text(value)) < factor:
            break
    return f"{text(value)} {unit}"
