"""Host time of ``Trainer(strategy="fxpipe")`` in a step outside of the pipeline itself, by part.

    python benchmarks/overhead.py                              # a tiny GPT, three stages
    python benchmarks/overhead.py --size all --brief           # five sizes, a line for each rank
    python benchmarks/overhead.py --size modules5000 --microbatches 16 --output overhead.json

A step's time is divided among parts, and a part's time is without that of parts inside. Each rank's main thread keeps the time
that it works (``time.thread_time``), which other programs change little, and the time that it waits. What one device or
a pipeline written by hand would need, too, is not the strategy's: what the stages and the user's step take by themselves,
autograd's backward pass, the optimizer's kernel, Lightning's loops and the user's own loader. Everything else
is: what it adds to the step and the stages while they run, votes, waiting outside of the schedule, the loader's wrapper,
its share of the optimizer step. Means over 100 steps, those with more checks among them.

Each size runs with M and with 2M microbatches of the same size; from the difference comes what a microbatch costs. A machine
that others use, too, works a quarter faster at one time than at another: of several rounds the one counts in which steps took
least.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

# Where the time goes that one device or a pipeline written by hand would need, too.
NOT_OURS = ("stages", "user's step", "backward", "optimizer", "Lightning and the loader")
AROUND = "around the user's step"
WIDTH = 32


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is measured.

    Attributes:
        size: Name of a model in ``MODELS``.
        microbatches: Of a batch.
        rows: Samples in a microbatch.
        stages: Of the pipeline.
        schedule: Its schedule.
        logged: Values that the step logs.
        warmup_steps: Steps that are not measured.
        steps: Steps that are.
    """

    size: str = "tiny"
    microbatches: int = 8
    rows: int = 2
    stages: int = 3
    schedule: str = "1f1b"
    logged: int = 1
    warmup_steps: int = 4
    steps: int = 100


# --------------------------------------------------------------------------- the models


def tiny_gpt() -> Any:
    import step_time

    return step_time.make_model(step_time.Work(dim=WIDTH, num_layers=4, num_heads=4, context=WIDTH))


def mlp(num_layers: int, *, around: int = 0) -> Any:
    """Layers in a row, each with some modules that do nothing around it."""
    from torch import nn

    def layer() -> Any:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *(nn.Identity() for _ in range(around)))

    return nn.Sequential(*(layer() for _ in range(num_layers)))


def many_parameters(num_layers: int, num_each: int) -> Any:
    """Layers with many small parameters each."""
    import torch
    from torch import nn

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(num_each))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.stack(list(self.scales)).mean(0)

    return nn.Sequential(*(Scaled() for _ in range(num_layers)))


MODELS: dict[str, Callable[[], Any]] = {
    "tiny": tiny_gpt,
    "layers200": lambda: mlp(200),
    "modules1000": lambda: mlp(100, around=7),
    "modules5000": lambda: mlp(100, around=47),
    "parameters10000": lambda: many_parameters(100, 100),
}


def make_batches(work: Work) -> Any:
    """(samples, ...): noisy sequences for the GPT, rows of numbers for the others."""
    import step_time
    import torch

    rows = work.rows * work.microbatches
    if work.size == "tiny":
        sizes = step_time.Work(context=WIDTH, batch_size=rows, warmup_steps=work.warmup_steps, steps=work.steps)
        return step_time.make_batches(sizes).flatten(0, 1)
    return torch.randn((work.warmup_steps + work.steps) * rows, WIDTH, generator=torch.Generator().manual_seed(1))


def split(batch: Any) -> tuple[Any, Any]:
    """A batch's inputs and targets."""
    return (batch[:, :-1], batch[:, 1:]) if not batch.is_floating_point() else (batch, batch)


def loss_of(output: Any, targets: Any) -> Any:
    import torch.nn.functional as F

    if targets.is_floating_point():
        return F.mse_loss(output, targets)
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


# --------------------------------------------------------------------------- the clock


@dataclass
class Spent:
    """Seconds that a thread has worked, and seconds that it has waited in addition."""

    worked: float = 0.0
    waited: float = 0.0


