"""Step time, memory and bytes of a U-Net in four stages: its skips sent directly, and from stage to stage.

    python benchmarks/skips_time.py                  # four processes
    python benchmarks/skips_time.py --schedule gpipe --width 32 --rounds 5

Both candidates run the same model on the same batches, in alternation, each in processes of its own with one thread each. A
step's time is what ``step_time.py`` says. The table gives the median and the range over the rounds, ratios to the first
candidate within each round, the largest resident set over the imports of the rank that takes most, and what all ranks send for
a step: tensors of all microbatches, and their gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from step_time import MIB, Clock, make_callback, make_trainer, run_ranks, spread

CANDIDATES = ("from stage to stage", "directly")


@dataclass(frozen=True)
class Work:
    """One size of the work, equal for both candidates."""

    width: int = 16
    side: int = 64
    batch_size: int = 16
    microbatches: int = 8
    stages: int = 4
    schedule: str = "1f1b"
    warmup_steps: int = 3
    steps: int = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Work()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--rounds", type=int, default=3, help="how often each candidate runs")
    parser.add_argument("--worker", choices=CANDIDATES, help=argparse.SUPPRESS)
    parser.add_argument("output", nargs="?", type=Path, help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    rounds, worker, output = options.pop("rounds"), options.pop("worker"), options.pop("output")
    work = Work(**options)
    if worker is not None:
        run_worker(worker, output, work)
        return
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in CANDIDATES}
    for index in range(rounds):
        for name in CANDIDATES:
            runs[name].append(launch(name, work))
            step_ms = max(each["step_ms"] for each in runs[name][-1])
            print(f"round {index + 1}/{rounds}  {name:20s} {step_ms:8.1f} ms", file=sys.stderr, flush=True)
    report(work, runs)


def launch(candidate: str, work: Work) -> list[dict[str, Any]]:
    """Runs one candidate in fresh processes; returns what each rank reports."""
    flags = [part for key, value in asdict(work).items() for part in (f"--{key.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        run_ranks([__file__, *flags, "--worker", candidate], folder, work.stages)
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(work.stages)]


def report(work: Work, runs: dict[str, list[list[dict[str, Any]]]]) -> None:
    from lightning_fxpipe.reporting.table import render_table

    times = {name: [max(each["step_ms"] for each in ranks) for ranks in found] for name, found in runs.items()}
    first_losses = next(each["losses"] for each in runs[CANDIDATES[0]][0] if each["losses"])
    rows = []
    for name, found in runs.items():
        ratios = [mine / base for mine, base in zip(times[name], times[CANDIDATES[0]], strict=True)]
        peak = statistics.median(max(each["peak_mib"] for each in ranks) for ranks in found)
        losses = next(each["losses"] for each in found[0] if each["losses"])
        difference = max(abs(x - y) for x, y in zip(losses, first_losses, strict=True))
        sent = found[0][0]["sent_mib"]
        rows.append(
            (name, f"{sent:.1f}", spread(times[name], "{:.0f}"), spread(ratios, "{:.3f}"), f"{peak:.0f}", f"{difference:.1e}")
        )
    headers = ("Skips", "MiB sent", "Step ms", "Ratio", "Peak MiB", "Largest loss difference")
    print(render_table(f"Step time: {work}", headers, rows, right_aligned=headers[1:]))


# --------------------------------------------------------------------------- in the ranks


def run_worker(candidate: str, output: Path, work: Work) -> None:
    import lightning  # noqa: F401  here for all: what imports take is no candidate's
    import torch

    from lightning_fxpipe.distributed.topology import Topology

    torch.set_num_threads(1)
    is_direct = candidate == "directly"
    if not is_direct:
        Topology.can_skip = False  # type: ignore[assignment, method-assign]
    clock = Clock(work)  # type: ignore[arg-type]
    plan = train(work, clock).plan
    # Where stages pass a tensor on, it is sent once for each stage that it passes.
    sent = sum(
        (1 if is_direct else out.receiver_stage - stage.index) * out.num_bytes * (2 if out.requires_grad else 1)
        for stage in plan.stages
        for out in stage.outputs
    )
    output.write_text(json.dumps(clock.report() | {"sent_mib": sent * work.microbatches / MIB}))


def train(work: Work, clock: Clock) -> Any:
    """Trains; returns the strategy."""
    import lightning as L
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class LitUNet(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = make_model(work.width)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            noisy, clean = batch
            return torch.nn.functional.mse_loss(self.net(noisy), clean)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(1)
    shape = ((work.warmup_steps + work.steps) * work.batch_size, 1, work.side, work.side)
    clean = torch.rand(shape, generator=generator)
    noisy = clean + 0.1 * torch.randn(shape, generator=generator)
    trainer = make_trainer(work, make_callback(clock))  # type: ignore[arg-type]
    trainer.fit(LitUNet(), DataLoader(TensorDataset(noisy, clean), batch_size=work.batch_size))
    return trainer.strategy


def make_model(width: int) -> Any:
    """A U-Net of three levels, two convolutions each, with skips from each level down to the level up."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    def block(inputs: int, outputs: int) -> Any:
        layers = [(nn.Conv2d(a, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()) for a in (inputs, outputs)]
        return nn.Sequential(*(layer for each in layers for layer in each))

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            w = width
            self.down = nn.ModuleList([block(1, w), block(w, 2 * w), block(2 * w, 4 * w)])
            self.middle = block(4 * w, 4 * w)
            self.up = nn.ModuleList([block(8 * w, 2 * w), block(4 * w, w), block(2 * w, w)])
            self.out = nn.Conv2d(w, 1, 1)

        def forward(self, x: Any) -> Any:
            skips = []
            for down in self.down:
                x = down(x)
                skips.append(x)
                x = F.max_pool2d(x, 2)
            x = self.middle(x)
            for up in self.up:
                skip = skips.pop()
                x = up(torch.cat((F.interpolate(x, size=skip.shape[-2:]), skip), 1))
            return self.out(x)

    return UNet()


if __name__ == "__main__":
    main()
