"""A recording's files hold what was recorded, and there is no half of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_fxpipe import Recording, read_recording
from lightning_fxpipe.recording import files
from lightning_fxpipe.recording.files import check_writable, write_recording
from lightning_fxpipe.simulation.actions import BACKWARD, FORWARD, Action
from lightning_fxpipe.simulation.timeline import Span, Timeline

TIMELINES = [
    Timeline(
        "step 3, measured",
        ((Span(Action(0, FORWARD, 1), 0.125, 0.5), Span("0F0", 0.5, 1.0)), (Span(Action(1, BACKWARD, 0), 0.25, 0.75),)),
        (((0.5, 10.0), (0.75, 4.0)), ()),
    ),
    Timeline("simulated", ((), ())),
]


def test_timelines_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_recording(TIMELINES, tmp_path / "new" / "folder", clock_error_seconds=0.5)
    assert read_recording(tmp_path / "new" / "folder") == TIMELINES
    assert json.loads((tmp_path / "new" / "folder" / "timelines.json").read_text())["clock_error_seconds"] == 0.5


def test_what_shows_them_lies_beside_them(tmp_path: Path) -> None:
    write_recording(TIMELINES, str(tmp_path), pictures={"index.html": "<p>here</p>"})
    assert (tmp_path / "index.html").read_text() == "<p>here</p>"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "timelines.json"]


def test_a_file_that_cannot_be_written_to_its_end_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recording(TIMELINES, tmp_path)

    def write_half(path: Path, text: str, **options: object) -> int:
        path.write_bytes(text.encode()[: len(text) // 2])
        raise OSError("no space left")

    monkeypatch.setattr(files.Path, "write_text", write_half)
    with pytest.raises(OSError, match="no space left"):
        write_recording(TIMELINES[:1], tmp_path)
    assert read_recording(tmp_path) == TIMELINES


def test_a_folder_is_made_and_left_empty_by_the_check(tmp_path: Path) -> None:
    assert check_writable(tmp_path / "a" / "b") is None
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").touch()
    assert "file" in (check_writable(tmp_path / "file" / "folder") or "")


def test_a_recording_says_which_steps() -> None:
    assert list(Recording("folder").steps) == [3, 4, 5, 6, 7]
    assert list(Recording("folder", first_step=0, num_steps=1).steps) == [0]
    assert Recording.of("folder") == Recording("folder")
    assert Recording.of(None) is None


@pytest.mark.parametrize("options", [{"first_step": -1}, {"num_steps": 0}])
def test_steps_that_are_none_are_a_value_error(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected a first step of 0 or more, and at least one step"):
        Recording("folder", **options)
