"""The output in docs/explanation/simulation.md is that of its commands and its Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_fxpipe import __main__ as command_line

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "explanation" / "simulation.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
    return str(found)


def test_the_table_is_what_the_command_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, *arguments = block("bash").split()
    assert program == "fxpipe"
    assert command_line.main(arguments) == 0
    assert capsys.readouterr().out.endswith(f"\n\n{block('text')}")


def test_the_file_of_a_device_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "device.yaml").write_text(block("yaml"))
    monkeypatch.chdir(ROOT)
    arguments = block("bash").split()[1:-1]
    assert command_line.main([*arguments, str(tmp_path / "device.yaml")]) == 0
    assert "Simulated step with 8 microbatches on 3 x device" in capsys.readouterr().out


def test_the_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block("python"), "docs/explanation/simulation.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["gpipe", "1f1b", "zb_h1", "zero_bubble"]
    seconds = [float(line.split()[1]) for line in lines[:4]]
    assert seconds == sorted(seconds, reverse=True)
