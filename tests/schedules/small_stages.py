"""Stages written by hand, random tables for them, and what one process computes: nothing but the executor can be at fault."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_fxpipe.errors import ScheduleError
from lightning_fxpipe.schedules.executor import Channels, Executor
from lightning_fxpipe.schedules.program import Edge, program_of
from lightning_fxpipe.schedules.split_backward import HookWatch
from lightning_fxpipe.schedules.stage_graph import StageGraph, StageGraphs
from lightning_fxpipe.simulation.actions import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    WEIGHT_BACKWARD,
    Action,
    ActionTable,
)
from lightning_fxpipe.stages.build import TensorSpec

ROWS, WIDTH = 2, 3
# What may cross a boundary.
SPECS = (
    TensorSpec(shape=(ROWS, WIDTH), dtype=torch.float64, requires_grad=True),
    TensorSpec(shape=(ROWS, WIDTH), dtype=torch.float64, requires_grad=True),
    TensorSpec(shape=(), dtype=torch.float64, requires_grad=True),
    TensorSpec(shape=(WIDTH, ROWS), dtype=torch.float64, requires_grad=False, memory_order=(1, 0)),
    TensorSpec(shape=(ROWS,), dtype=torch.int64, requires_grad=False),
    TensorSpec(shape=(ROWS, WIDTH), dtype=torch.bool, requires_grad=False),
    TensorSpec(shape=(0, WIDTH), dtype=torch.float64, requires_grad=True),
)


@dataclass(frozen=True)
class Case:
    """A table, and the tensors that its stages give each other."""

    table: ActionTable
    edges: tuple[Edge, ...]


class SmallStage(nn.Module):
    """Mixes what it gets, and gives a tensor for each edge that leaves it; some outputs depend on weights alone."""

    def __init__(self, index: int, specs: Sequence[TensorSpec], *, is_last: bool) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64)) for _ in range(2))
        self.alone = nn.Parameter(torch.randn(ROWS, WIDTH, dtype=torch.float64))
        self.specs = specs
        self.is_last = is_last

    def forward(self, inputs: Sequence[Tensor], x: Tensor) -> list[Tensor]:
        h = x
        for tensor in inputs:
            if tensor.dtype == torch.int64:
                h = h + self.second[tensor]
            elif tensor.numel() == 0:
                h = h + tensor.sum()
            elif tensor.dtype == torch.bool:
                h = torch.where(tensor, h, -h)
            else:
                h = h * (1 + (tensor.T if tensor.shape == (WIDTH, ROWS) else tensor).tanh())
        h = torch.tanh(h @ self.first) @ self.second @ self.first  # a weight used twice
        if self.is_last:
            return [h.square().mean()]
        return [self._output(h, number, spec) for number, spec in enumerate(self.specs)]

    def _output(self, h: Tensor, number: int, spec: TensorSpec) -> Tensor:
        if spec.dtype == torch.int64:
            return h.argmax(1)
        if spec.dtype == torch.bool:
            return h > 0
        if not spec.requires_grad:
            return h.detach().T
        if spec.shape == ():
            return h.sum() / 7
        if spec.shape == (0, WIDTH):
            return h[:0]
        return self.alone.exp() if number % 3 == 1 else h + number


def stage_of(case: Case, index: int) -> SmallStage:
    specs = [edge.spec for edge in case.edges if edge.source == index]
    return SmallStage(index, specs, is_last=index == case.table.num_stages - 1)


def data(case: Case) -> Tensor:
    """What each stage has of each microbatch."""
    generator = torch.Generator().manual_seed(1)
    shape = case.table.num_stages, case.table.num_microbatches, ROWS, WIDTH
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def gradients_of(stages: Mapping[int, nn.Module]) -> dict[str, Tensor | None]:
    return {f"{index}.{name}": p.grad for index, stage in stages.items() for name, p in stage.named_parameters()}


def in_one_process(case: Case) -> dict[str, Tensor | None]:
    """The gradients, microbatch by microbatch."""
    stages, x = {index: stage_of(case, index) for index in range(case.table.num_stages)}, data(case)
    last = case.table.num_stages - 1
    for microbatch in range(case.table.num_microbatches):
        values: dict[int, Tensor] = {}
        for index, stage in stages.items():
            inputs = [values[number] for number, edge in enumerate(case.edges) if edge.target == index]
            outputs = stage(inputs, x[index, microbatch])
            numbers = [number for number, edge in enumerate(case.edges) if edge.source == index]
            values.update(zip(numbers, outputs, strict=False))
            if index == last:
                outputs[0].backward()
    return gradients_of(stages)


def on_rank(case: Case, rank: int, channels: Channels, **options: object) -> dict[str, Tensor | None]:
    """One rank's share of the gradients."""
    stages, x = {index: stage_of(case, index) for index in case.table.stages_of(rank)}, data(case)
    last, graphs, watch = case.table.num_stages - 1, StageGraphs(), HookWatch()

    def compute(action: Action, received: tuple[Tensor, ...]) -> Sequence[Tensor]:
        if action.kind is not FORWARD:
            return graphs.backward(action, received)
        stage = stages[action.stage]
        into = [edge.spec for edge in case.edges if edge.target == action.stage]
        layouts = [(tensor.stride(), spec.empty(tensor.device).stride()) for tensor, spec in zip(received, into, strict=True)]
        assert all(found == expected for found, expected in layouts)
        leaves = [t.detach().requires_grad_(spec.requires_grad) for t, spec in zip(received, into, strict=True)]
        outputs = stage(leaves, x[action.stage, action.microbatch])
        is_last = action.stage == last
        trained = outputs if is_last else [t for t, spec in zip(outputs, stage.specs, strict=True) if spec.requires_grad]
        gradient = torch.ones_like(outputs[0]) if is_last else None
        graphs.put(action, StageGraph.of(leaves, trained), splits=not watch.has_seen_any, gradient=gradient)
        return () if is_last else [output.detach() for output in outputs]

    program = program_of(case.table, case.edges, rank, **options)  # type: ignore[arg-type]
    Executor(program, device=torch.device("cpu"), channels=channels).step(compute)
    return gradients_of(stages)


