"""Kills a training with SIGKILL, in the middle of saving too, and resumes it. ``python -m tests.ranks.kills`` does it.

One process imports torch and Lightning and forks the ranks of each case. A rank kills itself at a certain call: the end of a
batch, the writing of a checkpoint, which is in slow motion, or anything that changes the file system.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_port

BATCHES, EPOCHS, EVERY = 5, 3, 2
_HARD_LIMIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kill.

    Attributes:
        stages: Of the run that is killed.
        resumed: Stages of the run that goes on.
        rank: That is killed first.
        at: At which call on this rank.
        all_at_once: Whether the other ranks are killed right after it, as where a machine goes down.
        async_save: Whether it saves in the background.
        save_last: For ``ModelCheckpoint``.
        can_exchange: Whether the file system can swap two names.
    """

    stages: int
    resumed: int
    rank: int
    at: int
    all_at_once: bool
    async_save: bool
    save_last: bool | str
    can_exchange: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a case ended.

    Attributes:
        killed_in: What the rank was about to do; None where it came to the end.
        finished: Step of the last checkpoint that was known to be complete before.
        resumed_at: Step at which the run went on; None where it failed.
        difference: Largest one of losses and weights to the run that nobody killed.
        complaints: What is not as it must be.
    """

    killed_in: str | None
    finished: int
    resumed_at: int | None
    difference: float
    complaints: list[str]


def random_cases(seed: int, count: int) -> list[Case]:
    """Ranks and moments, chosen at random."""
    choose = random.Random(seed)
    cases = []
    for _ in range(count):
        stages = choose.choice([2, 3])
        rank = choose.randrange(stages)
        cases.append(
            Case(
                stages=stages,
                resumed=choose.choice([other for other in (1, 2, 3) if other != stages]),
                rank=rank,
                at=choose.randrange(2, 100) if rank == 0 else choose.randrange(2, 28),
                all_at_once=choose.random() < 0.5,
                async_save=choose.random() < 0.5,
                save_last=choose.choice([True, "link"]),
                can_exchange=choose.random() < 0.5,
            )
        )
    return cases


# ---------------------------------------------------------------------------------------------------- a rank


def _train(case: Case, folder: Path, stages: int, *, rank: int, killed: bool) -> None:
    """What a user's script does: it goes on from the last checkpoint, where there is one."""
    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch import nn
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    import lightning_fxpipe
    from lightning_fxpipe.checkpoint import atomic as replacing
    from lightning_fxpipe.checkpoint import saving
    from tests.stateful import Loader

    name = f"ended{rank}" if killed else f"resumed{rank}"
    calls = 0

    def about_to(what: str) -> None:
        nonlocal calls
        if not killed or rank != case.rank or not (folder / "started").exists():
            return
        calls += 1
        if calls == case.at:
            (folder / "killed").write_text(what)
            os.kill(os.getpid(), signal.SIGKILL)

    def before(owner: Any, function: str, slow: float = 0.0) -> None:
        original = getattr(owner, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            about_to(function)
            time.sleep(slow)  # so that the kill arrives while it is being done
            about_to(f"{function}, later")
            return original(*args, **kwargs)

        setattr(owner, function, call)

    if not case.can_exchange:
        replacing._exchange = lambda one, other: False
    if killed:

        class Slow(FileSystemWriter):
            """In slow motion, and in two halves."""

        before(Slow, "write_data", 0.02)
        before(Slow, "finish", 0.02)
        saving.FileSystemWriter = Slow  # type: ignore[misc]
        for function in ("rename", "replace", "unlink", "rmdir", "symlink"):
            before(os, function)
        before(replacing, "_exchange")

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.model = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)), nn.Linear(12, 5))
            self.losses: dict[int, float] = {}
            self.began = -1

        def on_train_start(self) -> None:
            self.began = self.trainer.global_step
            if self.trainer.is_global_zero:
                (folder / "started").touch()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses[self.trainer.global_step] = float(outputs["loss"])
            complete = [int(path.stem.split("=")[1].split("-")[0]) for path in (folder / "checkpoints").glob("step=*.ckpt")]
            if killed and complete and self.trainer.is_global_zero:
                (folder / "finished").write_text(str(max(complete)))
            about_to("go on after a batch")

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    keep = ModelCheckpoint(
        dirpath=folder / "checkpoints", filename="{step}", every_n_train_steps=EVERY, save_last=case.save_last, save_top_k=1
    )
    strategy = lightning_fxpipe.FxPipeStrategy(
        num_microbatches=2, async_save=case.async_save, save_distributed_checkpoint=True, gather_after_run=False
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=max(stages, 1),
        strategy=strategy if stages else "auto",
        max_epochs=EPOCHS,
        logger=False,
        callbacks=[keep] if stages else [],
        enable_checkpointing=bool(stages),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, Loader(), ckpt_path="last" if stages and not killed else None)
    weights = {fqn: p.detach().clone() for fqn, p in module.named_parameters() if not p.is_meta}
    torch.save({"began": module.began, "losses": module.losses, "weights": weights}, folder / name)


