"""A trace is what ui.perfetto.dev takes: complete events in microseconds, named processes and threads, counters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_fxpipe.pictures.chrome_trace import trace_of, write_trace
from tests.pictures.examples import measured, timeline


def events(trace: dict[str, Any], phase: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of a phase that have these values."""
    return [e for e in trace["traceEvents"] if e["ph"] == phase and all(e[key] == value for key, value in fields.items())]


def test_each_action_is_a_complete_event_in_microseconds(tmp_path: Path) -> None:
    found = timeline("zb_h1", 3, 6)
    write_trace([found], tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    for rank, spans in enumerate(found.ranks):
        complete = events(trace, "X", pid=0, tid=rank)
        assert [event["name"] for event in complete] == [str(span.work) for span in spans]
        assert [event["ts"] for event in complete] == pytest.approx([span.start_seconds * 1e6 for span in spans])
        assert [event["dur"] for event in complete] == pytest.approx([span.seconds * 1e6 for span in spans])
    first = events(trace, "X", name="2W5")[0]
    assert first["args"] == {"kind": "weight backward", "stage": 2, "microbatch": 5}


def test_each_timeline_is_a_process_and_each_rank_a_thread() -> None:
    found = timeline()
    trace = trace_of([found, measured(found)])
    processes = {event["pid"]: event["args"]["name"] for event in events(trace, "M", name="process_name")}
    assert processes == {0: "1f1b, simulated", 1: "measured"}
    threads = [(event["pid"], event["tid"], event["args"]["name"]) for event in events(trace, "M", name="thread_name")]
    assert threads == [(pid, place, f"rank {1 - place}") for pid in (0, 1) for place in (0, 1)]
    (last,) = events(trace, "X", name="optimizer step", tid=0)
    assert (last["pid"], last["cat"], last["args"]) == (1, "other work", {"kind": "other work"})


def test_what_is_kept_is_a_counter_of_each_rank() -> None:
    found = timeline()
    trace = trace_of([found, measured(found)])
    for number, kept in zip((1, 0), found.kept_bytes, strict=True):  # rank 0 holds the last stage
        counters = events(trace, "C", pid=0, name=f"memory in use on rank {number}")
        assert [event["ts"] for event in counters] == pytest.approx([seconds * 1e6 for seconds, _ in kept])
        assert [event["args"]["bytes"] for event in counters] == [num_bytes for _, num_bytes in kept]
    assert events(trace, "C", pid=1) == []
