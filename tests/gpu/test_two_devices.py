"""Runs in two processes over NCCL, compared with one process and with DDP: ``pytest -m gpu -n 0 tests/gpu``.

On two GPUs; and on one that both processes share, for who has no more. The same runs on two CPUs show that the program does
what it should where there is no GPU.
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
from tests.gpu.waits import noted

PROGRAM = Path(__file__).with_name("two_devices.py")
ROOT = PROGRAM.parents[2]

ON_GPUS = [
    pytest.param(
        name,
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} CUDA devices"),
            pytest.mark.timeout(600),
        ],
    )
    for name, count in (("gpu", 2), ("shared_gpu", 1))
]


def run(accelerator: str, way: str, path: Path, num_processes: int) -> Any:
    """What the runs of a way have ended with."""
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"] if num_processes > 1 else []
    command = [sys.executable, *several, str(PROGRAM), accelerator, way, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("accelerator", ["cpu", *ON_GPUS])
def test_two_devices_equal_one_and_two_of_ddp(accelerator: str, tmp_path: Path) -> None:
    expected = run(accelerator, "alone", tmp_path / "alone.pt", 1) | run(accelerator, "ddp", tmp_path / "ddp.pt", 2)
    found = run(accelerator, "fxpipe", tmp_path / "fxpipe.pt", 2)
    assert [*found] == [*expected] == [*STAGES, *REPLICAS]
    for name, result in found.items():
        tolerance = 2e-2 if name in ("fp16", "bf16") else 1e-4
        torch.testing.assert_close({name: result}, {name: expected[name]}, rtol=tolerance, atol=tolerance)
    if accelerator == "cpu":
        return
    for name in STAGES:
        # With one microbatch random numbers go from stage to stage; torch's scaler asks for an overflow, on one device as well.
        more = {"fp16": 2, "bf16": 1}.get(name, 0)
        for rank, most in ((0, 1 + more), (1, {"fp16": 1}.get(name, 0))):  # rank 0 has the last stage
            waits = noted(tmp_path / f"fxpipe.pt.{name.replace(' ', '_')}.{rank}")
            assert len(waits) == 6
            assert all(len(batch) <= most for batch in waits), (rank, name, waits)
