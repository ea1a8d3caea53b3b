"""What a rank does is noted from turn to turn: parts take their time away from the whole, waiting leaves gaps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
import torch

from lightning_fxpipe.recording import recorder as module
from lightning_fxpipe.recording.recorder import Recorder
from lightning_fxpipe.simulation.actions import BACKWARD, FORWARD, Action

CPU = torch.device("cpu")
F0, B0 = Action(0, FORWARD, 0), Action(0, BACKWARD, 0)


class Ticks:
    """A clock on which a second passes from mark to mark; in ``late`` ones the GPU has come to the mark before."""

    def __init__(self, late: Sequence[int] = ()) -> None:
        self._numbers, self._late = count(), late

    def begin(self) -> None: ...

    def mark(self) -> int:
        return next(self._numbers)

    def seconds(self, marks: Sequence[int]) -> list[float]:
        return [mark - 2.5 if mark in self._late else float(mark) for mark in marks]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(module, "clock_of", lambda device: Ticks())
    found = Recorder()
    found.begin(CPU)
    return found


def spans(recorder: Recorder) -> list[tuple[Any, float, float]]:
    return [(span.work, span.start_seconds, span.end_seconds) for span in recorder.end().spans]


def test_a_part_takes_its_time_away_from_the_whole(recorder: Recorder) -> None:
    with recorder.during("optimizer step"), recorder.during("training_step"):
        pass
    assert spans(recorder) == [("optimizer step", 0, 1), ("training_step", 1, 2), ("optimizer step", 2, 3)]


def test_waiting_leaves_a_gap_in_which_actions_are(recorder: Recorder) -> None:
    with recorder.during("backward"), recorder.waiting(), recorder.undivided(B0):
        pass
    assert spans(recorder) == [("backward", 0, 1), (B0, 2, 3), ("backward", 4, 5)]


def test_of_an_action_no_parts_are_noted(recorder: Recorder) -> None:
    with recorder.during("training_step"), recorder.undivided(F0):
        assert not recorder.is_in_step
        with recorder.during("backward"), recorder.waiting(), recorder.undivided(B0):
            pass
    assert spans(recorder) == [("training_step", 0, 1), (F0, 1, 2), ("training_step", 2, 3)]


def test_what_is_part_of_nothing_is_not_noted(recorder: Recorder) -> None:
    """As passes in evaluation, which no training step is around."""
    with recorder.waiting(), recorder.undivided(F0):
        pass
    assert spans(recorder) == []


def test_nothing_is_noted_before_and_after_a_step(recorder: Recorder) -> None:
    recorder.end()
    with recorder.during("training_step"), recorder.undivided(F0):
        pass
    assert not recorder.is_on
    assert spans(recorder) == []


def test_what_fails_ends_with_the_error(recorder: Recorder) -> None:
    with pytest.raises(KeyError), recorder.during("training_step"), recorder.undivided(F0):
        raise KeyError
    with recorder.during("training_step"):
        assert recorder.is_in_step
    assert spans(recorder) == [
        ("training_step", 0, 1),
        (F0, 1, 2),
        ("training_step", 2, 3),
        ("training_step", 4, 5),
    ]


def test_an_action_that_takes_no_time_is_there_and_other_work_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of several streams of a GPU may be out of order; nothing ends before it begins for that."""
    monkeypatch.setattr(module, "clock_of", lambda device: Ticks(late=(2, 4)))
    recorder = Recorder()
    recorder.begin(CPU)
    with recorder.during("a"), recorder.undivided(F0):
        pass
    with recorder.during("b"):
        pass
    assert spans(recorder) == [("a", 0, 1), (F0, 1, 1), ("a", 1, 3), ("b", 3, 5)]


def test_the_peak_is_that_of_the_process_on_a_cpu(recorder: Recorder) -> None:
    with recorder.during("training_step"):
        pass
    step = recorder.end()
    assert 2**26 < step.peak_bytes < 2**40
    assert step.kept_bytes == ()


def test_what_is_in_memory_is_noted_after_each_action(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = iter([70, 30])
    monkeypatch.setattr(module, "allocated_bytes", lambda device: next(allocated))
    with recorder.during("training_step"), recorder.waiting():
        for action in (F0, B0):
            with recorder.undivided(action):
                pass
    assert recorder.end().kept_bytes == ((3.0, 70), (5.0, 30))
