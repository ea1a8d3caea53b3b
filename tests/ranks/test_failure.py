"""A fault on one rank ends the run on all, soon, with the original error on the terminal once and a failing exit status."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_fxpipe.distributed.topology import make_topology
from lightning_fxpipe.schedules.by_name import SCHEDULES
from tests.launch.hosts import can_make_hosts
from tests.ranks.fault_cases import Case, cases_of_replicas, cases_of_schedules, random_cases
from tests.ranks.faults import run_cases
from tests.ranks.pool import RankPool

# Different kinds, and different ways in which the other ranks may be waiting meanwhile.
CASES = [
    Case(place="prelude", kind="error", rank=1, at=6),
    Case(place="forward", kind="kill", rank=0, at=9),
    Case(place="write_checkpoint", kind="own", rank=1),
    Case(place="write_checkpoint", kind="unsendable", rank=0),
    Case(place="after_model", kind="stop", rank=0, at=3),
    Case(place="prelude", kind="freeze", rank=1, at=6),
    Case(place="callback.on_train_epoch_end", kind="different", rank=-1),
    Case(place="prelude", kind="hook_within", rank=1, at=6),
]
FURTHER_CASES = [
    Case(place="callback.on_train_epoch_end", kind="memory", rank=1),
    Case(place="worker", kind="error", rank=1, at=2),
    Case(place="write_checkpoint", kind="unreceivable", rank=1),
    Case(place="caught", kind="error", rank=1, at=9),
    Case(place="prelude", kind="suspend", rank=1, at=6),
    Case(place="between_runs", kind="hook_around", rank=0),
    Case(place="forward", kind="kill", rank=0, at=9, num_ranks=3),
    Case(place="backward", kind="own", rank=1),
    Case(place="after_model", kind="device_memory", rank=0, at=4),
    Case(place="callback.on_train_epoch_end", kind="memory", rank=2, num_ranks=3),
    Case(place="module.configure_optimizers", kind="exit", rank=1),
    Case(place="module.on_train_start", kind="error", rank=-1),
    Case(place="collate", kind="signal_self", rank=1, at=3),
    Case(place="optimizer", kind="signal_group", rank=0),
    Case(place="callback.teardown", kind="error", rank=1),
    Case(place="between_runs", kind="error", rank=1),
    Case(place="write_checkpoint", kind="unsendable", rank=1),
    Case(place="write_checkpoint", kind="unreceivable", rank=0),
    Case(place="write_checkpoint", kind="speechless", rank=1),
    Case(place="prelude", kind="speechless", rank=1, at=6),
    Case(place="prelude", kind="stop", rank=1, at=6),
    Case(place="forward", kind="stop", rank=1, at=9),
    Case(place="tensor_hook", kind="stop", rank=1, at=6),
    Case(place="scheduler", kind="stop", rank=0, at=2),
    Case(place="module.on_train_batch_start", kind="stop", rank=1),
    Case(place="caught", kind="device_memory", rank=0, at=9),
    Case(place="logger", kind="stop", rank=0, at=2),
    Case(place="callback.on_train_epoch_end", kind="exit", rank=1),
    Case(place="callback.on_train_epoch_end", kind="exit_text", rank=1),
    Case(place="prelude", kind="generator_exit", rank=1, at=6),
    Case(place="forward", kind="freeze", rank=0, at=9, num_ranks=3),
    Case(place="write_checkpoint", kind="freeze", rank=0),
    Case(place="write_checkpoint", kind="freeze", rank=1),
    Case(place="between_runs", kind="freeze", rank=1),
    Case(place="forward", kind="end", rank=0, at=9),
    Case(place="worker", kind="kill_worker", rank=0, at=2),
    Case(place="prelude", kind="hostile", rank=1, at=6),
    Case(place="write_checkpoint", kind="hostile", rank=0),
    Case(place="validation_loss", kind="hostile", rank=0),
    Case(place="write_checkpoint", kind="twice", rank=1),
    Case(place="prelude", kind="twice", rank=1, at=6),
    Case(place="prelude", kind="twice_apart", rank=1, at=6, num_ranks=3),
    Case(place="prelude", kind="unwinding", rank=-1, at=6),
    Case(place="prelude", kind="hook_before", rank=1, at=6),
    Case(place="prelude", kind="hook_around", rank=0, at=6),
    Case(place="between_runs", kind="hook_within", rank=1),
]
# Two replicas of two stages: of the rank itself, of its pipeline, and of the other one.
REPLICAS: list[Case] = [
    Case(place="backward", kind="error", rank=3, at=6, num_ranks=4, num_stages=2),
    Case(place="forward", kind="kill", rank=1, at=9, num_ranks=4, num_stages=2),
    Case(place="write_checkpoint", kind="error", rank=1, num_ranks=4, num_stages=2),
    # While the step is tried and recorded: where that fails, another graph is recorded, so that the ranks do not have the same.
    Case(place="forward", kind="error", rank=1, at=3, num_ranks=4, num_stages=2),
    # While a known step's first call is looked for, and while the optimizer is tried, with an error that cannot be asked.
    Case(place="prelude", kind="stop", rank=3, at=3, num_ranks=4, num_stages=2),
    Case(place="optimizer", kind="hostile", rank=2, num_ranks=4, num_stages=2, shards=True),
]


def check(cases: Sequence[Case], *, must_be_reached: bool, limit_seconds: float) -> None:
    wrong = []
    for case, outcome in run_cases(cases):
        complaints = outcome.complaints(case, limit_seconds=limit_seconds) if outcome.reached or must_be_reached else []
        if complaints:
            outputs = "\n".join(f"rank {rank}: {text[-2000:]}" for rank, text in enumerate(outcome.outputs))
            wrong.append(f"{case}: {complaints}\n{outputs}")
    assert not wrong, f"{len(wrong)} of {len(cases)} faults:\n" + "\n".join(wrong)


@pytest.mark.timeout(900)  # each case starts processes of its own
@pytest.mark.parametrize(
    "cases", [CASES, REPLICAS, pytest.param(FURTHER_CASES, marks=pytest.mark.slow)], ids=["common", "replicas", "further"]
)
def test_a_fault_ends_the_run_on_all_ranks(cases: list[Case]) -> None:
    check(cases, must_be_reached=True, limit_seconds=40)  # a busy machine is no fault; a hang takes forever


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_random_faults_end_the_run_on_all_ranks() -> None:
    check(random_cases(1, 200), must_be_reached=False, limit_seconds=5)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_random_faults_in_the_middle_of_each_schedule_end_the_run_on_all_ranks() -> None:
    schedules = [name for name in SCHEDULES if name != "auto"]
    check(cases_of_schedules(schedules, 1, 200), must_be_reached=False, limit_seconds=20)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_each_kind_of_fault_in_each_part_of_a_run_ends_it_on_all_replicas() -> None:
    """Where there may be network namespaces, half of the cases on two of them, and the cable between them is cut, too."""
    check(cases_of_replicas((1, 2) if can_make_hosts() else (1,)), must_be_reached=True, limit_seconds=20)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_random_faults_end_the_run_on_all_replicas() -> None:
    # Not the samplers, in whose place Lightning puts its own.
    cases = [case for case in random_cases(2, 110, replicas=True) if case.place != "sampler"]
    check(cases, must_be_reached=False, limit_seconds=20)  # four ranks on two cores


# --------------------------------------------------------------------------- processes that Lightning starts

SCRIPT = """
import os, signal, sys, time
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lightning_fxpipe

