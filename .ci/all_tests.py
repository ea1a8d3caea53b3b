"""Runs every test, in parts: those marked ``slow``, too, which the suite leaves out.

    python .ci/all_tests.py [--shards N] [I ...]

runs the parts named, or all, one after the other, and says at the end which have failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 3600


def passes(shard: str) -> bool:
    """Whether a part's tests pass, in time."""
    start = time.monotonic()
    limit = ["timeout", "--kill-after=10", str(LIMIT_SECONDS)]
    command = [*limit, sys.executable, "-m", "pytest", "-q", "-m", "", "--shard", shard]
    # Properties are tried with more examples then, and others each time.
    environment = {**os.environ, "FXPIPE_ALL_TESTS": "1"}
    is_good = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0
    print(f"[all] part {shard}: {'passed' if is_good else 'FAILED'} after {time.monotonic() - start:.0f} s", flush=True)
    return is_good


def main() -> int:
    """Runs what is asked for; the number of parts that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("numbers", type=int, nargs="*", metavar="I")
    arguments = parser.parse_args()
    shards = [f"{number}/{arguments.shards}" for number in arguments.numbers or range(1, arguments.shards + 1)]
    failed = [shard for shard in shards if not passes(shard)]
    print(f"[all] {len(shards) - len(failed)} of {len(shards)} parts passed" + f"; failed: {', '.join(failed)}" * bool(failed))
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
