"""Step time and memory of one GPT: one process, a hand-written pipeline, and ``Trainer(strategy="fxpipe")``.

    python benchmarks/step_time.py                       # a compute-bound size, two processes
    python benchmarks/step_time.py --stages 2 --microbatches 16 --rounds 5

Four candidates run the same model on the same batches, in alternation (A B C D A B C D ...):

  (a) single   one process, accumulating over the same microbatches
  (b) whole    one process, each batch at once
  (c) torch    a training loop written by hand on torch.distributed.pipelining, with the same cut and schedule
  (d) fxpipe   Trainer(strategy="fxpipe") on an ordinary LightningModule

Each runs in processes of its own with one thread each. A step's time is the period between the ends of two successive
optimizer steps, of the slowest rank; a run's time is the median over its steps. The table gives the median and the range over
the rounds, and ratios within each round. Efficiency is (a) / (stages x step); its ideal is M / (M + P - 1). Memory is the
largest resident set of the rank that takes most, over what the imports take.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

CANDIDATES = ("single", "whole", "torch", "fxpipe")
MIB = 1024 * 1024


@dataclass(frozen=True)
class Work:
    """One size of the work, equal for all candidates."""

    dim: int = 384
    num_layers: int = 8
    num_heads: int = 6
    context: int = 128
    batch_size: int = 16
    microbatches: int = 8
    stages: int = 2
    schedule: str = "1f1b"
    warmup_steps: int = 3
    steps: int = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Work()
    for name, value in asdict(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--rounds", type=int, default=5, help="how often each candidate runs")
    parser.add_argument("--output", type=Path, help="write every run's step times here as JSON")
    parser.add_argument("--worker", nargs=2, metavar=("CANDIDATE", "FILE"), help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    rounds, output, worker = options.pop("rounds"), options.pop("output"), options.pop("worker")
    work = Work(**options)
    if worker:
        run_worker(worker[0], Path(worker[1]), work)
        return
    times: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    losses: dict[str, list[float]] = {}
    peaks: dict[str, float] = {}
    for index in range(rounds):
        for name in CANDIDATES:
            step_ms, peak_mib, losses[name] = launch(name, work)
            peaks[name] = max(peak_mib, peaks.get(name, 0.0))
            times[name].append(step_ms)
            print(f"round {index + 1}/{rounds}  {name:7s} {step_ms:8.1f} ms", file=sys.stderr, flush=True)
    report(work, times, losses, peaks)
    if output:
        found = {"work": asdict(work), "step_ms": times, "peak_mib": peaks, "losses": losses}
        output.write_text(json.dumps(found, indent=1))


def report(work: Work, times: dict[str, list[float]], losses: dict[str, list[float]], peaks: dict[str, float]) -> None:
    """Prints the table, and whether all did the same work."""
    from lightning_fxpipe.reporting.table import render_table

    # GPipe and 1F1B with equal stages idle (P-1)/(M+P-1) of a step (arXiv 1811.06965, section 2.3).
    ideal = 1 - (work.stages - 1) / (work.microbatches + work.stages - 1)
    rows = []
    for name in CANDIDATES:
        ratios = [t / b for t, b in zip(times[name], times["torch"], strict=True)]
        efficiencies = [a / (work.stages * t) for t, a in zip(times[name], times["single"], strict=True)]
        difference = max(abs(x - y) for x, y in zip(losses[name], losses["single"], strict=True))
        rows.append(
            (
                name,
                spread(times[name], "{:.0f}"),
                spread(ratios, "{:.3f}"),
                spread(efficiencies, "{:.3f}") if name in ("torch", "fxpipe") else "-",
                f"{ideal:.3f}" if name in ("torch", "fxpipe") else "-",
                f"{peaks[name]:.0f}",
                f"{difference:.1e}",
            )
        )
    headers = ("Candidate", "Step ms", "Ratio to torch", "Efficiency", "Ideal", "Peak MiB", "Largest loss difference")
    print(render_table(f"Step time: {work}", headers, rows, right_aligned=headers[1:]))


def spread(values: list[float], form: str) -> str:
    middle, low, high = (form.format(v) for v in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low}-{high})"


def launch(candidate: str, work: Work) -> tuple[float, float, list[float]]:
    """Runs one candidate in fresh processes; returns its step time in milliseconds, its peak in MiB and its losses."""
    world_size = work.stages if candidate in ("torch", "fxpipe") else 1
    flags = [part for key, value in asdict(work).items() for part in (f"--{key.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        run_ranks([__file__, *flags, "--worker", candidate], folder, world_size)
        reports = [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(world_size)]
    step_ms, peak_mib = (max(report[key] for report in reports) for key in ("step_ms", "peak_mib"))
    return step_ms, peak_mib, next(r["losses"] for r in reports if r["losses"])


def run_ranks(command: list[str], folder: str, world_size: int) -> None:
    """Runs a program in a process for each rank, with one thread each; its last argument is where a rank writes its report."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(world_size):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        with open(f"{folder}/{rank}.log", "w") as log:
            arguments = [sys.executable, *command, f"{folder}/{rank}.json"]
            processes.append(subprocess.Popen(arguments, env=environment, stdout=log, stderr=subprocess.STDOUT))
    codes = [process.wait(timeout=900) for process in processes]
    if any(codes):
        logs = "\n".join(Path(f"{folder}/{rank}.log").read_text()[-3000:] for rank in range(world_size))
        raise SystemExit(f"{' '.join(command)} failed:\n{logs}")


