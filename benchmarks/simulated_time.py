"""A step's simulated time against its measured one: a GPT in two processes, under four schedules.

    python benchmarks/simulated_time.py                       # three sizes
    python benchmarks/simulated_time.py --sizes large --rounds 20

A round first measures what the parts take by themselves: each process runs its own stages, a microbatch at a time (all of them
for GPipe, which keeps them all), both at the same moment, so that they share the machine as they do later; and it runs the
schedule with stages that compute nothing, which is what messages and Python take. Then it runs a step of the schedule. All of
that happens in the same two processes within seconds, for the speed of a machine that others use, too, changes by a tenth from
minute to minute.

The table has medians over the rounds, the ratio simulated / measured (median, and the middle half of the rounds), and which
schedules are the faster ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import step_time

SIZES = {
    "small": step_time.Work(dim=192, num_layers=8, num_heads=6),
    "middle": step_time.Work(),
    "large": step_time.Work(dim=640, num_layers=8, num_heads=10),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zbv_zero_bubble")
# Microbatches that the parts are measured with, after one that does not count.
NUM_ALONE = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--rounds", type=int, default=12, help="how often each is measured, after one that does not count")
    parser.add_argument("--worker", nargs=3, metavar=("SIZE", "ROUNDS", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        size, rounds, output = options.worker
        run_worker(SIZES[size], int(rounds), Path(output))
        return
    from lightning_fxpipe.reporting.table import render_table

    rows = []
    for size in options.sizes:
        found = launch(size, options.rounds)
        for schedule, pairs in found.items():
            simulated, measured = (statistics.median(values) for values in zip(*pairs, strict=True))
            ratios = [first / second for first, second in pairs]
            rows.append((size, schedule, f"{1e3 * simulated:.0f}", f"{1e3 * measured:.0f}", middle_half(ratios)))
        print(f"{size}: {order_of(found)}", file=sys.stderr, flush=True)
    headers = ("Size", "Schedule", "Simulated ms", "Measured ms", "Ratio")
    print(render_table("A step in two processes", headers, rows, right_aligned=headers[2:]))


def launch(size: str, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """For each schedule and round the seconds of a step, simulated and measured."""
    with tempfile.TemporaryDirectory() as folder:
        step_time.run_ranks([__file__, "--worker", size, str(rounds)], folder, 2)
        found: dict[str, list[tuple[float, float]]] = json.loads(Path(f"{folder}/0.json").read_text())
    return found


def middle_half(values: list[float]) -> str:
    """The median, and between which values the middle half is."""
    if len(values) < 2:
        return f"{values[0]:.3f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def order_of(found: dict[str, list[tuple[float, float]]]) -> str:
    """The schedules from the fastest to the slowest, as simulated and as measured."""
    orders = [
        " < ".join(sorted(found, key=lambda schedule: statistics.median(pair[column] for pair in found[schedule])))
        for column in range(2)
    ]
    return f"simulated {orders[0]}; measured {orders[1]}"


# --------------------------------------------------------------------------- in the two processes


@dataclass
class Model:
    """The GPT in stages, with all of them in each process, and what crosses between them."""

    modules: list[Any]
    boundaries: list[tuple[Any, ...]]
    batch: Any
    num_microbatches: int

    def compute(self, stage: int, index: int, received: Sequence[Any]) -> Any:
        """One microbatch of a stage; of the last its share of the loss."""
        ids = self.batch[index % self.num_microbatches]
        outputs = self.modules[stage](*(received if stage else (ids[:, :-1],)))
        if stage < len(self.modules) - 1:
            return outputs
        return step_time.loss_of(outputs[0], ids[:, 1:]) / self.num_microbatches

    def pass_on(self, stage: int, index: int, received: Sequence[Any]) -> Any:
        """The same sizes, with next to nothing computed."""
        import torch

        (spec,) = self.boundaries[min(stage, len(self.boundaries) - 1)]
        given = received[0] if stage else torch.empty(spec.shape, requires_grad=True)
        return given.flatten()[0] if stage == len(self.modules) - 1 else (given.view_as(given),)


def make_stages(work: step_time.Work, num_stages: int) -> Model:
    """The model, cut where the planner cuts."""
    import torch

    from lightning_fxpipe.planner.follow_plan import follow_plan
    from lightning_fxpipe.planner.step_plan import make_plan
    from lightning_fxpipe.stages.build import TensorSpec, build_stages
    from lightning_fxpipe.tracing.recordable import RegionCall
    from lightning_fxpipe.tracing.trace import trace_region

    model = step_time.make_model(work)
    batch = step_time.make_batches(work)[0].view(work.microbatches, -1, work.context + 1)
    example = batch[0, :, :-1]
    plan = make_plan(model, example, num_stages=num_stages)
    call = RegionCall(path="", args=(example,), kwargs={}, batch_size=len(example))
    stages = build_stages(follow_plan(plan, trace_region(model, call, opened=plan.opened)))
    boundaries = [
        tuple(TensorSpec(shape=t.shape, dtype=torch.float32, requires_grad=t.requires_grad) for t in stage.outputs)
        for stage in plan.stages
    ]
    return Model([stage.module for stage in stages], boundaries[:-1], batch, work.microbatches)


class Runs:
    """Runs of one schedule, and of its stages by themselves. Made by both processes at the same time."""

    def __init__(self, name: str, model: Model) -> None:
        import torch

        from lightning_fxpipe.distributed.topology import Placement, make_topology
        from lightning_fxpipe.recording.recorder import Recorder
        from lightning_fxpipe.schedules.by_name import SCHEDULES as KNOWN
        from lightning_fxpipe.schedules.by_name import forward_order, training_order
        from lightning_fxpipe.simulation.actions import ActionTable

        self.schedule = KNOWN[name]
        self.model = model
        placement = Placement(num_ranks=2, stages_per_rank=len(model.modules) // 2, is_v=self.schedule.is_v)
        self.topology = topology = make_topology(torch.device("cpu"), placement=placement)  # its groups end with it
        self.recorder = Recorder()
        self.stages = topology.stages
        self.together = self.executor(training_order(self.schedule, placement, model.num_microbatches), topology.rank)
        # As many microbatches are kept as in the schedule: memory that a step takes anew is slower than what it has.
        self.is_counted: Callable[[Any], bool] = (lambda action: action.microbatch > 0) if self.schedule.alternates else bool
        if self.schedule.alternates:
            one_by_one = ActionTable.of([self.one_by_one()])
        else:
            one_by_one = forward_order(Placement(num_ranks=1, stages_per_rank=len(model.modules)), model.num_microbatches)
        self.alone = self.executor(one_by_one, 0)

    def one_by_one(self) -> list[Any]:
        """Each microbatch through all stages before the next one."""
        from lightning_fxpipe.simulation.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action

        stages = range(len(self.model.modules))
        back = (INPUT_BACKWARD, WEIGHT_BACKWARD) if self.schedule.splits else (BACKWARD,)
        return [
            action
            for index in range(1 + NUM_ALONE)
            for action in (
                *(Action(stage, FORWARD, index) for stage in stages),
                *(Action(stage, kind, index) for stage in reversed(stages) for kind in back),
            )
        ]

    def executor(self, table: Any, rank: int) -> Any:
        import torch

        from lightning_fxpipe.schedules.executor import Channels, Executor, PassRecording
        from lightning_fxpipe.schedules.program import Edge, program_of

        topology, boundaries = self.topology, enumerate(self.model.boundaries)
        edges = [Edge(source=stage, target=stage + 1, spec=spec) for stage, specs in boundaries for spec in specs]
        return Executor(
            program_of(table, edges, rank),
            device=torch.device("cpu"),
            channels=Channels(onward=None, back=None, global_ranks=tuple(map(topology.global_rank, range(2)))),
            recording=PassRecording(recorder=self.recorder, first=0),
        )

    def computing(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Runs the actions of a step; ``run`` computes one microbatch of a stage."""
        import torch

        from lightning_fxpipe.schedules.stage_graph import StageGraph, StageGraphs
        from lightning_fxpipe.simulation.actions import FORWARD

        graphs, last = StageGraphs(), len(self.model.modules) - 1

        def compute(action: Any, received: tuple[Any, ...]) -> Sequence[Any]:
            if action.kind is not FORWARD:
                return graphs.backward(action, received)
            leaves = tuple(tensor.detach().requires_grad_() for tensor in received)
            outputs = run(action.stage, action.microbatch, leaves)
            if action.stage < last:
                graphs.put(action, StageGraph.of(leaves, outputs), splits=self.schedule.splits)
                return [output.detach() for output in outputs]
            graph = StageGraph.of(leaves, [outputs])
            graphs.put(action, graph, splits=self.schedule.splits, gradient=torch.ones_like(outputs))
            return ()

        return compute

    def own_or_nothing(self, stage: int, index: int, received: Sequence[Any]) -> Any:
        """One microbatch of a stage of this process; of another's what has its size."""
        run = self.model.compute if stage in self.stages else self.model.pass_on
        return run(stage, index, received)

    def parts(self) -> dict[int, list[float]]:
        """Seconds of the forward and of the two parts of the backward of each stage, of those of both processes."""
        import torch
        import torch.distributed as dist

        dist.barrier()
        self.recorder.begin(torch.device("cpu"))
        with self.recorder.during("all"):
            self.alone.step(self.computing(self.own_or_nothing))
        spans = [span for span in self.recorder.end().spans if not isinstance(span.work, str) and self.is_counted(span.work)]
        found: list[dict[int, list[float]]] = [{}, {}]
        own = {}
        for stage in self.stages:
            of_stage = [span for span in spans if span.work.stage == stage]
            own[stage] = [
                statistics.mean([s.end_seconds - s.start_seconds for s in of_stage if s.work.kind.value in kinds] or [0.0])
                for kinds in ("F", "IB", "W")
            ]
        dist.all_gather_object(found, own)
        return {**found[0], **found[1]}

    def seconds(self, run: Callable[..., Any]) -> float:
        """Of a step, until the last process has ended it."""
        import torch
        import torch.distributed as dist

        dist.barrier()
        begin = time.perf_counter()
        self.together.step(self.computing(run))
        taken = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return float(taken)


