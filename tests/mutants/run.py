"""Runs mutants: one change in a copy of the tree, and the tests that must fail.

The process imports torch and Lightning once and forks for each mutant, which then imports the changed package.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.table import MUTANTS

_PRELOADED = ("torch.distributed.checkpoint", "torch.distributed.pipelining", "lightning.pytorch", "torchmetrics", "hypothesis")
_OPTIONS = ("-x", "-q", "-n0", "-m", "", "-p", "no:cacheprovider", "--timeout=120", "--durations=0", "--no-header")
_LIMIT_SECONDS = 240.0
_PASSED, _FAILED, _TOO_LONG = 0, 1, -1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; fails where a mutant survives, or cannot be run."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="run each N-th mutant, beginning with the I-th")
    parser.add_argument("--only", default="", metavar="PATTERN", help="run those with this in their file or meaning")
    parser.add_argument("--unchanged", action="store_true", help="run the tests without a change: all must pass")
    options = parser.parse_args(arguments)
    index, count = map(int, options.shard.split("/"))
    chosen = [mutant for mutant in MUTANTS if options.only in str(mutant)][index - 1 :: count]
    for name in _PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__", "*.egg-info"))
        return _run_unchanged(copy, chosen) if options.unchanged else _run_all(copy, chosen)


def _run_unchanged(tree: Path, mutants: Iterable[Mutant]) -> int:
    tests = dict.fromkeys(test for mutant in mutants for test in mutant.node_ids())
    failing = [test for test in tests if _outcome(tree, [test])[0] != _PASSED]
    print(f"{len(failing)} of {len(tests)} tests fail without a change", *failing, sep="\n  ")
    return bool(failing)


def _run_all(tree: Path, mutants: Sequence[Mutant]) -> int:
    survivors, broken = [], []
    for number, mutant in enumerate(mutants, 1):
        began = time.monotonic()
        status, output = _run(tree, mutant)
        verdict = {_FAILED: "killed", _TOO_LONG: "killed", _PASSED: "SURVIVED"}.get(status, f"BROKEN ({status})")
        print(f"[{number}/{len(mutants)}] {verdict} in {time.monotonic() - began:.0f} s: {mutant}", flush=True)
        if verdict != "killed":
            (survivors if status == _PASSED else broken).append(mutant)
            print(output[-1500:] if status != _PASSED else "", flush=True)
    num_killed = len(mutants) - len(survivors) - len(broken)
    print(f"{num_killed} of {len(mutants)} killed ({num_killed / max(len(mutants), 1):.1%})")
    for kind, found in (("survived", survivors), ("broken", broken)):
        print(*(f"{kind}: {mutant}" for mutant in found), sep="\n")
    return bool(survivors or broken)


def _run(tree: Path, mutant: Mutant) -> tuple[int, str]:
    path = tree / "lightning_fxpipe" / mutant.file
    before, tests = path.read_text(encoding="utf-8"), mutant.node_ids()
    try:
        _write(path, mutant.applied(tree))
        return _outcome(tree, tests)
    finally:
        _write(path, before)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    # Python takes a file of the same size and second for the one that it has compiled.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _outcome(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """pytest's exit status, ``_TOO_LONG`` where it did not end; and what it printed."""
    with tempfile.TemporaryFile() as log:
        pid = os.fork()
        if pid == 0:
            _run_pytest(tree, tests, log.fileno())
        status = _wait(pid, _LIMIT_SECONDS)
        log.seek(0)
        return status, log.read().decode(errors="replace")


def _wait(pid: int, seconds: float) -> int:
    """The status of a process; ends it, and what it has started, at the latest after some seconds."""
    deadline = time.monotonic() + seconds
    status = None
    while status is None and time.monotonic() < deadline:
        time.sleep(0.05)
        done, found = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(found) if done else None
    with suppress(ProcessLookupError):  # nothing is left of it
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return _TOO_LONG if status is None or status < 0 else status


def _run_pytest(tree: Path, tests: Sequence[str], log: int) -> None:
    """In the forked process: runs the tests of the copy, and ends the process."""
    status = 70
    try:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "lightning_fxpipe")]:
            del sys.modules[name]
        status = int(pytest.main([*_OPTIONS, *tests]))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
