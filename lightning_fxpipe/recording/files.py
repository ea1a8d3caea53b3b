"""Files in the folder of a recording: the timelines, to be read again, and pictures of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fxpipe.simulation.actions import Action
from lightning_fxpipe.simulation.timeline import Span, Timeline

TIMELINES = "timelines.json"


def write_recording(
    timelines: Sequence[Timeline],
    folder: str | Path,
    *,
    clock_error_seconds: float = 0.0,
    pictures: Mapping[str, str] | None = None,
) -> None:
    """Writes a recording's files, each as a whole or not at all.

    Args:
        timelines: Measured or simulated, in the order in which they are shown.
        folder: Where to; it is made.
        clock_error_seconds: By how much the spans of a measured one's ranks may be shifted against each other.
        pictures: Contents of the files that show them, by name.

    Raises:
        OSError: The folder cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    raw = {"clock_error_seconds": clock_error_seconds, "timelines": [_as_json(timeline) for timeline in timelines]}
    for name, text in {TIMELINES: json.dumps(raw), **(pictures or {})}.items():
        part = folder / f".{name}.part"
        part.write_text(text, encoding="utf-8")
        os.replace(part, folder / name)


def read_recording(folder: str | Path) -> list[Timeline]:
    """The timelines of a recording: the measured steps in their order, and what the last of them would be when simulated."""
    raw = json.loads((Path(folder) / TIMELINES).read_text(encoding="utf-8"))
    return [_of_json(timeline) for timeline in raw["timelines"]]


def check_writable(folder: str | Path) -> str | None:
    """Why nothing can be written there; None where it can. The folder is made."""
    probe = Path(folder) / f".{TIMELINES}.part"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        return str(error)
    return None


def _as_json(timeline: Timeline) -> dict[str, Any]:
    ranks = [
        [
            {"action" if isinstance(s.work, Action) else "work": str(s.work), "seconds": [s.start_seconds, s.end_seconds]}
            for s in spans
        ]
        for spans in timeline.ranks
    ]
    return {"label": timeline.label, "ranks": ranks, "kept_bytes": timeline.kept_bytes}


def _of_json(raw: dict[str, Any]) -> Timeline:
    return Timeline(
        raw["label"],
        tuple(
            tuple(Span(Action.parse(s["action"]) if "action" in s else s["work"], *s["seconds"]) for s in spans)
            for spans in raw["ranks"]
        ),
        tuple(tuple((seconds, num_bytes) for seconds, num_bytes in rank) for rank in raw["kept_bytes"]),
    )
