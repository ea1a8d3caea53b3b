"""Files that user code writes: which opens lead nowhere, and when ranks meet."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import tempfile
import threading
from contextlib import closing
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
    with writing(is_real=True, share=lambda value: met.append(path.read_text(errors="replace"))):
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


def test_files_below_open_lead_nowhere(tmp_path: Path) -> None:
    """``os.open``, and C that opens a database: its copy has what was there."""
    database = tmp_path / "rows.db"
    with closing(sqlite3.connect(database)) as real:
        real.execute("create table rows (row)")
    with writing(is_real=False):
        descriptor = os.open(tmp_path / "rows.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, b"row")
        os.close(descriptor)
        with closing(sqlite3.connect(database)) as copied:
            copied.execute("insert into rows values (1)")
            copied.commit()
            assert copied.execute("select * from rows").fetchall() == [(1,)]
    assert not (tmp_path / "rows.txt").exists()
    with closing(sqlite3.connect(database)) as real:
        assert real.execute("select * from rows").fetchall() == []


def test_folders_are_changed_once(tmp_path: Path) -> None:
    """The second rank would find nothing to rename, or a folder that is there already."""
    path = tmp_path / "rows.txt"
    shared: list[Any] = []
    path.write_text("row")
    for is_real in (False, True):
        with writing(is_real=is_real, share=shared.append):
            (tmp_path / "folder").mkdir()
            os.replace(path, tmp_path / "folder" / "moved.txt")
            shutil.rmtree(tmp_path / "folder")
        assert path.exists() is not is_real
        assert not (tmp_path / "folder").exists()
    assert shared == [None] * 12, "ranks meet before and after each change"


def test_folders_are_made_in_a_dry_run_inside_a_hook(tmp_path: Path) -> None:
    """The inner block asked what the outer one had put in place of ``os.mkdir`` for its name, which has none."""
    with writing(is_real=True), writing(is_real=False, share=lambda value: value):
        (tmp_path / "nowhere").mkdir()
        thread = threading.Thread(target=(tmp_path / "checkpoint").mkdir)
        thread.start()
        thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_every_rank_fails_where_one_rank_changes_a_folder_in_vain(tmp_path: Path) -> None:
    told: list[Any] = []
    with writing(is_real=True, share=lambda value: told.append(value) or value), pytest.raises(FileNotFoundError):
        os.remove(tmp_path / "missing")
    answers = iter(told)
    with writing(is_real=False, share=lambda _: next(answers)), pytest.raises(FileNotFoundError):
        os.remove(tmp_path / "missing")


def test_every_rank_has_temporary_files_of_its_own() -> None:
    """Their names are different on each rank, which reads what it has written."""
    temporary: set[str] = set()
    with writing(is_real=False, temporary=temporary), tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rows.txt").write_text("row")
        with writing(is_real=False, temporary=temporary):
            assert (Path(folder) / "rows.txt").read_text() == "row"
        with tempfile.NamedTemporaryFile("w") as file:
            Path(file.name).write_text("row")
            assert Path(file.name).read_text() == "row"
            beside = Path(f"{file.name}_rows.txt")
            beside.write_text("row")  # not temporary, though its path begins with one that is
            assert not beside.exists()
    assert not Path(folder).exists()


def test_a_log_file_from_before_gets_records_of_one_rank(tmp_path: Path) -> None:
    logger, path = logging.getLogger("test_files"), tmp_path / "log.txt"
    handler = logging.FileHandler(path)
    logger.addHandler(handler)
    try:
        with writing(is_real=False):
            logger.error("elsewhere")
        with writing(is_real=True):
            logger.error("here")
    finally:
        logger.removeHandler(handler)
        handler.close()
    assert path.read_text() == "here\n"


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
