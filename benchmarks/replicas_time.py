"""Step time and memory of one GPT with Lightning's DDP, and with as many replicas of ``FxPipeStrategy(num_stages=...)``.

    python benchmarks/replicas_time.py                         # two devices: DDP, and two replicas of one stage
    python benchmarks/replicas_time.py --devices 4 --stages 2  # two replicas of two stages, and DDP with four devices

The candidates train the same model on the same batches, in alternation, each device a process of its own with one thread. With
several stages DDP has more replicas, so that each device has as many samples. What a step's time is, says ``step_time.py``. The
table gives the median and the range over the rounds, and ratios to DDP within each round. Memory is the largest resident set
of the process that takes most, over what the imports take. "shard" is ``shard_optimizer_state=True``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import step_time

SIZES = {
    "small": step_time.Work(),
    "wide": step_time.Work(dim=768, num_heads=12, context=64, batch_size=8),
    "tiny": step_time.Work(dim=32, num_layers=4, num_heads=4, context=32),
}
CANDIDATES = ("ddp", "replicate", "shard")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--devices", type=int, default=2, help="processes")
    parser.add_argument("--stages", type=int, default=1, help="of each replica")
    parser.add_argument("--rounds", type=int, default=3, help="how often each candidate runs")
    parser.add_argument("--worker", nargs=5, metavar=("CANDIDATE", "SIZE", "DEVICES", "STAGES", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        candidate, size, devices, stages, output = options.worker
        run_worker(candidate, size, int(devices), int(stages), Path(output))
        return
    from lightning_fxpipe.reporting.table import render_table

    rows = []
    for size in options.sizes:
        times: dict[str, list[float]] = {name: [] for name in CANDIDATES}
        peaks: dict[str, float] = {}
        for index in range(options.rounds):
            for name in CANDIDATES:
                step_ms, peaks[name] = launch(name, size, options.devices, options.stages)
                times[name].append(step_ms)
                print(
                    f"round {index + 1}/{options.rounds}  {size} {name}: {times[name][-1]:.1f} ms", file=sys.stderr, flush=True
                )
        for name, found in times.items():
            ratios = [mine / base for mine, base in zip(found, times["ddp"], strict=True)]
            rows.append(
                (size, name, step_time.spread(found, "{:.1f}"), step_time.spread(ratios, "{:.3f}"), f"{peaks[name]:.0f}")
            )
    headers = ("Size", "Candidate", "Step ms", "Ratio to DDP", "Peak MiB")
    title = f"{options.devices} devices: DDP, and replicas of {options.stages} stage{'s' * (options.stages > 1)}"
    print(render_table(title, headers, rows, right_aligned=headers[2:]))


def launch(candidate: str, size: str, devices: int, stages: int) -> tuple[float, float]:
    """Milliseconds of a step, of the slowest process, and MiB of the one that takes most."""
    with tempfile.TemporaryDirectory() as folder:
        step_time.run_ranks([__file__, "--worker", candidate, size, str(devices), str(stages)], folder, devices)
        reports = [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(devices)]
    return max(report["step_ms"] for report in reports), max(report["peak_mib"] for report in reports)


def run_worker(candidate: str, size: str, devices: int, stages: int, output: Path) -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_fxpipe import FxPipeStrategy

    torch.set_num_threads(1)
    # A batch of the work for each replica; DDP's are as many more as they are smaller.
    work = SIZES[size]
    share = stages if candidate == "ddp" else 1
    num_replicas = devices * share // stages
    clock = step_time.Clock(work)

    strategy: Any = (
        "ddp" if candidate == "ddp" else FxPipeStrategy(num_stages=stages, shard_optimizer_state=candidate == "shard")
    )
    data = step_time.make_batches(replace(work, batch_size=work.batch_size * num_replicas // share)).flatten(0, 1)
    trainer = step_time.trainer_with(strategy, devices, step_time.make_callback(clock))
    trainer.fit(step_time.make_module(work), DataLoader(TensorDataset(data), batch_size=work.batch_size // share))
    output.write_text(json.dumps(clock.report()))


if __name__ == "__main__":
    main()