def simulated_seconds(runs: Runs, parts: dict[int, list[float]], nothing_seconds: float) -> float:
    """What a step takes when its stages take what they took by themselves, and a step of empty stages takes this."""
    from lightning_fxpipe.simulation import Overhead, StageCosts
    from lightning_fxpipe.simulation.by_name import table_of
    from lightning_fxpipe.simulation.simulator import run_table

    costs = [
        StageCosts(forward_seconds=forward, input_backward_seconds=inward, weight_backward_seconds=weight)
        for _, (forward, inward, weight) in sorted(parts.items())
    ]
    table = table_of(runs.schedule.name, costs, runs.model.num_microbatches, len(costs) // 2)  # type: ignore[arg-type]
    empty = [StageCosts(forward_seconds=0.0, input_backward_seconds=0.0) for _ in costs]
    # Of each action, so that a step of empty stages takes what it took.
    one = run_table(table, empty, overhead=Overhead(action_seconds=1.0)).seconds
    return run_table(table, costs, overhead=Overhead(action_seconds=nothing_seconds / one)).seconds


def run_worker(work: step_time.Work, rounds: int, output: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models = {count: make_stages(work, count) for count in (2, 4)}
    all_runs = [Runs(name, models[2 if name in ("gpipe", "1f1b") else 4]) for name in SCHEDULES]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SCHEDULES}
    for index in range(1 + rounds):
        for name, runs in zip(SCHEDULES, all_runs, strict=True):
            parts = runs.parts()
            nothing_seconds = min(runs.seconds(runs.model.pass_on) for _ in range(3))
            measured = runs.seconds(runs.model.compute)
            if index:
                found[name].append((simulated_seconds(runs, parts, nothing_seconds), measured))
    output.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