def random_case(seed: int, num_ranks: int) -> Case:
    """A table that can be run: its ranks' lines are parts of one order in which each action comes after what it needs."""
    numbers = random.Random(seed)
    num_stages, num_microbatches = num_ranks * numbers.randint(1, 2), numbers.randint(1, 4)
    edges = tuple(
        Edge(source=source, target=target, spec=spec)
        for target in range(1, num_stages)
        for source in range(target)
        if numbers.random() < (0.9 if source == target - 1 else 0.3)
        for spec in numbers.sample(SPECS, numbers.randint(1, 3))
    )
    owners = [*range(num_ranks), *(numbers.randrange(num_ranks) for _ in range(num_stages - num_ranks))]
    numbers.shuffle(owners)
    waiting = [Action(stage, FORWARD, index) for stage in range(num_stages) for index in range(num_microbatches)]
    for action in [*waiting]:
        is_split = numbers.random() < 0.5
        kinds = (INPUT_BACKWARD, WEIGHT_BACKWARD) if is_split else (BACKWARD,)
        waiting += [Action(action.stage, kind, action.microbatch) for kind in kinds]
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    done: set[tuple[int, str, int]] = set()
    while waiting:
        ready = [action for action in waiting if _needed(action, edges) <= done]
        action = numbers.choice(ready)
        waiting.remove(action)
        rows[owners[action.stage]].append(action)
        kind = "back" if action.kind in (BACKWARD, INPUT_BACKWARD) else action.kind.value
        done.add((action.stage, kind, action.microbatch))
    return Case(ActionTable.of(rows), edges)


def _needed(action: Action, edges: Sequence[Edge]) -> set[tuple[int, str, int]]:
    stage, index = action.stage, action.microbatch
    if action.kind is FORWARD:
        return {(edge.source, "F", index) for edge in edges if edge.target == stage}
    if action.kind is WEIGHT_BACKWARD:
        return {(stage, "back", index)}
    after = {(edge.target, "back", index) for edge in edges if edge.source == stage and edge.spec.requires_grad}
    return after | {(stage, "F", index)}


def disturbed(case: Case, seed: int) -> Case:
    """The same with two actions of one line exchanged, if each microbatch's stay in order then; else the same."""
    numbers = random.Random(seed)
    for _ in range(50):
        rows = [[*row] for row in case.table.ranks]
        row = numbers.choice([row for row in rows if len(row) > 1])
        one, other = numbers.sample(range(len(row)), 2)
        row[one], row[other] = row[other], row[one]
        try:
            return Case(ActionTable.of(rows), case.edges)
        except ScheduleError:
            continue
    return case