# As in a terminal: what a shell starts in the background ignores interrupts, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(*(nn.Linear(8, 8) for i in range(4)))
    def training_step(self, batch, batch_idx):
        return self.model(batch[0]).pow(2).mean()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 5 and sys.argv[1] == "error" and self.global_rank == 1:
            raise ValueError("the original error")
        if batch_idx == 5 and sys.argv[1] != "error" and self.global_rank == 0:
            os.kill(os.getpid(), int(sys.argv[1]))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Exceptions(L.Callback):
    def on_exception(self, trainer, pl_module, exception):
        print(f"on_exception {pl_module.global_rank} {type(exception).__name__}", file=sys.stderr, flush=True)

torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(400, 8)), batch_size=8)
trainer = L.Trainer(accelerator="cpu", devices=2, strategy="fxpipe", max_epochs=1000, logger=False, callbacks=[Exceptions()],
                    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Lit(), data)
"""


EARLY_SCRIPT = SCRIPT.replace(
    "torch.manual_seed(0)\n", "if os.environ.get('LOCAL_RANK', '0') != '0':\n    sys.exit(0)\ntorch.manual_seed(0)\n"
)


def run_script(folder: Path, fault: str, text: str = SCRIPT) -> tuple[int, str]:
    """Exit status and output of the script; all of its processes have ended."""
    script, output = folder / "script.py", folder / "output"
    script.write_text(text)
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(script), fault], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(200)
            deadline = time.monotonic() + 5
            while running := _of_group(process.pid):
                assert time.monotonic() < deadline, f"{running} processes are left behind"
                time.sleep(0.05)  # nothing tells of the end of processes that are not children
        finally:
            for pid in _of_group(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.wait()
    return status, output.read_text()


def _of_group(group: int) -> list[int]:
    found = subprocess.run(["ps", "-eo", "pid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in found.splitlines()]
    return [int(pid) for pid, of, state in rows if int(of) == group and not state.startswith("Z")]


def test_an_error_of_a_started_process_is_told_once(tmp_path: Path) -> None:
    status, output = run_script(tmp_path, "error")
    assert status == 1
    assert output.count("Traceback (most recent call last)") == 1
    assert output.count("ValueError: the original error") == 2  # under the traceback, and in the line of rank 0
    assert "[rank 0] stopped because rank 1 failed: ValueError: the original error" in output
    assert "on_exception 1 ValueError" in output
    assert "on_exception 0 PeerError" in output


def test_what_fails_after_code_has_swallowed_the_failure_of_another_rank_is_told_as_its_consequence(tmp_path: Path) -> None:
    """A dry run catches whatever the code that it runs raises, and goes on."""
    swallows = """
        if batch_idx == 5 and self.global_rank == 0:
            try:
                while True:
                    pass
            except Exception:
                pass
            raise LookupError("which follows from it")
    def configure_optimizers"""
    status, output = run_script(tmp_path, "error", SCRIPT.replace("\n    def configure_optimizers", swallows))
    assert status == 1
    assert output.count("Traceback (most recent call last)") == 1
    assert "[rank 0] stopped because rank 1 failed: ValueError: the original error" in output
    assert "LookupError: which" not in output


def test_an_interrupt_of_the_main_process_ends_the_run_in_order(tmp_path: Path) -> None:
    status, output = run_script(tmp_path, str(int(signal.SIGINT)))
    assert status == 1
    assert "Traceback" not in output
    assert "Detected KeyboardInterrupt, attempting graceful shutdown" in output
    assert "on_exception 0 KeyboardInterrupt" in output
    assert "on_exception 1 KeyboardInterrupt" in output


def test_a_signal_to_stop_one_rank_stops_all_at_the_same_batch(tmp_path: Path) -> None:
    """Each stops where all have heard of it, or one would leave the others in the middle of a batch."""
    text = SCRIPT.replace("self.global_rank == 0:", "self.global_rank == 1:")
    text = text.replace("{type(exception).__name__}", "{type(exception).__name__} at {trainer.global_step}")
    _, output = run_script(tmp_path, str(int(signal.SIGTERM)), text)
    (first, second) = re.findall(r"on_exception \d SIGTERMException at (\d+)", output)
    assert first == second
    assert 6 <= int(first) <= 8, "as soon as all know"


@pytest.mark.slow
def test_a_started_process_that_is_stopped_ends_with_the_others(tmp_path: Path) -> None:
    text = SCRIPT.replace("self.global_rank == 0:", "self.global_rank == 1:")
    text = text.replace('strategy="fxpipe"', "strategy=lightning_fxpipe.FxPipeStrategy(heartbeat_timeout=2)")
    status, output = run_script(tmp_path, str(int(signal.SIGSTOP)), text)
    assert status == 1
    assert "[rank 0] stopped because rank 1 has not answered for 2 s: it is stopped" in output
    assert "on_exception 0 PeerError" in output


def test_a_process_that_ends_well_before_the_ranks_meet_is_not_waited_for(tmp_path: Path) -> None:
    status, output = run_script(tmp_path, "none", EARLY_SCRIPT)
    assert status == 1
    assert "rank 1 with exit status 0" in output
    assert "exit early" in output


# --------------------------------------------------------------------------- how long a rank waits


def wait_in_vain() -> list[float]:
    """Seconds until a rank has given up waiting in each of the pipeline's groups."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    topology = make_topology(torch.device("cpu"), timedelta(seconds=1))
    dist.barrier()
    seconds = []
    for group in (topology.group, topology.control_group, topology.backward_group, topology.group_of((0, 1))):
        if dist.get_rank() == 0:
            began = time.monotonic()
            with pytest.raises(RuntimeError, match="Timed out|timed out|timeout"):
                dist.recv(torch.zeros(1), src=1, group=group)
            seconds.append(time.monotonic() - began)
    dist.barrier()
    return seconds


def test_a_rank_waits_in_no_group_longer_than_it_is_told(ranks: Callable[[int], RankPool]) -> None:
    assert all(seconds < 20 for seconds in ranks(2).run(wait_in_vain)[0])
