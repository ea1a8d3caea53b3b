#!/usr/bin/env python3
"""One training step of a pipeline, taken apart: trace, plan, stages, schedule, step.

    python examples/anatomy.py

Two stages and four microbatches, all in this process. ``Trainer(strategy="fxpipe", devices=2)`` uses the same pieces with one
stage in each process. Each section prints what its piece returns; the last one compares all gradients with one device.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import lightning as L
import torch
from torch import Tensor, nn

from lightning_fxpipe import PartitionPlan, make_plan
from lightning_fxpipe.distributed.topology import Placement
from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.planner.follow_plan import follow_plan, trace_for_plan
from lightning_fxpipe.runtime.stage_edges import stage_edges
from lightning_fxpipe.schedules.by_name import SCHEDULES, training_order
from lightning_fxpipe.schedules.executor import Channels, Executor
from lightning_fxpipe.schedules.program import Program, program_of
from lightning_fxpipe.schedules.stage_graph import StageGraph
from lightning_fxpipe.simulation.actions import FORWARD, Action
from lightning_fxpipe.stages.build import Stage, build_stage
from lightning_fxpipe.tracing.discovery import regions
from lightning_fxpipe.tracing.region import StepCall

NUM_STAGES, NUM_MICROBATCHES, NUM_SAMPLES, WIDTH = 2, 4, 8, 16
NUM_SAMPLES_EACH = NUM_SAMPLES // NUM_MICROBATCHES
CPU = torch.device("cpu")


class Regression(L.LightningModule):
    """An ordinary LightningModule: nothing in it knows of pipelines."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()  # a residual: plain Python between the layers
        return self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)


def plan_the_cuts(module: L.LightningModule, batch: tuple[Tensor, Tensor]) -> PartitionPlan:
    """Runs the step on tensors without data, and cuts the recorded graph so that the stages have similar parameter counts."""
    plan = make_plan(module, batch, num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES)
    print(f"\n--- 1. The plan: which stage holds what (planner)\n{plan}")
    return plan


def trace_the_region(module: L.LightningModule, batch: tuple[Tensor, Tensor], plan: PartitionPlan) -> Assignment:
    """Records the *region*, the part of the step that is pipelined, as a graph, and finds the plan's cuts in it."""
    step = StepCall.of_training(module, batch)
    region = next(iter(regions(module, step, batch_size=NUM_SAMPLES)))
    traced = trace_for_plan(module, region, plan)
    print(f"\n--- 2. The region: {region.label} (tracing)\n{traced.graph}")
    return follow_plan(plan, traced)


def build_the_stages(assignment: Assignment) -> list[Stage]:
    """Makes a ``torch.fx.GraphModule`` of each stage. It uses the very parameters of the user's module."""
    stages = [build_stage(assignment, index) for index in range(NUM_STAGES)]
    for stage in stages:
        print(f"\n--- 3. Stage {stage.index} (stages): {[name for name, _ in stage.module.named_parameters()]}")
        print(stage.module.code.strip())
    return stages


def order_the_work(assignment: Assignment) -> Program:
    """Takes a schedule's table of actions, and derives from it what each rank does, and which messages it sends.

    ``0F1`` is the forward of stage 0 for microbatch 1, ``B`` a backward.
    """
    sizes = assignment.chain.traced.bind_sizes(((NUM_SAMPLES_EACH, WIDTH),))
    assert sizes is not None
    edges = stage_edges(assignment, last_stage=NUM_STAGES - 1, sizes=sizes)
    print("\n--- 4. Tensors between stages, for one microbatch (stages)", *edges, sep="\n")
    two_ranks = training_order(SCHEDULES["1f1b"], Placement(num_ranks=2), NUM_MICROBATCHES)
    print(f"\n--- 5. 1F1B on two ranks (schedules)\n{two_ranks.to_csv()}")
    for rank in range(2):
        for step in program_of(two_ranks, edges, rank).steps[:3]:
            print(f"rank {rank}, {step.action}: receives {len(step.receives)}, sends {len(step.sends)}")
    here = training_order(SCHEDULES["1f1b"], Placement(num_ranks=1, stages_per_rank=2), NUM_MICROBATCHES)
    print(f"\nBoth stages on one rank: {here.to_csv()}", end="")
    return program_of(here, edges, rank=0)


def run_the_step(module: L.LightningModule, batch: tuple[Tensor, Tensor], stages: Sequence[Stage], program: Program) -> Tensor:
    """Runs the program. The executor moves tensors between actions; what an action computes is said here."""
    inputs, targets = (tensor.split(NUM_SAMPLES_EACH) for tensor in batch)
    graphs: dict[tuple[int, int], StageGraph] = {}
    losses: list[Tensor] = []

    def compute(action: Action, received: tuple[Tensor, ...]) -> Sequence[Tensor]:
        stage, microbatch = stages[action.stage], action.microbatch
        if action.kind is not FORWARD:
            return graphs.pop((stage.index, microbatch)).backward(received or (torch.ones(()),))
        leaves = [tensor.detach().requires_grad_() for tensor in received]
        outputs = stage.module(*leaves, *[inputs[microbatch] for _ in stage.region_inputs])
        if stage.index == NUM_STAGES - 1:  # the rest of the step; each microbatch has its share of the mean
            loss = nn.functional.mse_loss(outputs[0], targets[microbatch]) / NUM_MICROBATCHES
            losses.append(loss.detach())
            graphs[stage.index, microbatch] = StageGraph.of(leaves, (loss,))
            return ()
        graphs[stage.index, microbatch] = StageGraph.of(leaves, outputs)
        return [output.detach() for output in outputs]

    channels = Channels(onward=None, back=None, global_ranks=[0])  # a single process sends no messages
    Executor(program, device=CPU, channels=channels).step(compute)
    return torch.stack(losses).sum()


def main() -> None:
    """Takes a step apart, runs it, and compares."""
    torch.manual_seed(0)
    module = Regression()
    batch = torch.randn(NUM_SAMPLES, WIDTH), torch.randn(NUM_SAMPLES, 1)
    alone = copy.deepcopy(module)

    plan = plan_the_cuts(module, batch)
    assignment = trace_the_region(module, batch, plan)
    stages = build_the_stages(assignment)
    program = order_the_work(assignment)
    loss = run_the_step(module, batch, stages, program)

    expected = alone.training_step(batch, 0)
    expected.backward()
    print(f"\n--- 6. The step: loss {loss:.6f}, on one device {expected:.6f}")
    for (fqn, parameter), reference in zip(module.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad)
        print(f"the gradient of {fqn} is that of one device")


if __name__ == "__main__":
    main()
