"""Predictions of ``FxPipeStrategy(balance="auto")`` compared with measured steps: a GPT in two processes.

    python benchmarks/predicted_time.py                       # three sizes, four schedules
    python benchmarks/predicted_time.py --sizes small --rounds 5

In each run the layers are timed, cuts are chosen for one schedule and number of microbatches, a step is simulated, and then
steps are recorded (``record=``). Both times go from the first action of any rank to the end of the last; with GPipe the loss is
between these when it is measured, and nowhere when it is simulated. The table gives the medians over the rounds of a run's
median over its steps, and the ratio predicted / measured within each round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from step_time import Clock, Work, run_fxpipe, run_ranks, spread

SIZES = {
    "small": Work(dim=192, num_layers=8, num_heads=6, steps=10),
    "middle": Work(steps=8),
    "large": Work(dim=640, num_layers=6, num_heads=10, steps=6),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zbv_zero_bubble")
FIRST_STEP = 3  # the steps before it trace, look at the loss, and make schedules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--schedules", nargs="+", default=[*SCHEDULES])
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--steps", type=int, help="steps of a run (default: by its size)")
    parser.add_argument("--worker", nargs=4, metavar=("SIZE", "SCHEDULE", "STEPS", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(*options.worker)
        return
    from lightning_fxpipe.reporting.table import render_table

    rows = []
    for size in options.sizes:
        found: dict[str, list[tuple[float, float]]] = {schedule: [] for schedule in options.schedules}
        for index in range(options.rounds):
            for schedule in options.schedules:
                found[schedule].append(launch(size, schedule, options.steps or SIZES[size].steps))
                predicted, measured = found[schedule][-1]
                line = f"predicted {predicted:.1f}, measured {measured:.1f} ms"
                print(f"round {index + 1}/{options.rounds}  {size} {schedule}: {line}", file=sys.stderr, flush=True)
        for schedule, pairs in found.items():
            middle = [f"{statistics.median(values):.0f}" for values in zip(*pairs, strict=True)]
            rows.append((size, schedule, *middle, spread([predicted / measured for predicted, measured in pairs], "{:.3f}")))
    headers = ("Size", "Schedule", "Predicted ms", "Measured ms", "Ratio")
    print(render_table("A step: predicted and measured", headers, rows, right_aligned=headers[2:]))


def launch(size: str, schedule: str, steps: int) -> tuple[float, float]:
    """Milliseconds of a step, predicted and measured."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks([__file__, "--worker", size, schedule, str(steps)], folder, SIZES[size].stages)
        reports = [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(SIZES[size].stages)]
    (report,) = (report for report in reports if report)  # of rank 0, which writes the recording
    return report["predicted"], report["measured"]


def run_worker(size: str, schedule: str, steps: str, output: str) -> None:
    import torch

    from lightning_fxpipe import Recording, read_recording
    from lightning_fxpipe.simulation.actions import Action

    torch.set_num_threads(1)
    work = replace(SIZES[size], steps=int(steps))
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording(folder, first_step=FIRST_STEP, num_steps=work.warmup_steps + work.steps - FIRST_STEP)
        chosen: dict[str, Any] = {"num_microbatches": work.microbatches, "schedule": schedule}
        strategy = run_fxpipe(work, Clock(work), **chosen, balance="auto", record=recording)
        report: dict[str, float] = {}
        if (Path(folder) / "timelines.json").exists():
            spans = [
                [span for rank in timeline.ranks for span in rank if isinstance(span.work, Action)]
                for timeline in read_recording(folder)
                if "simulated" not in timeline.label
            ]
            seconds = [max(s.end_seconds for s in of_step) - min(s.start_seconds for s in of_step) for of_step in spans]
            report = {"predicted": 1e3 * strategy.plan.chosen.step_seconds, "measured": 1e3 * statistics.median(seconds)}
    Path(output).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
