"""The commands and the Python of docs/how-to/pictures.md make the files that it shows."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from lightning_fxpipe import __main__ as command_line

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]
PATH = ROOT / "docs" / "how-to" / "pictures.md"
PAGE = PATH.read_text(encoding="utf-8")
MOST_BYTES = 150_000


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_command_saves_its_three_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert command_line.main(shlex.split(blocks("bash")[0])[1:]) == 0
    assert capsys.readouterr().err.endswith("Saved to step.html\nSaved to step.png\nSaved to step.json\n")
    assert {path.name for path in tmp_path.iterdir()} == {"examples", "step.html", "step.png", "step.json"}


def test_the_python_saves_its_three_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks("python")[0], "docs/how-to/pictures.md", "exec"), {})
    assert {path.name for path in tmp_path.iterdir()} == {"steps.html", "steps.svg", "steps.json"}


def test_its_pictures_are_there_and_said_to_be_made_by_a_command() -> None:
    shown = re.findall(r"!\[.*?\]\((.*?)\)", PAGE)
    assert len(shown) == 2
    for name in shown:
        picture = (PATH.parent / name).resolve()
        assert 10_000 < picture.stat().st_size < MOST_BYTES
        assert picture.relative_to(ROOT.resolve()).as_posix() in blocks("bash")[1]
