"""What is told of that which takes long."""

from __future__ import annotations

import logging
import sys
import time

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_fxpipe.reporting import messages
from lightning_fxpipe.reporting.messages import telling, went_on


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors are written to a terminal."""
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda stream: True)


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything takes long enough for a bar."""
    monkeypatch.setattr(messages, "_LONG_SECONDS", 1e-9)
    monkeypatch.setattr(messages, "_REFRESH_SECONDS", 0.0)


def bar_of(capsys: pytest.CaptureFixture[str], num_steps: int = 3) -> str:
    """What ``telling`` writes besides its lines, which go to the logger."""
    with telling("Tracing the training step"):
        for _ in range(num_steps):
            went_on()
    return capsys.readouterr().err


@pytest.mark.usefixtures("long")
def test_one_line_says_what_takes_long_and_at_debug_how_long_it_took(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "lightning_fxpipe"), telling("Tracing the training step"):
        deadline = time.monotonic() + 10
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.001)
        assert caplog.messages == ["Tracing the training step …"]
    (took,) = caplog.messages[1:]
    assert took.startswith("Tracing the training step: 0.")
    assert [record.levelname for record in caplog.records] == ["INFO", "DEBUG"]


def test_nothing_is_said_of_what_is_over_at_once(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.INFO, "lightning_fxpipe"), telling("Tracing the training step"):
        went_on()
    assert caplog.messages == []
    assert capsys.readouterr().err == ""


def test_short_work_shows_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert bar_of(capsys) == ""


@pytest.mark.usefixtures("long")
def test_a_bar_shows_that_it_goes_on_where_it_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    shown = bar_of(capsys)
    assert "Tracing the training step: " in shown
    assert " modules" in shown
    assert shown.endswith("\r")  # and is gone afterwards


@pytest.mark.usefixtures("long")
def test_other_ranks_show_no_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)
    assert bar_of(capsys) == ""


@pytest.mark.usefixtures("long")
def test_a_log_file_gets_no_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of its steps would be another line there."""
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda stream: False)
    assert bar_of(capsys) == ""


def test_a_module_that_runs_at_another_time_moves_no_bar() -> None:
    went_on()
