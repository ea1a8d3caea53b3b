"""Runs over two hosts, as torchrun and Lightning start them: train, save, go on with another number of ranks; a cut cable."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launch.hosts import ADDRESSES, TwoHosts, can_make_hosts

pytestmark = [
    pytest.mark.skipif(not can_make_hosts(), reason="needs root, and the command ip, to make two hosts"),
    pytest.mark.timeout(400),
]

SCRIPT = """
import json, os, sys
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_fxpipe import FxPipeStrategy

folder, epochs, options, trainer_options, ckpt_path = json.loads(sys.argv[1])

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 2))
    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss
    def on_train_batch_end(self, *args):
        open(f"{folder}/step", "a").write(".")
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

L.seed_everything(1)
generator = torch.Generator().manual_seed(2)
data = TensorDataset(torch.randn(32, 8, generator=generator), torch.randint(0, 2, (32,), generator=generator))
strategy = {"strategy": FxPipeStrategy(heartbeat_timeout=6.0, **options)} if options is not None else {}
trainer = L.Trainer(accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False, enable_model_summary=False,
                    default_root_dir=folder, enable_checkpointing=False, **strategy, **trainer_options)
module = Lit()
trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=ckpt_path)
trainer.save_checkpoint(f"{folder}/saved.ckpt")
if trainer.is_global_zero:
    state = {name: value.tolist() for name, value in module.state_dict().items()}
    print("RESULT", json.dumps({"loss": float(trainer.callback_metrics["loss_epoch"]), "state": state}), flush=True)
"""


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts() as made:
        yield made


class Job:
    """One script on two hosts.

    Args:
        hosts: The hosts.
        folder: That both see.
    """

    def __init__(self, hosts: TwoHosts, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        folder.mkdir(exist_ok=True)
        (folder / "script.py").write_text(SCRIPT)
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, host: int, how: Sequence[str], *arguments: Any, **environment: Any) -> None:
        command = [*how, str(self._folder / "script.py"), json.dumps([str(self._folder), *arguments])]
        self.processes.append(self._hosts.start(host, command, self._output(host), **environment))

    def _output(self, host: int) -> Path:
        return self._folder / f"host{host}.txt"

    def ended(self, seconds: float = 200.0) -> list[int]:
        """The exit statuses."""
        deadline = time.monotonic() + seconds
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError("\n".join(self.texts())) from None

    def texts(self) -> list[str]:
        return [self._output(host).read_text(errors="replace") for host in (0, 1)]

    def wait_for_steps(self, count: int) -> None:
        steps = self._folder / "step"
        deadline = time.monotonic() + 150
        while not steps.exists() or len(steps.read_text()) < count:
            assert time.monotonic() < deadline, "\n".join(self.texts())
            assert all(process.poll() is None for process in self.processes), "\n".join(self.texts())
            time.sleep(0.1)  # the script writes a file, and sends no message


def torchrun(host: int, processes: int = 1) -> list[str]:
    address = f"--master-addr={ADDRESSES[0]}"
    return [
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        f"--node-rank={host}",
        address,
        "--master-port=29611",
        f"--nproc-per-node={processes}",
    ]


def on_one_host(
    folder: Path, epochs: int, options: dict[str, Any] | None, trainer: dict[str, Any], ckpt_path: Path | None
) -> Any:
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    arguments = json.dumps([str(folder), epochs, options, trainer, ckpt_path and str(ckpt_path)])
    done = subprocess.run([sys.executable, script, arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return result_of(done.stdout)


def result_of(text: str) -> Any:
    (line,) = re.findall("^RESULT (.*)$", text, re.MULTILINE)
    return json.loads(line)


def assert_close(found: Any, expected: Any) -> None:
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert found["state"].keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        flat = [row if isinstance(row, list) else [row] for row in found["state"][name]]
        wanted = [row if isinstance(row, list) else [row] for row in value]
        for mine, theirs in zip(flat, wanted, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5), name


def test_stages_on_two_hosts_train_and_one_host_goes_on(hosts: TwoHosts, tmp_path: Path) -> None:
    """As torchrun starts them, with a folder that both hosts see. The second host comes late."""
    job = Job(hosts, tmp_path / "two")
    options, trainer = {"num_microbatches": 2}, {"devices": 1, "num_nodes": 2}
    job.start(0, torchrun(0), 1, options, trainer, None)
    time.sleep(5)  # the first host waits for it
    job.start(1, torchrun(1), 1, options, trainer, None)
    assert job.ended() == [0, 0], "\n".join(job.texts())
    alone = {"devices": 1}
    assert_close(result_of(job.texts()[0]), on_one_host(tmp_path / "one", 1, None, alone, None))
    saved = tmp_path / "two" / "saved.ckpt"
    resumed = on_one_host(tmp_path / "on", 2, options, {"devices": 2}, saved)
    assert_close(resumed, on_one_host(tmp_path / "whole", 2, None, alone, None))


@pytest.mark.slow
def test_replicas_on_two_hosts_equal_ddp_on_one(hosts: TwoHosts, tmp_path: Path) -> None:
    """As Lightning starts them: each host starts its own further process."""
    job = Job(hosts, tmp_path / "two")
    options, trainer = {"num_microbatches": 2, "num_stages": 2}, {"devices": 2, "num_nodes": 2}
    for host in (0, 1):
        place = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": 29612, "NODE_RANK": host}
        job.start(host, [], 2, options, trainer, None, **place)
    assert job.ended() == [0, 0], "\n".join(job.texts())
    expected = on_one_host(tmp_path / "ddp", 2, None, {"devices": 2, "strategy": "ddp"}, None)
    assert_close(result_of(job.texts()[0]), expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 1])
def test_a_cut_cable_ends_the_run_on_both_hosts(hosts: TwoHosts, tmp_path: Path, num_stages: int) -> None:
    """Stages wait for a message and replicas for a sum that never come; nobody tells them that the cable is cut."""
    job = Job(hosts, tmp_path / "two")
    options, trainer = {"num_microbatches": 2, "num_stages": num_stages}, {"devices": 1, "num_nodes": 2}
    for host in (0, 1):
        place = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": 29613, "NODE_RANK": host}
        job.start(host, [], 10**6, options, trainer, None, **place)
    job.wait_for_steps(20)
    hosts.cut()
    begin = time.monotonic()
    assert all(job.ended(seconds=60)), "\n".join(job.texts())
    assert time.monotonic() - begin < 40  # six seconds of silence; on a busy machine what follows takes a while
    for host, text in enumerate(job.texts()):
        assert f"rank {1 - host} has not answered" in text or "have exited without this one" in text, text


@pytest.mark.slow
def test_hosts_that_do_not_agree_on_their_number_do_not_start(hosts: TwoHosts, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path / "two")
    place = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": 29614}
    options = {"num_microbatches": 2, "timeout": 15.0}
    job.start(0, [], 1, options, {"devices": 1, "num_nodes": 2}, None, **place, NODE_RANK=0)
    job.start(1, [], 1, options, {"devices": 1, "num_nodes": 3}, None, **place, NODE_RANK=1)
    assert all(job.ended()), "\n".join(job.texts())
