"""One HTML file that shows a page; it needs no network, and nothing beside it."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path
from string import Template

from lightning_fxpipe.pictures.page import Page
from lightning_fxpipe.pictures.page_data import data_of

# In this order: each uses names of those before it.
_SCRIPTS = (
    "elements",
    "units",
    "colours",
    "time_window",
    "model",
    "replicas",
    "schedules",
    "actions",
    "kept",
    "axes",
    "chart",
    "inputs",
    "main",
)
# What would end the element that the data is in, and what old browsers take for the end of a line.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def write_page(page: Page, path: str | Path) -> None:
    """Writes a page as a single HTML file.

    Args:
        page: What it shows.
        path: Where it is written.

    Raises:
        OSError: It cannot be written there.
    """
    Path(path).write_text(html_of(page), encoding="utf-8")


def html_of(page: Page) -> str:
    """The text of that file."""
    parts = files("lightning_fxpipe.pictures") / "page_parts"
    script = "\n".join((parts / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS)
    return Template((parts / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(page.title),
        style=(parts / "page.css").read_text(encoding="utf-8"),
        data=json_of(page),
        script=script,
    )


def json_of(page: Page) -> str:
    """The data of a page as JSON that is safe inside an HTML element, whatever modules are called."""
    return json.dumps(data_of(page), allow_nan=False, separators=(",", ":")).translate(_ESCAPES)
