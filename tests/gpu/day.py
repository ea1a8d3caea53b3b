"""All that is to be shown on a lent GPU, in under eight minutes, as one table.

    python -m tests.gpu.day                       # on a machine with a CUDA device
    python -m tests.gpu.day --accelerator cpu     # the same programs on the CPU: whether the script itself is in order

Each part runs in a process of its own, and is killed at its limit; the others run all the same. The exit status is that of the
tests: figures fail nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One program of the day.

    Attributes:
        name: What it shows.
        command: Arguments of Python.
        limit_seconds: After which it is killed.
        is_test: Whether its failure is the day's.
    """

    name: str
    command: tuple[str, ...]
    limit_seconds: int
    is_test: bool = False


def parts(accelerator: str) -> list[Part]:
    """The parts of the day, those first that decide most."""
    on_gpu = accelerator == "gpu"
    pytest, marker = ("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"), ("-m", "gpu") if on_gpu else ("-m", "not gpu")
    few = () if on_gpu else ("--size", "tiny", "--steps", "2", "--warmup-steps", "1", "--counted-steps", "1")
    times = ("benchmarks/gpu_time.py", "--accelerator", accelerator, "--rounds", "1", *few)
    large = ("--compiled",) if on_gpu else ()
    tests = "tests/gpu/test_one_gpu.py" if on_gpu else "tests/schedules/test_stage_graph.py"
    return [
        Part(name="two ranks", command=(*pytest, *marker, "tests/gpu/test_two_devices.py"), limit_seconds=150, is_test=True),
        Part(name="one device", command=(*pytest, *marker, tests), limit_seconds=120, is_test=True),
        Part(name="times, large", command=(*times, *large), limit_seconds=130),
        Part(name="times, tiny", command=(*times, "--size", "tiny"), limit_seconds=60),
    ]


def run(part: Part) -> tuple[str, float, str]:
    """Runs a part; returns its outcome, its seconds, and what it has printed."""
    start = time.monotonic()
    command = ["timeout", "--kill-after=5", str(part.limit_seconds), sys.executable, *part.command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    outcome = {0: "passed", 5: "no test", 124: "too long", 137: "too long"}.get(done.returncode, "FAILED")
    shown = done.stdout if outcome == "passed" else done.stdout[-4000:] + done.stderr[-4000:]
    return outcome, time.monotonic() - start, shown


def main() -> int:
    """Runs the day; returns the exit status."""
    from lightning_fxpipe.reporting.table import render_table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu")
    rows, failed = [], False
    for part in parts(parser.parse_args().accelerator):
        print(f"{part.name} ...", file=sys.stderr, flush=True)
        outcome, seconds, shown = run(part)
        print(f"--- {part.name}: {outcome}\n{shown}", flush=True)
        last = next((line for line in reversed(shown.splitlines()) if line.strip()), "")
        rows.append((part.name, outcome, f"{seconds:.0f}", last if part.is_test else "table above"))
        failed |= part.is_test and outcome != "passed"
    print(render_table("The day", ("Part", "Outcome", "Seconds", "Last line"), rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
