"""README's claims are run: its diff, its commands and its plan, and the script of the quick start."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_fxpipe import FxPipeStrategy
from lightning_fxpipe import __main__ as command_line

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICK_START = (ROOT / "docs" / "start" / "quickstart.md").read_text(encoding="utf-8")
MOST_LINES = 150
MOST_LINES_BEFORE_A_STEP = 25


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def test_the_diff_makes_a_trainer_with_a_pipeline() -> None:
    (diff,) = blocks("diff")
    names: dict[str, Any] = {}
    exec("import lightning as L\n" + "\n".join(line[1:] for line in diff.splitlines() if line.startswith("+")), names)
    assert isinstance(names["trainer"].strategy, FxPipeStrategy)
    assert names["trainer"].num_devices == 1  # one replica


def test_the_quick_start_runs_as_a_script_on_two_processes(tmp_path: Path) -> None:
    script, planning = blocks("python", QUICK_START)
    (tmp_path / "script.py").write_text(script)
    run = subprocess.run(
        [sys.executable, "-u", "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    before, _, after = run.stdout.partition("`Trainer.fit` stopped: `max_epochs=2` reached.")
    assert "`Trainer.fit` stopped: `max_epochs=4` reached." in after
    # All that is printed before the first step, by both processes, Lightning and fxpipe; a slow machine adds two lines.
    lines = [line for line in before.splitlines() if line.strip() and not line.startswith("Tracing the ")]
    assert len(lines) <= MOST_LINES_BEFORE_A_STEP, before
    plan = lines[lines.index("Pipeline of model") :]
    assert len(plan) <= 8
    assert "Schedule gpipe" in plan[-2]
    assert "rank 0: stage 1, rank 1: stage 0" in plan[-1]
    (tmp_path / "planning.py").write_text(f"from script import *\n{planning}")
    run = subprocess.run([sys.executable, "planning.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    assert (tmp_path / "plan.json").exists()


def test_its_plan_is_what_its_command_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands = [shlex.split(line, comments=True) for block in blocks("bash") for line in block.splitlines()]
    (arguments,) = (arguments for program, *arguments in commands if program == "fxpipe" and arguments[0] == "plan")
    assert command_line.main(arguments) == 0
    (plan,) = blocks("text")
    assert capsys.readouterr().out.strip() == plan.strip()


def test_its_options_are_options() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE))
    assert len(documented) == 6
    assert documented <= set(inspect.signature(FxPipeStrategy).parameters)


def test_its_links_lead_to_files() -> None:
    targets = {target.partition("#")[0] for target in re.findall(r"\]\(([^):]+)\)", README)}
    assert len(targets) > 15
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_ci_runs_the_test_command() -> None:
    command = next(block for block in blocks("bash") if "pytest" in block).strip()
    install, test = command.split(" && ")
    script = (ROOT / ".ci" / "run").read_text()
    assert install.removeprefix("pip install ") in script.replace("pip install --quiet ", "pip install ").replace(
        "pip install ", ""
    )
    assert f"\n{test}\n" in script
