"""Runs on two GPUs, over NCCL, compared with one of them and with DDP: ``pytest -m gpu -n 0 tests/gpu``.

The same runs on two CPUs show that the program does what it should where there is no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.two_devices import REPLICAS, STAGES

PROGRAM = Path(__file__).with_name("two_devices.py")
ROOT = PROGRAM.parents[2]

ON_TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(600),
]


def run(accelerator: str, way: str, path: Path, num_processes: int) -> Any:
    """What the runs of a way have ended with."""
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"] if num_processes > 1 else []
    command = [sys.executable, *several, str(PROGRAM), accelerator, way, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=ON_TWO_GPUS)])
def test_two_devices_equal_one_and_two_of_ddp(accelerator: str, tmp_path: Path) -> None:
    expected = run(accelerator, "alone", tmp_path / "alone.pt", 1) | run(accelerator, "ddp", tmp_path / "ddp.pt", 2)
    found = run(accelerator, "fxpipe", tmp_path / "fxpipe.pt", 2)
    assert [*found] == [*expected] == [*STAGES, *REPLICAS]
    for name, result in found.items():
        tolerance = 2e-2 if name in ("fp16", "bf16") else 1e-4
        torch.testing.assert_close({name: result}, {name: expected[name]}, rtol=tolerance, atol=tolerance)
