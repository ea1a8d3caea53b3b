"""How a pipeline's processes start: ``python script.py``, torchrun, SLURM, by hand, and in an interactive session."""

from __future__ import annotations

import os
import pickle
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_fxpipe import FxPipeStrategy, UnsupportedError
from tests.lit import LitModel, make_loader, make_trainer
from tests.ports import free_port

REPOSITORY = Path(__file__).parents[2]

# Reports on a line of its own, from each process: the rank before and after, and what is equal on one device.
SCRIPT = """
import sys
{first_lines}
import os
import torch
from tests.lit import LitModel, make_loader, make_trainer
import lightning as L
import lightning_fxpipe

def main():
    torch.set_num_threads(1)
    L.seed_everything(3, verbose=False)
    trainer = make_trainer(**({{"devices": 2, "strategy": "fxpipe", "max_epochs": 1}} | {options}))
    rank = trainer.global_rank
    module = LitModel("mlp")
    trainer.fit(module, make_loader("mlp"))
    tested = trainer.test(module, make_loader("mlp", num_samples=20), verbose=False)[0]["test_loss_epoch"]
    weights = sum(float(value.double().sum()) for value in module.state_dict().values())
    with open(os.path.join({folder!r}, f"{{os.getpid()}}.txt"), "w") as file:
        print("REPORT", rank, trainer.global_rank, trainer.world_size, f"{{tested:.7f}} {{weights:.7f}}", file=file)

if __name__ == "__main__":
    main()
"""


def script(folder: Path, options: dict[str, Any] | None = None, first_lines: str = "") -> Path:
    path = folder / "script.py"
    path.write_text(SCRIPT.format(first_lines=first_lines, folder=str(folder), options=options or {}))
    return path


def environment(**variables: Any) -> dict[str, str]:
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"PYTHONPATH": str(REPOSITORY), **{name: str(value) for name, value in variables.items()}}


def start(command: list[Any], folder: Path, **variables: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def reports(folder: Path, *processes: subprocess.Popen[str]) -> list[list[str]]:
    """What the processes report, by rank, once all have ended well; nothing is left behind."""
    for process in processes:
        try:
            printed, _ = process.communicate(timeout=150)
        finally:
            process.kill()
        assert process.returncode == 0, printed[-3000:]
        assert not re.search("destroy_process_group|leaked", printed)
    return sorted(path.read_text().split()[1:] for path in folder.glob("*.txt"))


def expected() -> list[str]:
    """The result of one device."""
    L.seed_everything(3, verbose=False)
    module, trainer = LitModel("mlp"), make_trainer(max_epochs=1)
    trainer.fit(module, make_loader("mlp"))
    tested = trainer.test(module, make_loader("mlp", num_samples=20), verbose=False)[0]["test_loss_epoch"]
    return [f"{tested:.7f}", f"{sum(float(value.double().sum()) for value in module.state_dict().values()):.7f}"]


def assert_two_ranks(found: list[list[str]]) -> None:
    assert [line[:3] for line in found] == [["0", "0", "1"], ["1", "1", "1"]]  # the Trainer knows its rank from the start
    for line in found:
        assert [float(number) for number in line[3:]] == pytest.approx([float(n) for n in expected()], rel=1e-5, abs=1e-5)


def test_a_script_starts_its_other_processes(tmp_path: Path) -> None:
    assert_two_ranks(reports(tmp_path, start([sys.executable, script(tmp_path)], tmp_path)))


def test_an_interactive_session_forks_and_gets_the_trained_module(tmp_path: Path) -> None:
    path = script(tmp_path, first_lines="sys.ps1 = '>>> '")  # by which Python and Lightning know one
    (line,) = reports(tmp_path, start([sys.executable, path], tmp_path))
    assert line[:3] == ["0", "0", "1"]
    assert [float(number) for number in line[3:]] == pytest.approx([float(n) for n in expected()], rel=1e-5, abs=1e-5)


def test_no_process_is_left_where_the_first_never_meets_the_others(tmp_path: Path) -> None:
    """Its port was taken: it ended with an error, and the other process went on waiting at whoever had taken it."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        process = start([sys.executable, script(tmp_path)], tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        try:
            printed, _ = process.communicate(timeout=100)  # once nobody is left who could print
        finally:
            process.kill()
    assert process.returncode == 1
    assert "EADDRINUSE" in printed


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    assert_two_ranks(reports(tmp_path, start([*command, script(tmp_path)], tmp_path)))


@pytest.mark.slow
def test_slurm(tmp_path: Path) -> None:
    path, port = script(tmp_path), free_port()
    job = {"SLURM_JOB_ID": 7, "SLURM_JOB_NAME": "train", "SLURM_NTASKS": 2, "SLURM_NTASKS_PER_NODE": 2, "SLURM_NNODES": 1}
    place = {"SLURM_NODEID": 0, "SLURM_NODELIST": "127.0.0.1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in range(2)]
    assert_two_ranks(reports(tmp_path, *(start([sys.executable, path], tmp_path, **job, **place, **rank) for rank in ranks)))


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_processes_started_by_hand(tmp_path: Path, nodes: int) -> None:
    path, port = script(tmp_path, {"devices": 2 // nodes, "num_nodes": nodes}), free_port()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2}
    ranks = [{"LOCAL_RANK": rank if nodes == 1 else 0, "NODE_RANK": 0 if nodes == 1 else rank} for rank in range(2)]
    assert_two_ranks(reports(tmp_path, *(start([sys.executable, path], tmp_path, **place, **rank) for rank in ranks)))


def test_processes_that_are_spawned(tmp_path: Path) -> None:
    path = script(tmp_path, first_lines="import lightning_fxpipe")
    path.write_text(path.read_text().replace('"fxpipe"', "lightning_fxpipe.FxPipeStrategy(start_method='spawn')"))
    (line,) = reports(tmp_path, start([sys.executable, path], tmp_path))
    assert [float(number) for number in line[3:]] == pytest.approx([float(n) for n in expected()], rel=1e-5, abs=1e-5)


def test_a_strategy_can_be_pickled_before_it_has_run() -> None:
    """Processes that are spawned get it so, and wrappers save the Trainer's arguments; a lambda in it prevented both."""
    copied = pickle.loads(pickle.dumps(FxPipeStrategy(num_stages=3, num_microbatches=2)))
    assert make_trainer(strategy=copied, devices=3).strategy is copied


def test_one_device_starts_no_process_and_runs_in_a_notebook() -> None:
    launcher = make_trainer(strategy="fxpipe", devices=1).strategy.launcher
    assert launcher is not None
    assert launcher.is_interactive_compatible
    assert launcher.launch(lambda value: value + 1, 2) == 3


def test_an_interactive_session_that_would_lose_the_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert make_trainer(strategy="fxpipe", devices=2).strategy.launcher.is_interactive_compatible
    with pytest.raises(UnsupportedError, match="The trained parameters would be lost"):
        make_trainer(strategy=FxPipeStrategy(gather_after_run=False), devices=2)


def test_an_unknown_start_method_is_refused() -> None:
    with pytest.raises(ValueError, match="start_method='thread'"):
        FxPipeStrategy(start_method="thread")  # type: ignore[arg-type]
