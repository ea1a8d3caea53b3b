"""Step time and memory of one GPT by the schedule of ``Trainer(strategy="fxpipe")``, compared with the simulator.

    python benchmarks/schedule_time.py                          # two processes, five schedules
    python benchmarks/schedule_time.py --schedules gpipe zb_h1 --rounds 5

The candidates run the same model on the same batches, in alternation, each in processes of its own with one thread each; what a
step's time is, says ``step_time.py``. The table gives the median and the range over the rounds, ratios to the first schedule
within each round, and the same ratio as simulated: for stages of equal cost, where a forward takes as long as each half of a
backward, and sending takes nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict, replace
from typing import get_args

from step_time import Work, launch, spread

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv_zero_bubble")


def main() -> None:
    from lightning_fxpipe.reporting.table import render_table
    from lightning_fxpipe.schedules.by_name import ScheduleName

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in asdict(Work()).items():
        if name != "schedule":
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=get_args(ScheduleName))
    parser.add_argument("--rounds", type=int, default=3, help="how often each schedule runs")
    options = vars(parser.parse_args())
    rounds, schedules = options.pop("rounds"), options.pop("schedules")
    work = Work(**options)
    times: dict[str, list[float]] = {name: [] for name in schedules}
    losses: dict[str, list[float]] = {}
    peaks = dict.fromkeys(schedules, 0.0)
    for index in range(rounds):
        for name in schedules:
            step_ms, peak_mib, losses[name] = launch("fxpipe", replace(work, schedule=name))
            peaks[name] = max(peaks[name], peak_mib)
            times[name].append(step_ms)
            print(f"round {index + 1}/{rounds}  {name:24s} {step_ms:8.1f} ms", file=sys.stderr, flush=True)
    first = schedules[0]
    rows = []
    for name in schedules:
        ratios = [mine / base for mine, base in zip(times[name], times[first], strict=True)]
        difference = max(abs(x - y) for x, y in zip(losses[name], losses[first], strict=True))
        expected = f"{simulated_seconds(name, work) / simulated_seconds(first, work):.3f}"
        rows.append(
            (name, spread(times[name], "{:.0f}"), spread(ratios, "{:.3f}"), expected, f"{peaks[name]:.0f}", f"{difference:.1e}")
        )
    headers = ("Schedule", "Step ms", f"Ratio to {first}", "Simulated", "Peak MiB", "Largest loss difference")
    print(render_table(f"Step time: {work}", headers, rows, right_aligned=headers[1:]))
    print(f"Fastest: {min(schedules, key=lambda name: statistics.median(times[name]))}")


def simulated_seconds(schedule: str, work: Work) -> float:
    """What a step takes whose whole work takes one second, in equal stages."""
    from lightning_fxpipe.schedules.by_name import SCHEDULES
    from lightning_fxpipe.simulation import StageCosts, simulate

    each = SCHEDULES[schedule].stages_per_rank
    part = 1 / (3 * work.microbatches * work.stages * each)
    costs = StageCosts(forward_seconds=part, input_backward_seconds=part, weight_backward_seconds=part)
    return simulate(
        [costs] * (work.stages * each),
        num_microbatches=work.microbatches,
        schedule=schedule,  # type: ignore[arg-type]
        stages_per_rank=each,
    ).seconds


if __name__ == "__main__":
    main()
