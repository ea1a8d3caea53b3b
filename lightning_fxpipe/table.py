"""Rows of cells to an aligned text table, drawn by rich, the same in a terminal, a log file and a test."""

from __future__ import annotations

import io
from collections.abc import Sequence

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
    Console(file=out, width=120, color_system=None, markup=False, highlight=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def human_bytes(num_bytes: int) -> str:
    """``1536`` → ``"1.5 KiB"``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def human_count(count: int) -> str:
    """``1536000`` → ``"1.54 M"``."""
    for factor, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return str(count)
