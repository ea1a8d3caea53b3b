"""Files that user code writes: which opens lead nowhere, and when ranks meet."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fxpipe.user_code.files import lead_nowhere, writing


@pytest.mark.parametrize("mode", ["a", "w", "x", "ab"])
def test_what_is_written_elsewhere_goes_nowhere(tmp_path: Path, mode: str) -> None:
    """Also through pathlib; the rank that writes does, whichever rank comes first."""
    path = tmp_path / "rows.txt"
    with writing(is_real=False), path.open(mode) as file:
        file.write("row" if "b" not in mode else b"row")
    assert not path.exists()
    with writing(is_real=True), open(path, mode) as file:
        file.write("row" if "b" not in mode else b"row")
    assert path.read_text() == "row"


def test_a_file_that_is_read_and_written_is_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("one")
    with writing(is_real=False), open(path, "r+") as file:
        assert file.read() == "one"
        file.write("two")
        file.seek(0)
        assert file.read() == "onetwo"
    assert path.read_text() == "one"


def test_ranks_meet_before_a_file_is_written_and_before_it_is_read(tmp_path: Path) -> None:
    """Else a rank could read what another has written already, or not yet."""
    path, met = tmp_path / "rows.txt", []
    path.write_text("")
    with writing(is_real=True, meet=lambda: met.append(path.read_text(errors="replace"))):
        path.read_text()
        assert met == []
        path.write_text("row")
        path.read_text()
        torch.save("row", path)
        assert torch.load(path) == "row"
    assert met[:3] == ["", "row", "row"]
    assert len(met) == 4, "torch opens it, for user code"


def test_other_threads_and_code_that_is_not_the_users_write(tmp_path: Path) -> None:
    """A thread may write a checkpoint meanwhile, and a rank may save one in a hook."""
    files: list[Any] = []
    with writing(is_real=False) as block:
        thread = threading.Thread(target=lambda: (tmp_path / "thread").write_text("written"))
        thread.start()
        thread.join()
        block.is_active = False
        (tmp_path / "aside").write_text("written")
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["aside", "thread"]


class Holder:
    """Has opened a file before the run."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a")
        self.other = self


def test_files_from_before_the_run_lead_nowhere_on_other_ranks(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    holder = Holder(path)
    holder.file.write("before")
    lead_nowhere([holder])
    holder.file.write("after")
    holder.file.close()
    assert path.read_text() == "before"