def _run_rank(case: Case, folder: Path, stages: int, rank: int, port: int, killed: bool) -> None:
    output = os.open(folder / f"out{rank}-{killed}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": max(stages, 1), "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1"})
    code = 0
    try:
        _train(case, folder, stages, rank=rank, killed=killed)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    sys.stderr.flush()
    os._exit(code)


# ---------------------------------------------------------------------------------------------------- the server


def _run(case: Case, folder: Path, stages: int, *, killed: bool) -> list[int]:
    """Runs the ranks; returns their exit statuses, negative for signals."""
    port = free_port()
    pids = []
    for rank in range(max(stages, 1)):
        pid = os.fork()
        if pid == 0:
            _run_rank(case, folder, stages, rank, port, killed)
        pids.append(pid)
    codes: dict[int, int] = {}
    deadline = time.monotonic() + _HARD_LIMIT_SECONDS
    while len(codes) < len(pids):
        for pid in [pid for pid in pids if pid not in codes]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        a_rank_was_killed = killed and case.all_at_once and -signal.SIGKILL in codes.values()
        if a_rank_was_killed or time.monotonic() > deadline:
            for pid in [pid for pid in pids if pid not in codes]:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)  # several processes are waited for, and each has a deadline
    return [codes[pid] for pid in pids]


def _outcome(case: Case, reference: dict[str, Any]) -> Outcome:
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run(case, folder, case.stages, killed=True)
        killed_in = (folder / "killed").read_text() if (folder / "killed").exists() else None
        finished = int((folder / "finished").read_text() or 0) if (folder / "finished").exists() else 0
        codes = _run(case, folder, case.resumed, killed=False)
        texts = [(folder / f"out{rank}-False").read_text()[-1500:] for rank in range(case.resumed)]
        complaints = [f"the resumed run ended with {codes}: {texts}"] if any(codes) else []
        results = [torch.load(path) for path in sorted(folder.glob("resumed*"))]
        left = sorted(path.name for path in (folder / "checkpoints").iterdir() if not path.name.endswith(".ckpt"))
        in_hidden = [p.name for p in (folder / "checkpoints" / ".unfinished").glob("*/*")]
    if complaints:
        return Outcome(killed_in=killed_in, finished=finished, resumed_at=None, difference=float("inf"), complaints=complaints)
    began = results[0]["began"]
    # The moment of the kill may lie between a checkpoint's end and the note of it.
    if not finished <= began <= finished + 2 * EVERY:
        complaints.append(f"{finished} steps were saved, the run went on at {began}")
    if left not in ([], [".unfinished"]) or in_hidden:
        complaints.append(f"left over: {left} {in_hidden}")
    differences = [abs(loss - reference["losses"][step]) for r in results for step, loss in r["losses"].items()]
    differences += [float((w - reference["weights"][n]).abs().max()) for r in results for n, w in r["weights"].items()]
    if any(len(r["losses"]) != BATCHES * EPOCHS - began for r in results):
        complaints.append(f"steps after {began}: {[sorted(r['losses']) for r in results]}")
    if max(differences, default=0.0) > 2e-6:
        complaints.append(f"differs by {max(differences)}")
    return Outcome(
        killed_in=killed_in,
        finished=finished,
        resumed_at=began,
        difference=max(differences, default=0.0),
        complaints=complaints,
    )


def _serve() -> None:
    import torch

    import tests.ranks.imported  # noqa: F401

    some = Case(**json.loads(sys.stdin.readline()))
    with tempfile.TemporaryDirectory() as folder:
        _run(some, Path(folder), 0, killed=False)
        reference = torch.load(Path(folder, "resumed0"))
    for line in sys.stdin:
        print(json.dumps(dataclasses.asdict(_outcome(Case(**json.loads(line)), reference))), flush=True)


def run_cases(cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
    """Runs cases one after the other in a server of their own."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.ranks.kills"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        for case in (cases[0], *cases):
            server.stdin.write(json.dumps(dataclasses.asdict(case)) + "\n")
        server.stdin.close()
        for case in cases:
            line = server.stdout.readline()
            assert re.match(r"\{", line), f"the server has ended: {line}"
            yield case, Outcome(**json.loads(line))
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    _serve()