# --------------------------------------------------------------------------- in the ranks


class Clock:
    """Notes the end of each optimizer step and, on the rank that has it, the loss."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._ends: list[float] = []
        self._base_bytes = resident_bytes("VmRSS")
        self.losses: list[float] = []

    def step_done(self, loss: Any) -> None:
        self._ends.append(time.perf_counter())
        if loss is not None:
            self.losses.append(float(loss))

    def report(self) -> dict[str, Any]:
        ends = self._ends[self._work.warmup_steps - 1 :]
        return {
            "step_ms": 1000 * statistics.median(b - a for a, b in zip(ends, ends[1:], strict=False)),
            "peak_mib": (resident_bytes("VmHWM") - self._base_bytes) / MIB,
            "losses": self.losses,
        }


def resident_bytes(field: str) -> int:
    """The resident set of this process, now (``VmRSS``) or at its largest (``VmHWM``)."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


def run_worker(candidate: str, output: Path, work: Work) -> None:
    import lightning  # noqa: F401  here for all: what imports take is no candidate's
    import torch

    import lightning_fxpipe  # noqa: F401

    torch.set_num_threads(1)
    clock = Clock(work)
    runners = {"single": run_single, "whole": run_whole, "torch": run_torch, "fxpipe": run_fxpipe}
    runners[candidate](work, clock)
    output.write_text(json.dumps(clock.report()))


