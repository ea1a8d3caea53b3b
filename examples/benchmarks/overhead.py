"""What ``Trainer(strategy="fxpipe")`` spends in a step besides the schedule, by part.

    python examples/benchmarks/overhead.py                    # a compute-bound GPT, two processes
    python examples/benchmarks/overhead.py --logged 20 --output overhead.json

Each rank's main thread keeps the time that it works, not the time that it waits (``time.thread_time``), so other programs on
the machine change little. The time of a step is divided among the parts below; a part's time is without that of parts inside.
What the strategy adds is compared with the whole step.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from step_time import Work, loss_of, make_batches, make_model, make_optimizer, make_trainer

# Where the time goes that one device would need, too, and the schedule's; everything else is the strategy's.
NOT_OURS = ("stages", "user's step", "schedule and backward", "Lightning and optimizer")


class Parts:
    """Divides this thread's working time among parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.after_steps: list[dict[str, float]] = []
        self._stack = ["Lightning and optimizer"]
        self._since = time.thread_time()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._enter(name)
        try:
            yield
        finally:
            self._leave()

    def _enter(self, name: str) -> None:
        self._charge()
        self._stack.append(name)

    def _leave(self) -> None:
        self._charge()
        self._stack.pop()

    def _charge(self) -> None:
        now = time.thread_time()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def end_step(self) -> None:
        self._charge()
        self.after_steps.append(dict(self.seconds))

    # ------------------------------------------------------------------ what is measured

    def wrap(self, part: str, owner: Any, name: str) -> None:
        """Charges calls of ``owner.name`` to a part."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return function(*args, **kwargs)

        setattr(owner, name, timed)

    def wrap_context(self, part: str, owner: Any, name: str) -> None:
        """Charges entering and leaving the context manager that ``owner.name`` makes to a part; the block is not part of it."""
        make = getattr(owner, name)

        @contextmanager
        def timed(*args: Any, **kwargs: Any) -> Iterator[Any]:
            self._enter(part)
            try:
                with make(*args, **kwargs) as value:
                    self._leave()
                    try:
                        yield value
                    finally:
                        self._enter(part)
            finally:
                self._leave()

        setattr(owner, name, timed)


# Here the strategy does not find it: what a step reaches of its own is the step's, and every rank gets the last stage's.
PARTS: ContextVar[Parts] = ContextVar("parts")


def instrument(parts: Parts) -> None:
    """Wraps the package's functions, by part."""
    import torch

    from lightning_fxpipe.distributed.commands import Commands
    from lightning_fxpipe.hooks.user_hooks import Hooks
    from lightning_fxpipe.metrics.step_log import ResultChannel, StepLog
    from lightning_fxpipe.microbatch.rewind import Rewind
    from lightning_fxpipe.runtime import batch_result, batch_run, one_f_one_b, region_pass, region_run
    from lightning_fxpipe.runtime.attributes import StepAttributes
    from lightning_fxpipe.schedules.pipelining import Pipeline
    from lightning_fxpipe.strategy import session
    from lightning_fxpipe.strategy.strategy import FxPipeStrategy

    for name in ("training_step", "backward", "optimizer_step"):
        parts.wrap("strategy hooks", FxPipeStrategy, name)
    parts.wrap_context("user hooks see the whole model", Hooks, "running")
    parts.wrap_context("user hooks see the whole model", Hooks, "suspend")
    parts.wrap("split the batch", batch_run, "count_samples")
    parts.wrap("find trace and schedule", batch_run.BatchTraces, "find")
    parts.wrap("find trace and schedule", batch_run.PassSetups, "get")
    parts.wrap("random numbers", region_pass, "seed_generators")
    for module in (batch_result, batch_run, region_run):
        parts.wrap("random numbers", module, "rng_state")
    for name in ("rewind", "have_drawn"):
        parts.wrap("random numbers", Rewind, name)
    parts.wrap_context("logging", StepLog, "capture")
    parts.wrap("logging", StepLog, "_add")
    parts.wrap("logging", session, "replay")
    parts.wrap("share with the other ranks", ResultChannel, "share")
    for name in ("tell", "hears_of", "hear"):
        parts.wrap("share with the other ranks", Commands, name)
    for name in ("__init__", "begin_region", "changes"):
        parts.wrap("attributes of the module", StepAttributes, name)
    for name in ("parameters_by_name", "check_same_parameters"):
        parts.wrap("parameters of the module", session, name)
    parts.wrap("metrics of the module", session, "held_metrics")
    for name in ("__init__", "changes"):
        parts.wrap("metrics of the module", session.MetricStates, name)
    for name in ("_forward_one", "_backward_one"):
        parts.wrap("around the microbatches", region_pass.RegionPass, name)
    parts.wrap("around the microbatches", one_f_one_b.InterleavedPass, "_one")
    parts.wrap("step of each microbatch, undone", one_f_one_b.StepTail, "run")
    parts.wrap("Lightning and optimizer", torch.optim.Optimizer, "zero_grad")
    parts.wrap("Lightning and optimizer", torch.optim.AdamW, "step")
    parts.wrap("schedule and backward", Pipeline, "step")
    parts.wrap("schedule and backward", torch.autograd, "backward")
    parts.wrap("whole batch", batch_run.PipelineRuntime, "run")
    compute = region_pass.StageRun.compute

    def timed_compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.setup.stage.module
        if not hasattr(module, "timed"):
            module.timed = True
            parts.wrap("stages", module, "forward")
        return compute(self, *args, **kwargs)

    region_pass.StageRun.compute = timed_compute  # type: ignore[method-assign]


