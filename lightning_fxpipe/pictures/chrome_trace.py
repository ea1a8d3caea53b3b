"""Timelines as a trace in Chrome's format, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_fxpipe.pictures.looks import LOOKS, OTHER
from lightning_fxpipe.simulation.timeline import Span, Timeline

_MICROSECONDS = 1e6  # in a second


def write_trace(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Writes timelines as a trace: a process for each, a thread for each rank, and a counter of what the rank keeps.

    Args:
        timelines: What is written.
        path: Where.

    Raises:
        OSError: It cannot be written there.
    """
    Path(path).write_text(json.dumps(trace_of(timelines), allow_nan=False), encoding="utf-8")


def trace_of(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The contents of that file."""
    events = [event for process, timeline in enumerate(timelines) for event in _events(process, timeline)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(process: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _named("process", process, 0, timeline.label)
    numbers = timeline.rank_numbers
    for rank, spans in enumerate(timeline.ranks):
        yield _named("thread", process, rank, f"rank {numbers[rank]}")
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": rank, "args": {"sort_index": rank}}
        yield from (_complete(process, rank, span) for span in spans)
    for rank, kept in enumerate(timeline.kept_bytes):
        for seconds, num_bytes in kept:
            yield {
                "ph": "C",
                "name": f"memory in use on rank {numbers[rank]}",
                "pid": process,
                "ts": seconds * _MICROSECONDS,
                "args": {"bytes": round(num_bytes)},
            }


def _named(what: str, process: int, rank: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": rank, "args": {"name": name}}


def _complete(process: int, rank: int, span: Span) -> dict[str, Any]:
    work = span.work
    kind = OTHER.words if isinstance(work, str) else LOOKS[work.kind].words
    of_action = {} if isinstance(work, str) else {"stage": work.stage, "microbatch": work.microbatch}
    return {
        "ph": "X",
        "name": str(work),
        "cat": kind,
        "pid": process,
        "tid": rank,
        "ts": span.start_seconds * _MICROSECONDS,
        "dur": span.seconds * _MICROSECONDS,
        "args": {"kind": kind, **of_action},
    }
