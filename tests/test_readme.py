"""README's claims are run: its Python blocks as a user would run them, its table as the command prints it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_fxpipe import __main__ as command_line
from lightning_fxpipe.strategy import strategy

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_ten_lines_run_as_a_script_on_two_processes(tmp_path: Path) -> None:
    script, planning = blocks("python")
    (tmp_path / "script.py").write_text(script)
    run = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "Pipeline of model" in run.stderr + run.stdout
    assert "`Trainer.fit` stopped: `max_epochs=4` reached." in run.stderr + run.stdout
    (tmp_path / "planning.py").write_text(f"from script import *\n{planning}")
    run = subprocess.run([sys.executable, "planning.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    assert (tmp_path / "plan.json").exists()


def test_the_table_is_what_the_command_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert command_line.main(["plan", "--config", "examples/configs/lm_fxpipe.yaml", "--num-stages", "3"]) == 0
    assert capsys.readouterr().out.strip() == blocks("text")[0].strip()


def test_every_option_is_in_the_table() -> None:
    import inspect

    documented = re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE)
    assert documented == list(inspect.signature(strategy.FxPipeStrategy).parameters)


def test_ci_runs_the_test_command() -> None:
    command = next(block for block in blocks("bash") if "pytest" in block).strip()
    install, test = command.split(" && ")
    script = (ROOT / ".ci" / "run").read_text()
    assert install.removeprefix("pip install ") in script.replace("pip install --quiet ", "pip install ").replace(
        "pip install ", ""
    )
    assert f"\n{test}\n" in script
