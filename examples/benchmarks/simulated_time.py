"""A step's simulated time against its measured one: the GPT of step_time.py in two stages, as a loop written by hand runs it.

    python examples/benchmarks/simulated_time.py                       # three sizes, GPipe and 1F1B
    python examples/benchmarks/simulated_time.py --rounds 5

In each round the costs are measured first: both stages at the same time, each in a process of its own, as they run later;
forward and backward of a microbatch, the loss with the last stage's, the optimizer step, and a message between the two. Then
the steps of ``torch.distributed.pipelining``'s own schedules are timed (candidate "torch" of step_time.py). The table has the
medians, and the simulated over the measured time within each round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import step_time

SIZES = {
    "small": step_time.Work(dim=192, num_layers=8, num_heads=6),
    "middle": step_time.Work(),
    "large": step_time.Work(dim=640, num_layers=6, num_heads=10, steps=6),
}
SCHEDULES = ("gpipe", "1f1b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--worker", nargs=2, metavar=("SIZE", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure_costs(SIZES[options.worker[0]], Path(options.worker[1]))
        return
    rows = []
    for size in options.sizes:
        found: dict[str, list[tuple[float, float]]] = {schedule: [] for schedule in SCHEDULES}
        for index in range(options.rounds):
            costs = costs_of(size)
            for schedule in SCHEDULES:
                work = replace(SIZES[size], schedule=schedule)
                measured, _, _ = step_time.launch("torch", work)
                found[schedule].append((simulated_ms(costs, work), measured))
                print(
                    f"round {index + 1}/{options.rounds}  {size} {schedule}: {found[schedule][-1]}", file=sys.stderr, flush=True
                )
        for schedule, pairs in found.items():
            ratios = [simulated / measured for simulated, measured in pairs]
            middle = [f"{statistics.median(values):.0f}" for values in zip(*pairs, strict=True)]
            rows.append((size, schedule, *middle, step_time.spread(ratios, "{:.3f}")))
    from lightning_fxpipe.reporting.table import render_table

    headers = ("Size", "Schedule", "Simulated ms", "Measured ms", "Ratio")
    print(render_table("A step in two stages", headers, rows, right_aligned=headers[2:]))


def simulated_ms(costs: list[dict[str, float]], work: step_time.Work) -> float:
    """What a step takes with these costs of the stages."""
    from lightning_fxpipe import Link, Overhead, StageCosts, simulate

    stages = [
        StageCosts(
            forward_seconds=stage["forward"], input_backward_seconds=stage["backward"], output_bytes=stage["output_bytes"]
        )
        for stage in costs
    ]
    link = Link(latency_seconds=costs[0]["latency"], bytes_per_second=costs[0]["bytes_per_second"])
    overhead = Overhead(step_seconds=max(stage["optimizer"] for stage in costs))
    found = simulate(
        stages,
        num_microbatches=work.microbatches,
        schedule=work.schedule,  # type: ignore[arg-type]
        link=link,
        overhead=overhead,
    )
    return 1000 * found.seconds


def costs_of(size: str) -> list[dict[str, float]]:
    """The costs of both stages, measured at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        step_time.run_ranks([__file__, "--worker", size], folder, 2)
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(2)]


# --------------------------------------------------------------------------- in the two processes


def measure_costs(work: step_time.Work, output: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    module, example, boundary = step_time.make_stage(work, rank)
    targets = torch.zeros(*example.shape, dtype=torch.long)
    optimizer = step_time.make_optimizer([p for _, p in module.named_parameters()])
    (sent,) = boundary[0]
    received = torch.randn(sent.shape)
    times: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = call()
        times[name].append(time.perf_counter() - begin)
        return result

    def forward() -> Any:
        if rank == 0:
            return module(example)[0]
        return step_time.loss_of(module(received.detach().requires_grad_())[0], targets)

    gradient = torch.randn(sent.shape) if rank == 0 else None
    for _ in range(work.warmup_steps + work.steps):
        dist.barrier()
        for _ in range(work.microbatches):
            result = timed("forward", forward)
            timed("backward", partial(result.backward, gradient))
        timed("optimizer", lambda: (optimizer.step(), optimizer.zero_grad()))
    costs = {name: statistics.median(values[len(values) // 4 :]) for name, values in times.items()}
    costs["output_bytes"] = received.nbytes if rank == 0 else 0
    costs["latency"], costs["bytes_per_second"] = measure_link(received)
    output.write_text(json.dumps(costs))
    dist.destroy_process_group()


def measure_link(tensor: Any) -> tuple[float, float]:
    """Seconds of a message of a few bytes, and bytes in a second of a large one."""
    import torch

    seconds = [message_seconds(size) for size in (torch.zeros(1), tensor)]
    return seconds[0], tensor.nbytes / max(seconds[1] - seconds[0], 1e-9)


def message_seconds(tensor: Any) -> float:
    """Half of the way there and back, median."""
    import torch.distributed as dist

    rank, times = dist.get_rank(), []
    for _ in range(30):
        begin = time.perf_counter()
        for turn in (0, 1):
            dist.send(tensor, 1 - rank) if rank == turn else dist.recv(tensor, 1 - rank)
        times.append((time.perf_counter() - begin) / 2)
    return statistics.median(times)


if __name__ == "__main__":
    main()
