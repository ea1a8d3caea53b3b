"""What a training step takes on one GPU: time, work of the host, waits of the host, memory.

    python benchmarks/gpu_time.py                     # a GPT of 200 M parameters in bf16
    python benchmarks/gpu_time.py --size tiny         # a step that the GPU does in less time than the host asks for it
    python benchmarks/gpu_time.py --accelerator cpu --size tiny     # whether the program itself is in order

All candidates train the same GPT on the same batches, in one process and in alternation:

  by hand              a loop that takes each batch at once
  by hand, parts       a loop that accumulates over the microbatches
  compiled             the first loop, with the model compiled (``--compiled``)
  Lightning            the plain Trainer
  one stage            Trainer(strategy="fxpipe"), a batch at once
  stages               the same in ``--stages`` stages with ``--microbatches`` microbatches

A step's time is the mean over ``--steps`` steps, after which the device is waited for; the host's time is what passes until it
has asked for all of them. Idle is the share of some more steps in which no kernel runs, by ``torch.profiler``. Waits are what
``torch.cuda.set_sync_debug_mode`` reports in other steps, with the lines that ask.
Memory is the most that tensors take.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from step_time import MIB, loss_of, make_model, make_optimizer, spread

CANDIDATES = ("by hand", "by hand, parts", "Lightning", "one stage", "stages")
COMPILED = "compiled"


@dataclass(frozen=True)
class Work:
    """One size of the work, equal for all candidates; the fields that ``step_time.make_model`` reads have its names."""

    dim: int = 1024
    num_layers: int = 16
    num_heads: int = 16
    context: int = 512
    batch_size: int = 32
    microbatches: int = 8
    stages: int = 4
    schedule: str = "gpipe"
    precision: str = "bf16-mixed"
    accelerator: str = "gpu"
    warmup_steps: int = 5
    steps: int = 20
    counted_steps: int = 4
    profiled_steps: int = 2


SIZES = {"large": Work(), "tiny": Work(dim=32, num_layers=4, num_heads=4, context=32, batch_size=16, precision="32-true")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="large", help="what the other options are unless they are given")
    for name, value in asdict(Work()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=None)
    parser.add_argument("--rounds", type=int, default=3, help="how often each candidate runs")
    parser.add_argument("--compiled", action="store_true", help="with the loop whose model is compiled, which takes a minute")
    options = vars(parser.parse_args())
    rounds, size = options.pop("rounds"), options.pop("size")
    candidates = [*CANDIDATES, *([COMPILED] if options.pop("compiled") else [])]
    work = replace(SIZES[size], **{name: value for name, value in options.items() if value is not None})
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in candidates}
    for index in range(rounds):
        for name in candidates:
            runs[name].append(measure(name, work))
            print(f"round {index + 1}/{rounds}  {name:16s} {runs[name][-1]['step_ms']:8.1f} ms", file=sys.stderr, flush=True)
    report(work, runs)


def report(work: Work, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Prints the table, and which lines wait."""
    from lightning_fxpipe.reporting.table import render_table

    rows, reference = [], runs["by hand"]
    for name, rounds in runs.items():
        ratios = [run["step_ms"] / base["step_ms"] for run, base in zip(rounds, reference, strict=True)]
        difference = max(abs(x - y) for x, y in zip(rounds[0]["losses"], reference[0]["losses"], strict=True))
        rows.append(
            (
                name,
                spread([run["step_ms"] for run in rounds], "{:.1f}"),
                spread(ratios, "{:.3f}"),
                spread([run["host_ms"] for run in rounds], "{:.1f}"),
                "-" if rounds[0]["idle"] is None else spread([run["idle"] for run in rounds], "{:.2f}"),
                f"{sum(rounds[0]['waits'].values()):.2g}",
                f"{max(run['peak_mib'] for run in rounds):.0f}",
                f"{difference:.1e}",
            )
        )
    headers = ("Candidate", "Step ms", "Ratio", "Host ms", "Idle", "Waits", "Peak MiB", "Largest loss difference")
    print(render_table(f"On one device: {work}", headers, rows, right_aligned=headers[1:]))
    for name, rounds in runs.items():
        for line, count in rounds[0]["waits"].items():
            print(f"{name}: {count:.2g} a step at {line}")


# --------------------------------------------------------------------------- a run of a candidate


