"""A run that has lost a host goes on by itself from its last checkpoint, with the stages that are left."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.hosts import ADDRESSES, TwoHosts, can_make_hosts

pytestmark = [
    pytest.mark.skipif(not can_make_hosts(), reason="needs root, and the command ip, to make two hosts"),
    pytest.mark.timeout(400),
]

# As docs/replicas.md has it; of torchrun's variables, the processes of this host, and the hosts that there are now.
SCRIPT = """
import os, sys, time
import lightning as L, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lightning_fxpipe

folder, stop_at = sys.argv[1], int(sys.argv[2])  # -1: elastic; else one device, stopped after so many steps, goes on

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        layers = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.model = nn.Sequential(*layers, nn.Linear(8, 2))
    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss
    def on_train_batch_end(self, *args):
        if self.trainer.global_step == stop_at:
            raise InterruptedError
        if stop_at < 0 and self.trainer.is_global_zero:
            open(f"{folder}/steps", "a").write(f"{self.trainer.strategy.plan.num_stages} {self.trainer.global_step}\\n")
            time.sleep(0.1)
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

L.seed_everything(1)
generator = torch.Generator().manual_seed(2)
data = TensorDataset(torch.randn(64, 8, generator=generator), torch.randint(0, 2, (64,), generator=generator))
place = {"devices": 1}
if stop_at < 0:
    devices, hosts = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
    place = {"strategy": "fxpipe", "devices": devices, "num_nodes": hosts}

def run():
    trainer = L.Trainer(accelerator="cpu", max_epochs=4, logger=False, enable_progress_bar=False, enable_model_summary=False,
                        callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=2)], **place)
    module = Lit()
    trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path="last")
    return trainer, module

try:
    trainer, module = run()
except InterruptedError:
    stop_at = 0
    trainer, module = run()
if trainer.is_global_zero:
    torch.save({"state": module.state_dict(), "loss": trainer.callback_metrics["loss_epoch"]}, f"{folder}/result.pt")
"""
NUM_STEPS = 64


def torchrun(host: int, address: str) -> list[str]:
    """One process on each host."""
    return [
        *("-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={address}:29617", "--rdzv-id=1", f"--local-addr={ADDRESSES[host]}"),
        # torch does not find the address of a namespace among those of the machine.
        f"--rdzv-conf=is_host={host == 0},last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=2",
    ]


def wait_until(is_so: Any, texts: Any, seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "\n".join(texts())
        time.sleep(0.1)  # torchrun writes files, and sends no message


def test_a_run_that_has_lost_a_host_goes_on_with_fewer_stages(tmp_path: Path) -> None:
    script, alone, steps = tmp_path / "script.py", tmp_path / "alone", tmp_path / "steps"
    script.write_text(SCRIPT)
    outputs = [tmp_path / f"host{host}.txt" for host in (0, 1)]

    def texts() -> list[str]:
        return [output.read_text(errors="replace") for output in outputs if output.exists()]

    def rows() -> list[list[int]]:
        return [[*map(int, line.split())] for line in steps.read_text().splitlines()] if steps.exists() else []

    with TwoHosts() as hosts:
        first, _ = (
            hosts.start(host, [*torchrun(host, ADDRESSES[0]), str(script), str(tmp_path), "-1"], outputs[host])
            for host in (0, 1)
        )
        wait_until(lambda: len(rows()) >= 20, texts)
        assert {num_stages for num_stages, _ in rows()} == {2}
        hosts.kill_all(1)
        wait_until(lambda: first.poll() is not None, texts)
        assert first.returncode == 0, "\n".join(texts())
    before = [step for num_stages, step in rows() if num_stages == 2]
    after = [step for num_stages, step in rows() if num_stages == 1]
    # Not from the beginning, and no step is left out.
    assert before == [*range(1, before[-1] + 1)]
    assert after == [*range(after[0], NUM_STEPS + 1)]
    assert before[-1] - 3 <= after[0] <= before[-1] + 1
    assert "[rank 0] stopped, because rank 1 failed: the process died" in texts()[0]
    # Lightning goes on in the middle of an epoch with the loader's first batches, so one device does, too, at the same step.
    alone.mkdir()
    command = [sys.executable, script, alone, str(after[0] - 1)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found, expected = (torch.load(folder / "result.pt", weights_only=True) for folder in (tmp_path, alone))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
