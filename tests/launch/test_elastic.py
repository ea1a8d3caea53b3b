"""A run that has lost a host goes on by itself from its last checkpoint, with the stages or the replicas that are left."""

from __future__ import annotations

import json
import re
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

# As docs/how-to/replicas.md has it; of torchrun's variables, the processes of this host, and the hosts that there are now.
SCRIPT = """
import json, os, sys, time
import lightning as L, torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_fxpipe import FxPipeStrategy

folder = sys.argv[1]
# Elastic with options of the strategy; else without: so many devices, by DDP, are stopped after so many steps, and one goes on.
options, num_devices, stop_at = json.loads(sys.argv[2])

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
        if options is not None and self.trainer.is_global_zero:
            stages, replicas = self.trainer.strategy.plan.num_stages, self.trainer.world_size
            open(f"{folder}/steps", "a").write(f"{stages} {replicas} {self.trainer.global_step}\\n")
            time.sleep(0.1 * (os.environ["GROUP_WORLD_SIZE"] == "2"))  # until a host is lost
    def on_train_end(self):
        found = {"loss": self.trainer.callback_metrics["loss_epoch"], "steps": self.trainer.global_step}
        for name, parameter in self.named_parameters():
            states = self.trainer.optimizers[0].state[parameter].items()
            found |= {name: parameter.detach().clone(), **{f"{name}/{key}": value.clone() for key, value in states}}
        torch.save(found, f"{folder}/trained.pt")
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

L.seed_everything(1)
generator = torch.Generator().manual_seed(2)
data = TensorDataset(torch.randn(64, 8, generator=generator), torch.randint(0, 2, (64,), generator=generator))

def run(place):
    trainer = L.Trainer(accelerator="cpu", max_epochs=4, logger=False, enable_progress_bar=False, enable_model_summary=False,
                        callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=2)], **place)
    trainer.fit(Lit(), DataLoader(data, batch_size=4), ckpt_path="last")

if options is not None:
    devices, hosts = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
    run({"strategy": FxPipeStrategy(**options), "devices": devices, "num_nodes": hosts})
    sys.exit()
try:
    run({"strategy": "ddp" if num_devices > 1 else "auto", "devices": num_devices})
except InterruptedError:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        sys.exit()
    if num_devices > 1:
        torch.distributed.destroy_process_group()
    stop_at = 0
    run({"devices": 1})
"""


def torchrun(host: int, processes: int) -> list[str]:
    address = ADDRESSES[0]
    return [
        *("-m", "torch.distributed.run", "--nnodes=1:2", f"--nproc-per-node={processes}", "--max-restarts=3"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={address}:29617", "--rdzv-id=1", f"--local-addr={ADDRESSES[host]}"),
        # torch does not find the address of a namespace among those of the machine.
        f"--rdzv-conf=is_host={host == 0},last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=2",
    ]


def wait_until(is_so: Any, texts: Any, seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "\n".join(texts())
        time.sleep(0.1)  # torchrun writes files, and sends no message


def run_that_loses_a_host(
    folder: Path, processes: int, options: dict[str, Any], num_steps: int
) -> tuple[dict[tuple[int, int], list[int]], str]:
    """Two hosts train, until after so many steps all processes of the second one are killed, and the first one goes on.

    Returns:
        By numbers of stages and replicas the steps that were done with them; and what the first host printed.
    """
    script, steps = folder / "script.py", folder / "steps"
    script.write_text(SCRIPT)
    outputs = [folder / f"host{host}.txt" for host in (0, 1)]

    def texts() -> list[str]:
        return [output.read_text(errors="replace") for output in outputs if output.exists()]

    def rows() -> list[tuple[int, ...]]:
        return [tuple(map(int, line.split())) for line in steps.read_text().splitlines()] if steps.exists() else []

    with TwoHosts() as hosts:
        arguments = [str(script), str(folder), json.dumps([options, 0, -1])]
        # By default torchrun's store lives on, where ranks that are started anew find addresses of those that are gone.
        anew = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
        first, _ = (hosts.start(host, [*torchrun(host, processes), *arguments], outputs[host], **anew) for host in (0, 1))
        wait_until(lambda: len(rows()) >= num_steps, texts)
        assert len({row[:2] for row in rows()}) == 1
        hosts.kill_all(1)
        wait_until(lambda: first.poll() is not None, texts)
        assert first.returncode == 0, "\n".join(texts())
    done: dict[tuple[int, int], list[int]] = {}
    for stages, replicas, step in rows():
        done.setdefault((stages, replicas), []).append(step)
    return done, texts()[0]


def check_against_undisturbed(folder: Path, before: list[int], after: list[int], num_replicas: int) -> None:
    """Steps, loss, parameters and the optimizer's states are those of one device, or of DDP on as many as there were replicas,
    that is stopped after the step of the checkpoint, and goes on from it on one device.

    Args:
        folder: Of the run that lost a host.
        before: Steps before.
        after: Steps after.
        num_replicas: Before.
    """
    # Not from the beginning, and no step is left out.
    assert before == [*range(1, before[-1] + 1)]
    assert before[-1] - 3 <= after[0] <= before[-1] + 1
    # Lightning goes on in the middle of an epoch with the loader's first batches, so that does, too, at the same step.
    alone = folder / "alone"
    alone.mkdir()
    command = [sys.executable, folder / "script.py", alone, json.dumps([None, num_replicas, after[0] - 1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    expected = torch.load(alone / "trained.pt", weights_only=True)
    found = torch.load(folder / "trained.pt", weights_only=True)
    assert after == [*range(after[0], expected["steps"] + 1)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_run_that_has_lost_a_host_goes_on_with_fewer_stages(tmp_path: Path) -> None:
    done, text = run_that_loses_a_host(tmp_path, 1, {}, 20)
    assert done.keys() == {(2, 1), (1, 1)}
    assert "[rank 0] stopped because rank 1 failed: the process died" in text
    check_against_undisturbed(tmp_path, done[2, 1], done[1, 1], 1)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [False, True])
def test_a_run_that_has_lost_a_host_goes_on_with_fewer_replicas(tmp_path: Path, shards: bool) -> None:
    """Each host has a replica of two stages."""
    done, text = run_that_loses_a_host(tmp_path, 2, {"num_stages": 2, "shard_optimizer_state": shards}, 10)
    assert done.keys() == {(2, 2), (2, 1)}
    assert re.search(r"\[rank 0\] stopped because rank [23] failed: the process died", text)
    check_against_undisturbed(tmp_path, done[2, 2], done[2, 1], 2)
