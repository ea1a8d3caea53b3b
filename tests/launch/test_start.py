"""Processes are started once; ``test_launching.py`` starts them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_fxpipe.launch import launching
from lightning_fxpipe.launch.launcher import Launcher


def test_processes_are_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Trainer of the process may have done so since this one was made."""
    monkeypatch.setattr(launching, "start_processes", lambda *_: ["a process"])
    for has_started, expected in ((False, ["a process"]), (True, [])):
        environment: Any = SimpleNamespace(creates_processes_externally=has_started)
        assert launching._start(environment, 2, 1) == expected


def test_a_second_run_starts_no_processes() -> None:
    started: list[int] = []

    def start() -> list[Any]:
        started.append(1)
        return []

    launcher = Launcher(start)
    assert [launcher.launch(lambda: run) for run in range(3)] == [0, 1, 2]
    assert started == [1]
