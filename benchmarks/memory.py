"""Peak memory of each rank, as a ratio to its share of the model and a fixed base.

    python benchmarks/memory.py                            # 1 GiB, two and four stages
    python benchmarks/memory.py --layers 64 --stages 4     # 2 GiB

The model is made in four ways:

  configure   layers in ``configure_model``
  resume      the same, and the weights come from a checkpoint folder
  meta        a plain module under ``torch.device("meta")``
  plain       a plain module, whole on every rank until the strategy's setup

Each runs in processes of its own with one thread each. What is measured is the largest resident set (``VmHWM``), which is
reset between phases: from the start of the process until training starts (with ``resume``, the checkpoint has been read by
then), while a checkpoint is saved before the first step, and in the first steps. The base is the same of a run with a model of
a few kilobytes. The ratio is the peak by (model / stages + base), of the worst rank. Training holds weights and
gradients: there it is to 2 x model / stages + base. The optimizer is SGD without momentum.

A second table has what a training step takes with each schedule, whose activations are no small part then, and its ratio to

    weights + gradients + activations of N microbatches + 2 x N results at a cut + base

where N is all microbatches with gpipe, and as many as there are stages with 1f1b.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

WAYS = ("configure", "resume", "meta", "plain")
PHASES = ("setup", "save", "train")
MIB = 1024 * 1024


@dataclass(frozen=True)
class Work:
    """The size of the model: each layer has 8 x dim x dim parameters."""

    dim: int = 1024
    layers: int = 34
    steps: int = 2
    batch_size: int = 8
    microbatches: int = 2
    schedule: str = "auto"

    @property
    def num_bytes(self) -> int:
        """Of the parameters."""
        return self.layers * (8 * self.dim * self.dim + 5 * self.dim) * 4

    def step_bytes(self, stages: int) -> float:
        """What a training step takes on a rank at its peak, by the formula.

        A layer keeps its input, and of its wide part what goes into the activation and what comes out.
        """
        alive = min(stages, self.microbatches) if self.schedule == "1f1b" else self.microbatches
        boundary = self.dim * self.batch_size / self.microbatches * 4
        return 2 * self.num_bytes / stages + alive * (9 * self.layers / stages + 2) * boundary


SCHEDULES = ("gpipe", "1f1b")
IN_STEPS = Work(layers=8, steps=3, batch_size=1024, microbatches=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Work()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--schedules", nargs="*", choices=SCHEDULES, default=SCHEDULES, help="for the second table")
    parser.add_argument("--rounds", type=int, default=1, help="how often each runs; the largest peak counts")
    parser.add_argument("--output", type=Path, help="write all peaks here as JSON")
    parser.add_argument("--worker", nargs=2, metavar=("WAY", "FILE"), help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    stages, ways, rounds, output, worker = (options.pop(name) for name in ("stages", "ways", "rounds", "output", "worker"))
    schedules = options.pop("schedules")
    work = Work(**options)
    if worker:
        run_worker(worker[0], Path(worker[1]), work)
        return
    found: dict[str, dict[str, int]] = {}
    for count in stages:
        with tempfile.TemporaryDirectory() as folder:
            tiny = replace(work, dim=8, layers=8)
            runs = [("base", "base", tiny), *((way, way, work) for way in ways)]
            for schedule in schedules:
                size = replace(IN_STEPS, schedule=schedule)
                runs += [(f"base {schedule}", "base", replace(size, dim=8)), (schedule, "configure", size)]
            for index in range(rounds):
                for name, way, size in runs:
                    peaks = launch(way, size, count, Path(folder))
                    before = found.setdefault(f"{name} {count}", dict.fromkeys(PHASES, 0))
                    before.update({phase: max(before[phase], peaks[phase]) for phase in PHASES})
                    print(f"round {index + 1}/{rounds}  {count} stages  {name:9s} {peaks}", file=sys.stderr, flush=True)
    report(work, stages, ways, found)
    report_steps(stages, schedules, found)
    if output:
        output.write_text(json.dumps({"work": asdict(work), "peak_bytes": found}, indent=1))


def report(work: Work, stages: list[int], ways: list[str], found: dict[str, dict[str, int]]) -> None:
    """Prints the table."""
    from lightning_fxpipe.reporting.table import render_table

    rows = []
    for count in stages:
        base = found[f"base {count}"]
        share = work.num_bytes / count
        for way in ways:
            peaks = found[f"{way} {count}"]
            expected = {"setup": share + base["setup"], "save": share + base["save"], "train": 2 * share + base["train"]}
            cells = [f"{peaks[phase] / MIB:.0f} MiB, {peaks[phase] / expected[phase]:.2f}" for phase in PHASES]
            rows.append((way, str(count), f"{share / MIB:.0f} MiB", f"{base['setup'] / MIB:.0f} MiB", *cells))
    headers = ("Made by", "Stages", "Share", "Base", "Setup", "Save", "Train")
    title = f"Peak memory of a rank, and its ratio to share and base: a model of {work.num_bytes / MIB:.0f} MiB"
    print(render_table(title, headers, rows, right_aligned=headers[1:]))


def report_steps(stages: list[int], schedules: list[str], found: dict[str, dict[str, int]]) -> None:
    """Prints the table of schedules."""
    from lightning_fxpipe.reporting.table import render_table

    rows = []
    for count in stages:
        for schedule in schedules:
            peak, base = (found[f"{name} {count}"]["train"] for name in (schedule, f"base {schedule}"))
            expected = replace(IN_STEPS, schedule=schedule).step_bytes(count)
            share, above = IN_STEPS.num_bytes / count, peak - base
            cells = (f"{each / MIB:.0f} MiB" for each in (share, expected, above))
            rows.append((schedule, str(count), *cells, f"{peak / (expected + base):.2f}"))
    headers = ("Schedule", "Stages", "Share", "Formula", "Step, over the base", "Ratio")
    title = f"Peak memory of a rank in a training step: {IN_STEPS.batch_size} samples in {IN_STEPS.microbatches} microbatches"
    print(render_table(title, headers, rows, right_aligned=headers[1:]))


def launch(way: str, work: Work, stages: int, folder: Path) -> dict[str, int]:
    """Runs one way in fresh processes; returns the worst rank's peaks in bytes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [part for key, value in asdict(work).items() for part in (f"--{key.replace('_', '-')}", str(value))]
    processes = []
    for rank in range(stages):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(stages),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, *flags, "--worker", way, f"{folder}/{rank}.json"]
        with open(f"{folder}/{rank}.log", "w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        logs = "\n".join(Path(f"{folder}/{rank}.log").read_text()[-3000:] for rank in range(stages))
        raise SystemExit(f"{way} failed:\n{logs}")
    reports = [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(stages)]
    return {phase: max(report[phase] for report in reports) for phase in PHASES}


# --------------------------------------------------------------------------- in the ranks


def peak_memory() -> int:
    """The largest resident set since the last :func:`reset_peak`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def run_worker(way: str, file: Path, work: Work) -> None:
    import lightning as L
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_fxpipe import FxPipeStrategy

    torch.set_num_threads(1)
    checkpoint = file.parent / "checkpoint"

    def make_layers() -> nn.Module:
        return nn.Sequential(
            *(
                nn.Sequential(nn.Linear(work.dim, 4 * work.dim), nn.GELU(), nn.Linear(4 * work.dim, work.dim))
                for _ in range(work.layers)
            )
        )

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = None if way in ("configure", "resume", "base") else make_layers()

        def configure_model(self) -> None:
            if self.layers is None:
                self.layers = make_layers()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.layers(batch[0]) ** 2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    peaks = {}

    class Measure(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            peaks["setup"] = peak_memory()
            reset_peak()
            trainer.save_checkpoint(checkpoint if way == "configure" else checkpoint.with_name("other"))
            peaks["save"] = peak_memory()
            reset_peak()

        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            peaks["train"] = peak_memory()

    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=FxPipeStrategy(
            num_microbatches=work.microbatches,
            schedule=work.schedule,
            gather_after_run=False,
            save_distributed_checkpoint=True,
        ),
        max_steps=work.steps,
        callbacks=[Measure()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with torch.device("meta" if way == "meta" else "cpu"):
        module = Module()
    data = DataLoader(TensorDataset(torch.randn(work.batch_size * work.steps, work.dim)), batch_size=work.batch_size)
    trainer.fit(module, data, ckpt_path=str(checkpoint) if way == "resume" else None)
    file.write_text(json.dumps(peaks))


if __name__ == "__main__":
    main()