class Meter:
    """Times steps, then counts waits in some more. Called at the end of each step."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._num_steps = 0
        self._begun = 0.0
        self._waits: Counter[str] = Counter()
        self._watching: Any = None
        self._profiler: Any = None
        self._found: dict[str, Any] = {"idle": None}
        self.losses: list[Any] = []

    def step_done(self, loss: Any) -> None:
        work = self._work
        self._num_steps += 1
        self.losses.append(loss.detach())
        if self._num_steps == work.warmup_steps:
            self._wait()
            self._begun = time.perf_counter()
        elif self._num_steps == work.warmup_steps + work.steps + work.counted_steps:
            self._watching.__exit__(None, None, None)
            self._wait()
            self._profiler = kernel_profiler() if work.accelerator == "gpu" else None
        elif self._num_steps == num_steps(work) and self._profiler is not None:
            self._wait()
            self._profiler.stop()
            self._found["idle"] = idle_share(
                (event.time_range.start, event.time_range.end) for event in self._profiler.events()
            )
        elif self._num_steps == work.warmup_steps + work.steps:
            self._found["host_ms"] = 1000 * (time.perf_counter() - self._begun) / work.steps
            self._wait()
            self._found["step_ms"] = 1000 * (time.perf_counter() - self._begun) / work.steps
            self._watching = waits_noted(self._waits)
            self._watching.__enter__()

    def _wait(self) -> None:
        import torch

        if self._work.accelerator == "gpu":
            torch.cuda.synchronize()

    def report(self) -> dict[str, Any]:
        import torch

        waits = {line: count / self._work.counted_steps for line, count in self._waits.items()}
        peak = torch.cuda.max_memory_allocated() if self._work.accelerator == "gpu" else 0
        losses = [float(loss) for loss in self.losses]
        return {**self._found, "waits": waits, "peak_mib": peak / MIB, "losses": losses}


def kernel_profiler() -> Any:
    """A profiler of kernels that runs."""
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA])
    profiler.start()
    return profiler


def idle_share(spans: Iterable[tuple[float, float]]) -> float:
    """The share of the time from the first beginning to the last end in which none of the spans runs."""
    busy = end = 0.0
    begin: float | None = None
    for start, stop in sorted(spans):
        if begin is None:
            begin = end = start
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 0.0 if begin is None or end == begin else 1 - busy / (end - begin)


def num_steps(work: Work) -> int:
    """Steps of a run."""
    return work.warmup_steps + work.steps + work.counted_steps + work.profiled_steps


@contextmanager
def waits_noted(waits: Counter[str]) -> Iterator[None]:
    """Counts by line what makes the host wait for the device."""
    import torch

    def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if "synchroniz" in str(message):
            waits[f"{'/'.join(Path(filename).parts[-3:])}:{lineno}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        yield
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")


def measure(candidate: str, work: Work) -> dict[str, Any]:
    import torch

    if work.accelerator == "gpu":
        gc.collect()  # what the run before has left
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    meter = Meter(work)
    if candidate == COMPILED or candidate.startswith("by hand"):
        work = replace(work, microbatches=work.microbatches if "parts" in candidate else 1)
        run_by_hand(work, meter, compiles=candidate == COMPILED)
    else:
        run_trainer(candidate, work, meter)
    return meter.report()


def make_batches(work: Work) -> Any:
    """(steps, batch, context + 1) bytes: noisy arithmetic sequences, learnable, in memory of the host."""
    import torch

    generator = torch.Generator().manual_seed(1)
    start, stride = (torch.randint(1, 8, (num_steps(work), work.batch_size, 1), generator=generator) for _ in range(2))
    batches = (start + stride * torch.arange(work.context + 1)) % 256
    return batches.pin_memory() if work.accelerator == "gpu" else batches


def run_by_hand(work: Work, meter: Meter, *, compiles: bool) -> None:
    import torch

    device = torch.device("cuda" if work.accelerator == "gpu" else "cpu")
    model = make_model(work).to(device)
    optimizer = make_optimizer(model.parameters())
    model = torch.compile(model) if compiles else model
    for batch in make_batches(work):
        batch, total = batch.to(device, non_blocking=True), torch.zeros((), device=device)
        for part in batch.chunk(work.microbatches):
            with torch.autocast(device.type, torch.bfloat16, enabled=work.precision == "bf16-mixed"):
                loss = loss_of(model(part[:, :-1]), part[:, 1:]) / work.microbatches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        meter.step_done(total)


def run_trainer(candidate: str, work: Work, meter: Meter) -> None:
    import lightning as L
    from torch.utils.data import DataLoader

    from lightning_fxpipe import FxPipeStrategy

    class Lit(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(work)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = loss_of(self.model(batch[:, :-1]), batch[:, 1:])
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.parameters())

    class Ends(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            meter.step_done(outputs["loss"])

    strategies = {
        "one stage": {"num_stages": 1, "num_microbatches": 1},
        "stages": {"num_stages": work.stages, "num_microbatches": work.microbatches, "schedule": work.schedule},
    }
    place = {"strategy": FxPipeStrategy(**strategies[candidate])} if candidate in strategies else {}
    trainer = L.Trainer(
        accelerator=work.accelerator,
        devices=1,
        precision=work.precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ends()],
        **place,
    )
    trainer.fit(Lit(), DataLoader(make_batches(work), batch_size=None))


if __name__ == "__main__":
    main()
