"""Two runs that save one name at the same time, and are killed: the name leads to what one of them has saved, whole.

``python -m tests.checkpoint.test_two_runs FOLDER KILLS`` is the program: importing torch takes seconds, so one process does it,
forks the savers, kills them and looks at what there is.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

_SECONDS = 0.3  # between two kills, a few saves


def _save_for_ever(path: Path, number: int) -> None:
    import torch

    from lightning_fxpipe.checkpoint.converting import _write_folder

    count = number
    while True:
        count += 2
        state: dict[str, Any] = {f"layer{index}.weight": torch.full((50, 50), float(count)) for index in range(6)}
        _write_folder(path, {"state_dict": state, "global_step": count, "pytorch-lightning_version": "2.6.0"})


def _forked(path: Path, number: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            _save_for_ever(path, number)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def _complaint(path: Path) -> str:
    """What is wrong with what the name leads to; the savers go on meanwhile."""
    from lightning_fxpipe.checkpoint.converting import read_whole
    from lightning_fxpipe.checkpoint.locations import Location
    from lightning_fxpipe.checkpoint.pickles import Reading

    checkpoint = read_whole(Location.of(path), Reading(weights_only=True))[1]
    found = {
        checkpoint["global_step"],
        *(float(value) for state in checkpoint["state_dict"].values() for value in state.unique()),
    }
    return "" if len(found) == 1 else f"mixed: {found}"


def _run(folder: Path, num_kills: int) -> None:
    path = folder / "last.ckpt"
    savers = [_forked(path, number) for number in range(2)]
    try:
        _kill_by_turns(path, savers, num_kills)
    finally:  # one that is left would hold the pipe that the test reads to its end
        for saver in filter(None, savers):
            os.kill(saver, signal.SIGKILL)
            os.waitpid(saver, 0)
    from lightning_fxpipe.checkpoint.atomic import replacing

    with replacing(path) as new:
        new.mkdir()
    print(f"left: {sorted(entry.name for entry in folder.iterdir())}", flush=True)


def _kill_by_turns(path: Path, savers: list[int], num_kills: int) -> None:
    choose = random.Random(3)
    while not path.exists():
        time.sleep(0.01)  # until one of them has saved
    for _ in range(num_kills):
        time.sleep(choose.random() * _SECONDS)
        victim = choose.randrange(2)
        os.kill(savers[victim], signal.SIGKILL)
        ended = os.waitid(os.P_PID, savers[victim], os.WEXITED | os.WNOWAIT)
        assert ended is not None
        assert ended.si_code == os.CLD_KILLED, "it had failed before"
        os.waitpid(savers[victim], 0)
        savers[victim] = 0
        # The other one would replace it while it is read.
        os.kill(savers[1 - victim], signal.SIGSTOP)
        print(f"complaint: {_complaint(path)}", flush=True)
        os.kill(savers[1 - victim], signal.SIGCONT)
        savers[victim] = _forked(path, victim)


@pytest.mark.parametrize("num_kills", [15, pytest.param(100, marks=pytest.mark.slow)])
def test_two_runs_that_are_killed_while_they_save_one_name_do_not_mix(num_kills: int, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.test_two_runs", str(tmp_path), str(num_kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 3 * num_kills, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["complaint: "] * num_kills + ["left: ['last.ckpt']"]


if __name__ == "__main__":
    _run(Path(sys.argv[1]), int(sys.argv[2]))