def make_model(work: Work) -> Any:
    """The example's GPT, without tied weights: the hand-written loop would have to sum their gradients."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import torch
    from byte_lm import GPT

    torch.manual_seed(0)
    model = GPT(work.dim, work.num_layers, work.num_heads, work.context)
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    return model


def make_batches(work: Work) -> Any:
    """(steps, batch, context + 1) bytes: noisy arithmetic sequences, learnable."""
    import torch

    generator = torch.Generator().manual_seed(1)
    shape = (work.warmup_steps + work.steps, work.batch_size, 1)
    start = torch.randint(0, 256, shape, generator=generator)
    stride = torch.randint(1, 8, shape, generator=generator)
    return (start + stride * torch.arange(work.context + 1)) % 256


def loss_of(logits: Any, targets: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=3e-4)


def make_callback(clock: Clock) -> Any:
    """A callback that notes the end of each step."""
    import lightning as L

    class Report(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            clock.step_done(outputs["loss"] if outputs else None)

    return Report()


def make_module(work: Work) -> Any:
    """The GPT as a LightningModule whose batches are token ids with one more column than the context."""
    import lightning as L

    class LitGPT(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(work)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            (ids,) = batch
            return loss_of(self.model(ids[:, :-1]), ids[:, 1:])

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.parameters())

    return LitGPT()


def make_trainer(work: Work, callback: Any, **options: Any) -> Any:
    """A Trainer with a pipeline of the work's stages; ``options`` are the strategy's, and override those of the work."""
    from lightning_fxpipe import FxPipeStrategy

    options = {"num_microbatches": work.microbatches, "schedule": work.schedule} | options
    return trainer_with(FxPipeStrategy(**options), work.stages, callback)


def trainer_with(strategy: Any, devices: int, callback: Any) -> Any:
    """A Trainer that only trains, for one epoch, and calls the callback."""
    import lightning as L

    return L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )


def run_whole(work: Work, clock: Clock) -> None:
    run_single(replace(work, microbatches=1), clock)


def run_single(work: Work, clock: Clock) -> None:
    model = make_model(work)
    optimizer = make_optimizer(model.parameters())
    for batch in make_batches(work):
        total = 0.0
        for part in batch.chunk(work.microbatches):
            loss = loss_of(model(part[:, :-1]), part[:, 1:]) / work.microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        clock.step_done(total)


def make_stage(work: Work, rank: int) -> Any:
    """One stage's module where the planner cuts, a microbatch, and for each stage what it sends, without values."""
    import torch

    from lightning_fxpipe.planner.follow_plan import follow_plan
    from lightning_fxpipe.planner.step_plan import make_plan
    from lightning_fxpipe.stages.build import build_stage
    from lightning_fxpipe.tracing.recordable import RegionCall
    from lightning_fxpipe.tracing.trace import trace_region

    model = make_model(work)
    example = torch.zeros(work.batch_size // work.microbatches, work.context, dtype=torch.long)
    plan = make_plan(model, example, num_stages=work.stages)
    call = RegionCall(path="", args=(example,), kwargs={}, batch_size=len(example))
    assignment = follow_plan(plan, trace_region(model, call, opened=plan.opened))
    module = build_stage(assignment, rank).module
    return module, example, [[torch.empty(t.shape, requires_grad=t.requires_grad) for t in s.outputs] for s in plan.stages]


def run_torch(work: Work, clock: Clock) -> None:
    """What a user writes today: stage modules cut by hand where the planner cuts, shapes given, a schedule, a loop."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), work.stages - 1
    module, example, boundary = make_stage(work, rank)
    logits = torch.empty(*example.shape, 256, requires_grad=True)

    class LastStage(torch.nn.Module):
        """Returns the logits themselves, as loss_fn wants them."""

        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *received: torch.Tensor) -> torch.Tensor:
            return self.module(*received)[0]

    stage = PipelineStage(
        LastStage() if rank == last else module,
        rank,
        work.stages,
        torch.device("cpu"),
        input_args=(example,) if rank == 0 else tuple(boundary[rank - 1]),
        output_args=(logits,) if rank == last else tuple(boundary[rank]),
    )
    optimizer = make_optimizer([p for _, p in module.named_parameters()])
    schedule = (Schedule1F1B if work.schedule == "1f1b" else ScheduleGPipe)(stage, work.microbatches, loss_fn=loss_of)
    for batch in make_batches(work):
        losses: list[Any] = []
        if rank == 0:
            schedule.step(batch[:, :-1])
        elif rank == last:
            schedule.step(target=batch[:, 1:], losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        clock.step_done(torch.stack([loss.detach() for loss in losses]).mean() if losses else None)
    dist.destroy_process_group()


def run_fxpipe(work: Work, clock: Clock, **options: Any) -> Any:
    """Trains; returns the strategy. ``options`` are more of the strategy's, or others than those of the work."""
    from torch.utils.data import DataLoader, TensorDataset

    trainer = make_trainer(work, make_callback(clock), **options)
    batches = make_batches(work)
    trainer.fit(make_module(work), DataLoader(TensorDataset(batches.flatten(0, 1)), batch_size=work.batch_size))
    return trainer.strategy


if __name__ == "__main__":
    main()
