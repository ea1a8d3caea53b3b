"""Whatever moment a process is killed at, a checkpoint's name leads to the old one or the new one, whole."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_fxpipe.checkpoint import atomic


class Killed(BaseException):
    """Stands for SIGKILL: no code of ours runs after it."""


def write(folder: Path, text: str) -> None:
    folder.mkdir()
    for name in ("one", "two"):
        (folder / name).write_text(text)


def read(path: Path) -> set[str]:
    return {(path / name).read_text() for name in ("one", "two")}


def killed_at(call: int, monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> bool:
    """Does ``action`` until its ``call``-th call that changes the file system; False where it has fewer."""
    count = 0

    def counted(original: Any) -> Any:
        def changes(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                raise Killed
            return original(*args, **kwargs)

        return changes

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "rmdir", "unlink", "symlink", "mkdir", "fsync"):
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(atomic, "_exchange", counted(atomic._exchange))
        try:
            action()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("kind", ["nothing", "folder", "file", "link"])
def test_a_name_is_never_without_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    call, was_killed = 0, True
    while was_killed:
        call += 1
        parent = tmp_path / f"{call}"
        parent.mkdir()
        path = parent / "last.ckpt"
        if kind == "folder":
            write(path, "old")
        elif kind == "file":
            path.write_text("old")
        elif kind == "link":
            write(parent / "other.ckpt", "old")
            path.symlink_to("other.ckpt")

        def save(text: str, path: Path = path) -> None:
            replacement = atomic.Replacement(path)
            write(replacement.new, text)
            replacement.finish()

        was_killed = killed_at(call, monkeypatch, lambda save=save: save("new"))  # type: ignore[misc]
        atomic.recover_all(parent)
        found = None if not os.path.lexists(path) else {path.read_text()} if path.is_file() else read(path)
        allowed = [{"new"}, None if kind == "nothing" else {"old"}]
        assert found in (allowed if was_killed else allowed[:1]), f"call {call}"
        assert not [p.name for p in parent.iterdir() if re.match(r"last|.*hpc_ckpt_", p.name) and p != path]
        # The next save of the name goes well, and leaves nothing behind.
        save("newer")
        assert read(path) == {"newer"}
        assert {p.name for p in parent.iterdir()} == {"last.ckpt", *(["other.ckpt"] if kind == "link" else [])}
        if kind == "link":
            assert read(parent / "other.ckpt") == {"old"}
    assert call > 3


def test_a_removed_folder_is_gone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, was_killed = 0, True
    while was_killed:
        call += 1
        path = tmp_path / "epoch=0.ckpt"
        shutil.rmtree(path, ignore_errors=True)
        write(path, "old")
        was_killed = killed_at(call, monkeypatch, lambda: atomic.remove(path))
        atomic.recover_all(tmp_path)
        assert not path.exists() or (was_killed and read(path) == {"old"})
    assert not os.path.lexists(path)
    assert list(tmp_path.iterdir()) == []


def test_a_link_leads_somewhere_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one.ckpt", "two.ckpt"):
        write(tmp_path / name, name)
    path = tmp_path / "last.ckpt"
    path.symlink_to("one.ckpt")
    call, was_killed = 0, True
    while was_killed:
        call += 1
        was_killed = killed_at(call, monkeypatch, lambda: atomic.link(tmp_path / "two.ckpt", path))
        assert read(path) in ({"one.ckpt"}, {"two.ckpt"})
    assert os.readlink(path) == "two.ckpt"
    assert atomic.is_linked(tmp_path / "two.ckpt")
    assert not atomic.is_linked(tmp_path / "one.ckpt")
    assert {p.name for p in tmp_path.iterdir()} == {"one.ckpt", "two.ckpt", "last.ckpt"}


def test_what_was_not_finished_is_removed_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write(path, "old")
    replacement = atomic.Replacement(path)
    write(replacement.new, "half")
    replacement.cancel()
    assert read(path) == {"old"}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_two_runs_that_save_one_name_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    """They wrote into one folder, each its own parts, and the name led to some of both."""
    if not can_exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    path = tmp_path / "last.ckpt"
    one, other = atomic.Replacement(path), atomic.Replacement(path)
    write(one.new, "one")
    write(other.new, "other")
    assert read(one.new) == {"one"}
    one.finish()
    assert read(path) == {"one"}
    other.finish()
    assert read(path) == {"other"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_name_that_another_run_gives_and_takes_meanwhile_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    rename = os.rename
    steps = iter(["give", "take", "give", "go"])

    def disturbed(source: Any, target: Any) -> None:
        step = next(steps, "go")
        if step == "give" and not path.exists():
            write(path, "of another run")
        elif step == "take" and path.exists():
            shutil.rmtree(path)
        rename(source, target)

    replacement = atomic.Replacement(path)
    write(replacement.new, "new")
    monkeypatch.setattr(os, "rename", disturbed)
    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    replacement.finish()
    assert read(path) == {"new"}


def test_the_hidden_folder_may_be_gone_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run that has saved removes it as empty, after this one has seen it."""
    (tmp_path / ".unfinished").mkdir()
    read = os.scandir

    def removed_and_read(folder: Path) -> Any:
        if folder == tmp_path / ".unfinished":
            folder.rmdir()
        return read(folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", removed_and_read)
        with atomic.replacing(tmp_path / "last.ckpt") as new:
            new.write_text("whole")
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_file_where_a_folder_should_be_has_nothing_to_recover(tmp_path: Path) -> None:
    """Ranks look before they start: one that raised there would leave the others waiting."""
    (tmp_path / "place").write_text("a file")
    atomic.recover_all(tmp_path / "place")


def test_the_room_of_a_process_that_was_killed_is_removed_and_of_no_other(tmp_path: Path) -> None:
    living, dead = atomic.Replacement(tmp_path / "living.ckpt"), atomic.Replacement(tmp_path / "dead.ckpt")
    for replacement in (living, dead):
        write(replacement.new, "half")
    room = dead.new.parent
    long_ago = time.time() - 25 * 60 * 60
    os.utime(living.new.parent, (long_ago, long_ago))  # it writes for very long
    del replacement, dead  # the system takes the locks of a dead process, as it closes its files
    with atomic.replacing(tmp_path / "third.ckpt") as new:
        write(new, "third")
    assert not room.exists()
    living.finish()
    assert {p.name for p in tmp_path.iterdir()} == {"living.ckpt", "third.ckpt"}


def test_without_locks_a_room_is_nobodys_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "_lock", lambda descriptor: None)
    young, old = atomic.Replacement(tmp_path / "young.ckpt"), atomic.Replacement(tmp_path / "old.ckpt")
    long_ago = time.time() - 25 * 60 * 60
    os.utime(old.new.parent, (long_ago, long_ago))
    with atomic.replacing(tmp_path / "third.ckpt") as new:
        write(new, "third")
    assert young.new.parent.exists()
    assert not old.new.parent.exists()


def test_names_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250 + ".ckpt")
    for text in ("old", "new"):
        with atomic.replacing(path) as new:
            write(new, text)
    assert read(path) == {"new"}
    atomic.link(path, tmp_path / ("l" * 250 + ".ckpt"))
    atomic.remove(path)
    assert not path.exists()


def test_a_checkpoint_has_its_name_when_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    path = tmp_path / "last.ckpt"

    def fsync(descriptor: int) -> None:
        synced.append(f"{Path(os.readlink(f'/proc/self/fd/{descriptor}')).name} {path.exists()}")

    monkeypatch.setattr(os, "fsync", fsync)
    with atomic.replacing(path) as new:
        new.mkdir()
        with atomic.synced_file(new / "one") as file:
            file.write(b"x")
    # What is in the folder, the folder's own entries, and then the entry of its name.
    assert synced == ["one False", "last.ckpt False", f"{tmp_path.name} True"]