class Parts:
    """Divides this thread's time among parts. What the clock itself takes counts for none of them."""

    def __init__(self) -> None:
        self.spent: dict[str, Spent] = defaultdict(Spent)
        self.counts: dict[str, int] = defaultdict(int)  # how often each has begun
        self._inner: dict[str, int] = defaultdict(int)  # how often another part has begun in it
        self.step_alone: list[float] = []  # seconds that the user's step takes for a microbatch by itself
        self._stack = ["Lightning and the loader"]
        self._since = time.thread_time(), time.perf_counter()

    def begin(self) -> None:
        """From here on it counts."""
        self._charge()
        self.spent.clear()
        self.counts.clear()
        self._inner.clear()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._enter(name)
        try:
            yield
        finally:
            self._leave()

    def _enter(self, name: str) -> None:
        self._charge()
        self.counts[name] += 1
        self._inner[self._stack[-1]] += 1
        self._stack.append(name)

    def _leave(self) -> None:
        self._charge()
        self._stack.pop()

    def _charge(self) -> None:
        now = time.thread_time(), time.perf_counter()
        worked, passed = (new - old for new, old in zip(now, self._since, strict=True))
        spent = self.spent[self._stack[-1]]
        spent.worked += worked
        spent.waited += max(0.0, passed - worked)
        self._since = now

    def wrap(self, part: str, owner: Any, *names: str) -> None:
        """Charges calls of the owner's functions to a part."""
        for name in names:
            function = getattr(owner, name)

            @functools.wraps(function)
            def timed(*args: Any, function: Callable[..., Any] = function, **kwargs: Any) -> Any:
                with self.part(part):
                    return function(*args, **kwargs)

            setattr(owner, name, timed)

    def wrap_context(self, part: str, owner: Any, *names: str) -> None:
        """Charges entering and leaving the context managers that they make to a part; the block is not part of it."""
        for name in names:
            make = getattr(owner, name)

            @contextmanager
            def timed(*args: Any, make: Callable[..., Any] = make, **kwargs: Any) -> Iterator[Any]:
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

    def per_step(self, num_steps: int) -> dict[str, tuple[float, float]]:
        """Seconds worked and waited in each part, a step; what runs around the user's step is a part of its own."""
        inside, around = cost_of_clock()
        found = {
            name: (
                max(0.0, spent.worked - self.counts[name] * inside - self._inner[name] * around) / num_steps,
                spent.waited / num_steps,
            )
            for name, spent in self.spent.items()
        }
        found.pop("measuring", None)
        worked, waited = found["user's step"]
        plain = min(worked, statistics.mean(self.step_alone) * self.counts["user's step"] / num_steps)
        return found | {"user's step": (plain, waited), AROUND: (worked - plain, 0.0)}


def cost_of_clock(num_calls: int = 2000) -> tuple[float, float]:
    """Seconds that the clock adds to a part, and to the one around it, each time that it begins."""

    class Nothing:
        def run(self) -> None:
            pass

    found = []
    for _ in range(5):
        plain, parts, owner = Nothing(), Parts(), Nothing()
        parts.wrap("inside", owner, "run")
        parts.begin()
        with parts.part("around"):
            for _ in range(num_calls):
                owner.run()
        start = time.thread_time()
        for _ in range(num_calls):
            plain.run()
        alone = (time.thread_time() - start) / num_calls
        inside, around = (parts.spent[name].worked / num_calls for name in ("inside", "around"))
        found.append((max(0.0, inside - alone / 2), max(0.0, around - alone / 2)))
    return min(found)


# Here the strategy does not find it: what a step reaches of its own is the step's, and every rank gets the last stage's.
PARTS: ContextVar[Parts] = ContextVar("parts")


# --------------------------------------------------------------------------- what is charged to what