# --------------------------------------------------------------------------- in the ranks


def run_worker(work: Work, logged: int, output: Path) -> None:
    import lightning as L
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    parts = Parts()
    instrument(parts)
    PARTS.set(parts)

    class LitGPT(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(work)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with PARTS.get().part("user's step"):
                (ids,) = batch
                loss = loss_of(self.model(ids[:, :-1]), ids[:, 1:])
                for index in range(logged):
                    self.log(f"loss_{index}", loss, on_step=True, on_epoch=True)
                return loss

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.parameters())

    class Snapshots(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            PARTS.get().end_step()

    trainer = make_trainer(work, Snapshots())
    batches = make_batches(work)
    trainer.fit(LitGPT(), DataLoader(TensorDataset(batches.flatten(0, 1)), batch_size=work.batch_size))
    measured = parts.after_steps[work.warmup_steps - 1 :]
    steps = [{name: b[name] - a.get(name, 0.0) for name in b} for a, b in zip(measured, measured[1:], strict=False)]
    output.write_text(json.dumps(steps))


# --------------------------------------------------------------------------- the table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Work(warmup_steps=10, steps=20)).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--logged", type=int, default=3, help="values that the step logs")
    parser.add_argument("--output", type=Path, help="write every step's times here as JSON")
    parser.add_argument("--worker", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    logged, output, worker = options.pop("logged"), options.pop("output"), options.pop("worker")
    work = Work(**options)
    if worker:
        run_worker(work, logged, worker)
        return
    steps = launch(work, logged)
    report(work, logged, steps)
    if output:
        output.write_text(json.dumps({"work": asdict(work), "logged": logged, "seconds": steps}, indent=1))


def launch(work: Work, logged: int) -> list[list[dict[str, float]]]:
    """Each rank's steps: seconds by part."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [part for key, value in asdict(work).items() for part in (f"--{key.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(work.stages):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(work.stages),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, __file__, *flags, "--logged", str(logged), "--worker", f"{folder}/{rank}.json"]
            with open(f"{folder}/{rank}.log", "w") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        codes = [process.wait(timeout=900) for process in processes]
        if any(codes):
            logs = "\n".join(Path(f"{folder}/{rank}.log").read_text()[-3000:] for rank in range(work.stages))
            raise SystemExit(f"A rank failed:\n{logs}")
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(work.stages)]


def report(work: Work, logged: int, ranks: list[list[dict[str, float]]]) -> None:
    """Prints each part's median time per step, and its share of the median step, for each rank."""
    from lightning_fxpipe.reporting.table import render_table

    def median(of: Callable[[dict[str, float]], float], rank: int) -> float:
        return statistics.median(of(step) for step in ranks[rank])

    totals = [median(lambda step: sum(step.values()), rank) for rank in range(len(ranks))]
    names = sorted({name for steps in ranks for step in steps for name in step}, key=lambda n: (n not in NOT_OURS, n))

    def row(name: str, of: Callable[[dict[str, float]], float]) -> tuple[str, ...]:
        times = [median(of, rank) for rank in range(len(ranks))]
        cells = [(f"{1000 * t:.2f}", f"{100 * t / total:.2f} %") for t, total in zip(times, totals, strict=True)]
        return (name, *(cell for pair in cells for cell in pair))

    rows = [row(name, lambda step, name=name: step.get(name, 0.0)) for name in names]  # type: ignore[misc]
    rows.append(row("The strategy, all parts", lambda step: sum(t for name, t in step.items() if name not in NOT_OURS)))
    rows.append(row("The step", lambda step: sum(step.values())))
    headers = ("Part", *(text for rank in range(len(ranks)) for text in (f"Rank {rank} ms", "Share")))
    print(render_table(f"Working time of a step: {work}, {logged} logged values", headers, rows, right_aligned=headers[1:]))


if __name__ == "__main__":
    main()
