"""Runs the tests of ``tests/core.txt`` with other versions than those of ``constraints.txt``, in environments of their own.

One environment a day: every other day the newest torch that ``pyproject.toml`` allows; between, in turn, its oldest torch,
Lightning and torchmetrics, a torch between, or another Python. An environment is kept, and made anew when what it is made from
has changed.

    python .ci/versions.py [--seconds N] [name ...]

runs those named instead (``newest``, ``oldest``, ``python3.12``, ...). With ``--seconds``, none begins unless it could end by
then, and tests that have not ended are stopped, and said to be NOT FINISHED. What cannot be installed, for want of a network or
a disk, is said to be NOT RUN and fails nothing, but for those named.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST_LIMIT_SECONDS = 1800
LEAST_SECONDS = 300  # in which the tests can end, on two cores
TIMED_OUT = (124, 137)  # exit statuses of `timeout`
CONSTRAINTS = ROOT / "constraints.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@dataclass(frozen=True, kw_only=True)
class Versions:
    """What one environment has.

    Attributes:
        name: By which it is chosen, and its folder is called.
        python: Version of the interpreter, ``3.12``; that of this process if empty.
        requirements: Taken instead of what ``constraints.txt`` pins for the same packages.
    """

    name: str
    python: str = ""
    requirements: tuple[str, ...] = ()


def oldest() -> Iterator[str]:
    """The oldest versions that ``pyproject.toml`` allows."""
    for requirement in PROJECT["dependencies"]:
        if found := re.match(r"(torch|lightning|torchmetrics)>=([\d.]+)", requirement):
            yield f"{found[1]}=={found[2]}"
            if found[1] == "lightning":  # which takes any of the other package
                yield f"pytorch-lightning=={found[2]}"


# A file of its own, with a least version: where there is none so new to install, nothing older shall be tested under its name.
NEWEST_TORCH = (ROOT / ".ci" / "newest.txt").read_text(encoding="utf-8").splitlines()[-1]
NEWEST = Versions(name="newest", requirements=(NEWEST_TORCH,))
OTHERS = (
    Versions(name="oldest", requirements=tuple(oldest())),
    Versions(name="python3.12", python="3.12"),
    Versions(name="torch2.14", requirements=("torch==2.14.*",)),
    Versions(name="python3.13", python="3.13", requirements=(NEWEST_TORCH,)),
    *(Versions(name=f"torch{version}", requirements=(f"torch=={version}.*",)) for version in ("2.12", "2.11", "2.10")),
)


def interpreter(version: str) -> str | None:
    """An interpreter of this version that runs: on the path, or one of pyenv's."""
    if not version:
        return sys.executable
    pyenv = os.environ.get("PYENV_ROOT", str(Path.home() / ".pyenv"))
    found = [shutil.which(f"python{version}"), *sorted(glob.glob(f"{pyenv}/versions/{version}.*/bin/python"))]
    question = "import ensurepip, ssl, sys, venv; print('%d.%d' % sys.version_info[:2])"
    for path in filter(None, found):
        answer = subprocess.run([path, "-c", question], capture_output=True, text=True, check=False)
        if answer.stdout.strip() == version:
            return path
    return None


def constraints_without(requirements: tuple[str, ...]) -> Iterator[str]:
    """The pinned versions, but for those of packages that are required otherwise."""
    others = {re.split(r"[=<>!~\[ ]", requirement)[0] for requirement in requirements}
    for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines():
        if line.partition("==")[0] not in others:
            yield line


def environment(versions: Versions, python: str) -> Path:
    """Makes the environment, unless it is there; returns its interpreter."""
    folder = ROOT / f".venv-ci-{versions.name}"
    constraints = "\n".join(constraints_without(versions.requirements)) + "\n"
    # The newest torch is looked up anew each week.
    week = date.today().isocalendar()[:2] if NEWEST_TORCH in versions.requirements else ()
    made_from = repr((python, versions.requirements, constraints, PROJECT, week))
    stamp = hashlib.sha256(made_from.encode()).hexdigest()
    if not (folder / "stamp").exists() or (folder / "stamp").read_text() != stamp:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        (folder / "constraints.txt").write_text(constraints, encoding="utf-8")
        install = [folder / "bin/python", "-m", "pip", "install", "--quiet", "-c", folder / "constraints.txt"]
        subprocess.run([*install, "-e", ".[test]", *versions.requirements], cwd=ROOT, check=True)
        (folder / "stamp").write_text(stamp)
    return folder / "bin/python"


def run(versions: Versions, *, must: bool, seconds: float) -> bool:
    """Whether the tests pass; also where the machine has no such interpreter or cannot install it, which is printed.

    Args:
        versions: What to run.
        must: Whether it fails where it cannot be installed.
        seconds: How long it may take; the first failure ends tests whose time is limited.
    """
    start = time.monotonic()
    python = interpreter(versions.python)
    if python is None:
        print(f"[versions] {versions.name}: no Python {versions.python} on this machine", flush=True)
        return True
    try:
        executable = environment(versions, python)
    except subprocess.CalledProcessError:
        print(f"[versions] {versions.name}: NOT RUN, pip could not install it", flush=True)
        return not must
    installed = time.monotonic() - start
    what = "import lightning, sys, torch, torchmetrics as t; print(sys.version.split()[0], 'torch', torch.__version__, "
    what += "'Lightning', lightning.__version__, 'torchmetrics', t.__version__)"
    shown = subprocess.run([executable, "-c", what], capture_output=True, text=True, check=True).stdout.strip()
    print(f"[versions] {versions.name}: Python {shown}; installed in {installed:.0f} s", flush=True)
    is_limited = seconds - installed < TEST_LIMIT_SECONDS
    limit = max(1, int(seconds - installed)) if is_limited else TEST_LIMIT_SECONDS
    tests = ["-m", "pytest", "-q", "@tests/core.txt", *(["-x"] if is_limited else [])]
    command = ["timeout", "--kill-after=10", str(limit), executable, *tests]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    outcome = "passed" if status == 0 else "NOT FINISHED" if is_limited and status in TIMED_OUT else "FAILED"
    print(f"[versions] {versions.name}: {outcome} after {time.monotonic() - start:.0f} s", flush=True)
    return outcome != "FAILED"


def main() -> int:
    """Runs what is asked for; the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    known = {versions.name: versions for versions in (NEWEST, *OTHERS)}
    pair, is_between = divmod(date.today().toordinal(), 2)
    chosen = [known[name] for name in arguments.names] or [OTHERS[pair % len(OTHERS)] if is_between else NEWEST]
    print(f"[versions] chosen: {', '.join(versions.name for versions in chosen)}", flush=True)
    start, num_failed = time.monotonic(), 0
    for versions in chosen:
        left = arguments.seconds - (time.monotonic() - start)
        if left >= LEAST_SECONDS:
            num_failed += not run(versions, must=bool(arguments.names), seconds=left)
        else:
            print(f"[versions] {versions.name}: NOT RUN, {max(0, left):.0f} s are left", flush=True)
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