def instrument(parts: Parts) -> None:
    """Wraps the package's functions, by part."""
    import lightning as L
    import torch

    from lightning_fxpipe.data.loading import _InStep
    from lightning_fxpipe.distributed.commands import Commands
    from lightning_fxpipe.hooks.old_gradients import OldGradients
    from lightning_fxpipe.hooks.user_hooks import Hooks
    from lightning_fxpipe.metrics.step_log import ResultChannel, StepLog
    from lightning_fxpipe.runtime import batch_run, one_f_one_b, region_pass, region_run, step_tail
    from lightning_fxpipe.runtime.attributes import StepAttributes
    from lightning_fxpipe.runtime.batch_gradients import BatchGradients
    from lightning_fxpipe.schedules.executor import Executor
    from lightning_fxpipe.strategy import session
    from lightning_fxpipe.strategy.strategy import FxPipeStrategy
    from lightning_fxpipe.user_code.members import Members
    from lightning_fxpipe.user_code.step import Step

    L.LightningModule.log = timed_log(L.LightningModule.log)  # before the strategy puts its own in place
    parts.wrap("strategy's hooks", FxPipeStrategy, "training_step", "backward", "optimizer_step", "batch_to_device", "reduce")
    parts.wrap_context("user hooks see the whole model", Hooks, "running", "suspend", "around_optimizers")
    parts.wrap("votes on hooks", Hooks, "_vote")
    parts.wrap("around the loader", _InStep, "__next__")
    parts.wrap("Lightning and the loader", _InStep, "_load_here")
    parts.wrap("split the batch", batch_run, "count_samples")
    parts.wrap("split the batch", region_run, "split_batch")
    parts.wrap("find trace and schedule", batch_run.BatchTraces, "find")
    parts.wrap("find trace and schedule", batch_run.PassSetups, "get")
    parts.wrap("random numbers", region_pass, "seed_generators")
    parts.wrap_context("random numbers", region_pass, "isolated_rng")
    parts.wrap_context("random numbers", one_f_one_b, "isolated_rng")
    parts.wrap("random numbers", step_tail, "rng_state", "set_rng_state", "same_rng")
    parts.wrap("random numbers", region_run, "rng_state")
    parts.wrap_context("logging", StepLog, "capture")
    parts.wrap("logging", StepLog, "_add")
    parts.wrap("logging", session, "replay")
    parts.wrap("share with the other ranks", ResultChannel, "share")
    parts.wrap("share with the other ranks", Commands, "tell", "hears_of", "hear")
    parts.wrap("attributes of the module", StepAttributes, "__init__", "begin_region", "changes")
    parts.wrap("members of the module", Members, "renewed", "flags", "own_parameters")
    parts.wrap("metrics of the module", session, "held_metrics")
    parts.wrap("metrics of the module", session.MetricStates, "__init__", "changes")
    parts.wrap("around the microbatches", region_pass.RegionPass, "_forward_one", "_backward_one")
    parts.wrap("around the microbatches", one_f_one_b.InterleavedPass, "_compute")
    parts.wrap("gradients put in place", BatchGradients, "install")
    parts.wrap_context("gradients put in place", BatchGradients, "computing")
    parts.wrap("gradients put in place", OldGradients, "parameters", "keep_new", "release")
    parts.wrap("step of each microbatch, undone", step_tail.StepTail, "run")
    parts.wrap("whole batch", batch_run.PipelineRuntime, "run")
    parts.wrap("messages and the order of actions", Executor, "step")
    parts.wrap("backward", torch.autograd, "backward")
    parts.wrap("optimizer", torch.optim.AdamW, "step")
    parts.wrap("optimizer", torch.optim.Optimizer, "zero_grad")
    parts.wrap("optimizer", Step, "drop_outdated")  # in place of the former
    time_stages(parts, region_pass.StageRun)


def timed_log(log: Callable[..., None]) -> Callable[..., None]:
    """Lightning's own logging, which one device does, too."""

    @functools.wraps(log)
    def timed(*args: Any, **kwargs: Any) -> None:
        with PARTS.get().part("Lightning and the loader"):
            log(*args, **kwargs)

    return timed


