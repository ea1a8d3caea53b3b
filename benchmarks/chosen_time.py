"""Step time of one GPT with what ``FxPipeStrategy(balance="auto")`` chooses, compared with the defaults and other numbers.

    python benchmarks/chosen_time.py                       # a compute-bound size
    python benchmarks/chosen_time.py --size wide --rounds 5

The candidates run the same model on the same batches, in alternation, each in processes of its own with one thread each; what a
step's time is, says ``step_time.py``. "compile" is the defaults with ``compile=True``. The table gives the median and the range
over the rounds, ratios to the defaults within each round, and what was simulated when it was chosen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from step_time import Clock, Work, run_fxpipe, run_ranks, spread

SIZES = {
    "small": Work(),
    "wide": Work(dim=768, num_heads=12, context=64, batch_size=8),
    "tiny": Work(dim=32, num_layers=4, num_heads=4, context=32),
}
OPEN: dict[str, Any] = {"num_microbatches": "auto", "schedule": "auto"}
CANDIDATES: dict[str, dict[str, Any]] = {
    "defaults": OPEN,
    "auto": OPEN | {"balance": "auto"},
    **{f"gpipe {count}": {"num_microbatches": count, "schedule": "gpipe"} for count in (1, 2, 4, 8)},
    **{f"1f1b {count}": {"num_microbatches": count, "schedule": "1f1b"} for count in (2, 4, 8)},
    "compile": OPEN | {"compile": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES))
    parser.add_argument("--rounds", type=int, default=3, help="how often each candidate runs")
    parser.add_argument("--worker", nargs=3, metavar=("CANDIDATE", "SIZE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(*options.worker)
        return
    names = ["defaults", *(name for name in options.candidates if name != "defaults")]
    times: dict[str, list[float]] = {name: [] for name in names}
    told: dict[str, str] = {}
    losses: dict[str, list[float]] = {}
    for index in range(options.rounds):
        for name in names:
            step_ms, told[name], losses[name] = launch(name, options.size)
            times[name].append(step_ms)
            print(f"round {index + 1}/{options.rounds}  {name:9s} {step_ms:8.1f} ms  {told[name]}", file=sys.stderr, flush=True)
    report(options.size, times, told, losses)


def report(size: str, times: dict[str, list[float]], told: dict[str, str], losses: dict[str, list[float]]) -> None:
    from lightning_fxpipe.reporting.table import render_table

    rows = []
    for name, found in times.items():
        ratios = [mine / base for mine, base in zip(found, times["defaults"], strict=True)]
        difference = max(abs(x - y) for x, y in zip(losses[name], losses["defaults"], strict=True))
        rows.append((name, spread(found, "{:.1f}"), spread(ratios, "{:.3f}"), told[name] or "-", f"{difference:.1e}"))
    headers = ("Candidate", "Step ms", "Ratio to the defaults", "Chosen", "Largest loss difference")
    print(render_table(f"Step time: {SIZES[size]}", headers, rows, right_aligned=(*headers[1:3], headers[4])))
    print(f"Fastest: {min(times, key=lambda name: statistics.median(times[name]))}")


def launch(candidate: str, size: str) -> tuple[float, str, list[float]]:
    """Runs one candidate in fresh processes; returns its step time in milliseconds, what was chosen, and its losses."""
    world_size = SIZES[size].stages
    with tempfile.TemporaryDirectory() as folder:
        run_ranks([__file__, "--worker", candidate, size], folder, world_size)
        reports = [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(world_size)]
    return max(report["step_ms"] for report in reports), reports[0]["chosen"], next(r["losses"] for r in reports if r["losses"])


def run_worker(candidate: str, size: str, output: str) -> None:
    import torch

    torch.set_num_threads(1)
    clock = Clock(SIZES[size])
    plan = run_fxpipe(SIZES[size], clock, **CANDIDATES[candidate]).plan
    chosen = ""
    if plan.chosen is not None:
        one = asdict(plan.chosen)
        chosen = "{schedule}, {stages_per_rank} stages each, {num_microbatches} microbatches".format(**one)
        chosen += f", simulated {1000 * plan.chosen.step_seconds:.0f} ms"
    Path(output).write_text(json.dumps({**clock.report(), "chosen": chosen}))


if __name__ == "__main__":
    main()