def time_stages(parts: Parts, runs: Any) -> None:
    """Charges the stages' code, within which nothing of the strategy runs."""
    compute = runs.compute

    def timed_compute(self: Any, leg: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
        module: Any = stage.module
        if not hasattr(module, "timed"):
            module.timed = True
            parts.wrap("stages", module, "forward")
        return compute(self, leg, stage, *args, **kwargs)

    runs.compute = timed_compute


# --------------------------------------------------------------------------- in the ranks


def run_worker(work: Work, output: Path) -> None:
    import lightning as L
    import step_time
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    parts = Parts()
    instrument(parts)
    PARTS.set(parts)

    class Lit(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = MODELS[work.size]()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with PARTS.get().part("user's step"):
                inputs, targets = split(batch[0])
                loss = loss_of(self.model(inputs), targets)
                for index in range(work.logged):
                    self.log(f"loss_{index}", loss, on_step=True, on_epoch=True)
                return loss

        def configure_optimizers(self) -> Any:
            return step_time.make_optimizer(self.parameters())

    samples = make_batches(work)

    class AfterBatch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            parts = PARTS.get()
            with parts.part("measuring"):
                parts.step_alone.append(step_alone(samples[: work.rows]))
            if trainer.global_step == work.warmup_steps:
                # Collections of all that has been imported, 0.3 s each, would fall into one part or another.
                gc.freeze()
                parts.begin()

    trained = step_time.Work(microbatches=work.microbatches, stages=work.stages, schedule=work.schedule)
    trainer = step_time.make_trainer(trained, AfterBatch())
    trainer.fit(Lit(), DataLoader(TensorDataset(samples), batch_size=work.rows * work.microbatches))
    output.write_text(json.dumps(parts.per_step(work.steps)))


def step_alone(samples: Any) -> float:
    """Seconds that the step's code takes for a microbatch, without the model and without logging."""
    import torch

    inputs, targets = split(samples)
    result = torch.randn(*inputs.shape, 256) if not inputs.is_floating_point() else torch.randn_like(inputs)
    result.requires_grad_()
    start = time.thread_time()
    loss_of(result, split(samples)[1])
    return time.thread_time() - start


# --------------------------------------------------------------------------- the tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=(*MODELS, "all"), default="tiny", help="which model")
    for name, value in list(asdict(Work()).items())[1:]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--rounds", type=int, default=1, help="how often each runs; the quickest counts")
    parser.add_argument("--brief", action="store_true", help="no parts: what the strategy takes in all")
    parser.add_argument("--output", type=Path, help="write the times here as JSON")
    parser.add_argument("--worker", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    brief, output, worker, rounds = (options.pop(name) for name in ("brief", "output", "worker", "rounds"))
    work = Work(**options)
    if worker:
        run_worker(work, worker)
        return
    sizes = MODELS if work.size == "all" else (work.size,)
    found: dict[str, list[list[Times]]] = {}
    for size in sizes:
        single = replace(work, size=size)
        pair = single, replace(single, microbatches=2 * work.microbatches)
        runs = [[launch(each) for each in pair] for _ in range(rounds)]
        found[size] = [min(of_each, key=worked_in_all) for of_each in zip(*runs, strict=True)]
        if not brief:
            report_parts(single, found[size][0])
    report(work, found)
    if output:
        output.write_text(json.dumps({"work": asdict(work), "seconds": found}, indent=1))


Times = dict[str, tuple[float, float]]  # seconds worked and waited in a step, by part


def launch(work: Work) -> list[Times]:
    """Each rank's times."""
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
            command = [sys.executable, __file__, *flags, "--worker", f"{folder}/{rank}.json"]
            with open(f"{folder}/{rank}.log", "w") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        codes = [process.wait(timeout=900) for process in processes]
        if any(codes):
            logs = "\n".join(Path(f"{folder}/{rank}.log").read_text()[-3000:] for rank in range(work.stages))
            raise SystemExit(f"A rank failed:\n{logs}")
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(work.stages)]


def report_parts(work: Work, ranks: Sequence[Times]) -> None:
    """Prints what each part takes in a step, for each rank."""
    from lightning_fxpipe.reporting.table import render_table

    names = sorted({name for rank in ranks for name in rank}, key=lambda name: (name not in NOT_OURS, name))
    rows = [(name, *(cell(rank.get(name, (0.0, 0.0))) for rank in ranks)) for name in names]
    rows.append(("The strategy, all parts", *(cell(ours(rank)) for rank in ranks)))
    rows.append(("The step", *(cell(sum_of(rank.values())) for rank in ranks)))
    headers = ("Part", *(f"Rank {rank}: ms + waited" for rank in range(len(ranks))))
    print(render_table(f"A step: {work}", headers, rows, right_aligned=headers[1:]))


def report(work: Work, found: dict[str, list[list[Times]]]) -> None:
    """Prints what the strategy takes on each rank, by size."""
    from lightning_fxpipe.reporting.table import render_table

    rows = []
    for size, (few, many) in found.items():
        for rank, (one, two) in enumerate(zip(few, many, strict=True)):
            all_few, all_many = ours(one)[0], ours(two)[0]
            each = (all_many - all_few) / work.microbatches
            times = (all_few, ours(one)[1], each, all_few - each * work.microbatches, sum_of(one.values())[0])
            rows.append((size, str(rank), *(f"{1000 * seconds:.2f}" for seconds in times)))
    headers = ("Size", "Rank", "Strategy ms", "Waited ms", "Each microbatch", "Else", "Whole step")
    title = f"Working time of the strategy in a step of {work.microbatches} microbatches, {work.stages} stages, {work.schedule}"
    print(render_table(title, headers, rows, right_aligned=headers[1:]))


def worked_in_all(ranks: Sequence[Times]) -> float:
    """Seconds that all ranks together work in a step."""
    return float(sum(sum_of(rank.values())[0] for rank in ranks))


def sum_of(times: Any) -> tuple[float, float]:
    pairs = list(times)
    return sum(worked for worked, _ in pairs), sum(waited for _, waited in pairs)


def ours(rank: Times) -> tuple[float, float]:
    return sum_of(times for name, times in rank.items() if name not in NOT_OURS)


def cell(times: tuple[float, float]) -> str:
    worked, waited = times
    return f"{1000 * worked:.2f} + {1000 * waited:.1f}"


if __name__ == "__main__":
    main()
