"""The torch schedules as ``schedule.Pipeline`` uses them: exactly the gradients and losses of one process, for small stages
written by hand, so that nothing but the schedule can be at fault."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

from lightning_fxpipe.distributed.topology import Placement
from lightning_fxpipe.schedules.by_name import SCHEDULES, training_order
from lightning_fxpipe.schedules.pipelining import Pipeline, bubble_fraction
from lightning_fxpipe.schedules.places import Place, RunMicrobatch
from lightning_fxpipe.stages.build import TensorSpec
from tests.ranks.pool import RankPool

WIDTH = 4
CPU = torch.device("cpu")

# ------------------------------------------------------------------ a model in stages


@dataclass
class Data:
    """Microbatches of equal size, with the weight of each in the loss."""

    x: Tensor  # (microbatches, size, WIDTH)
    y: Tensor

    @classmethod
    def make(cls, num_microbatches: int, size: int, seed: int) -> Data:
        generator = torch.Generator().manual_seed(seed)
        return cls(
            x=torch.randn(num_microbatches, size, WIDTH, generator=generator),
            y=torch.randn(num_microbatches, size, WIDTH, generator=generator),
        )


class FirstStage(nn.Module):
    """Sends a tensor with a gradient, a mask without one and indices that cannot have one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tanh(self.linear(x)), (x > 0).float(), x.argmax(1)


class MiddleStage(nn.Module):
    """Changes the first tensor, passes on its old value and, unused, the mask and the indices."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, mask: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return torch.tanh(self.linear(h)), mask, indices, h


class LastStage(nn.Module):
    """Uses everything that it receives; ``skipped`` comes from the first stage where there is a middle one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Embedding(WIDTH, WIDTH)

    def forward(self, h: Tensor, mask: Tensor, indices: Tensor, skipped: Tensor | None = None) -> Tensor:
        h = h if skipped is None else h + skipped
        return self.linear(h * mask) * self.scale(indices)


def make_stages(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(5)
    return [FirstStage(), *(MiddleStage() for _ in range(num_stages - 2)), LastStage()]


def loss_of(output: Tensor, y: Tensor, weight: float) -> Tensor:
    return (output - y).square().mean() * weight


def boundaries(num_stages: int, size: int) -> list[tuple[TensorSpec, ...]]:
    """Specs of what crosses after each stage but the last."""
    dense, indices = (size, WIDTH), (size,)
    first = (
        TensorSpec(shape=dense, dtype=torch.float32, requires_grad=True),
        TensorSpec(shape=dense, dtype=torch.float32, requires_grad=False),
        TensorSpec(shape=indices, dtype=torch.int64, requires_grad=False),
    )
    return [first, *((*first, first[0]) for _ in range(num_stages - 2))]


# ------------------------------------------------------------------ one process


@dataclass
class Result:
    """What a run gives: on a rank of a pipeline its stage's share."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    received: list[tuple[bool, ...]] = field(default_factory=list)  # whether each received tensor requires a gradient

    def take_gradients(self, stage: nn.Module, index: int) -> None:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                self.gradients[f"{index}.{name}"] = parameter.grad.clone()


def in_one_process(num_stages: int, data: Data, *, training: bool = True) -> Result:
    """The same stages one after another: microbatch by microbatch, with accumulation."""
    stages, result = make_stages(num_stages), Result()
    for x, y in zip(data.x, data.y, strict=True):
        with torch.set_grad_enabled(training):
            values: Any = (x,)
            for stage in stages:
                values = stage(*values)
            result.outputs.append(values.detach())
            if training:
                loss = loss_of(values, y, 1 / len(data.x))
                loss.backward()
                result.losses.append(loss.detach())
    for index, stage in enumerate(stages):
        result.take_gradients(stage, index)
    return result


# ------------------------------------------------------------------ on ranks


def make_group() -> dist.ProcessGroup:
    """As in a run: stages against ranks, so that the last is on rank 0."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.new_group(list(reversed(range(dist.get_world_size()))), sort_ranks=False)


class Rank:
    """One rank's stage and its pipelines."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.index, self.num_stages = dist.get_rank(group), dist.get_world_size(group)
        self.stage = make_stages(self.num_stages)[self.index]
        self.data: Data | None = None
        self.result = Result()

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def pipeline(self, num_microbatches: int, size: int, *, training: bool) -> tuple[Pipeline, RunMicrobatch]:
        between = boundaries(self.num_stages, size)

        def run(_: int, index: int, received: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
            assert self.data is not None
            self.result.order.append(f"forward {index}")
            self.result.received.append(tuple(tensor.requires_grad for tensor in received))
            with torch.set_grad_enabled(training):
                output = self.stage(*(received if self.index else (self.data.x[index],)))
            first = output if self.is_last else output[0]
            if training:
                first.register_hook(lambda gradient: self.result.order.append(f"backward {index}"))
            if not self.is_last:
                return output
            self.result.outputs.append(output.detach())
            if not training:
                return torch.zeros(())
            loss = loss_of(output, self.data.y[index], 1 / num_microbatches)
            self.result.losses.append(loss.detach().clone())
            return loss

        place = Place(
            stage=self.index,
            index=self.index,
            received=between[self.index - 1] if self.index else (),
            sent=None if self.is_last else between[self.index],
        )
        placement = Placement(num_ranks=self.num_stages)
        made = Pipeline(
            [place],
            num_places=self.num_stages,
            num_microbatches=num_microbatches,
            order=training_order(SCHEDULES["1f1b"], placement, num_microbatches) if training else ScheduleGPipe,
            has_backward=training,
            device=CPU,
            group=self.group,
        )
        return made, run

    def step(self, pipeline: tuple[Pipeline, RunMicrobatch], data: Data) -> Result:
        self.data, self.result = data, Result()
        self.stage.zero_grad()
        made, run = pipeline
        made.step(run)
        self.result.take_gradients(self.stage, self.index)
        return self.result


def train_once(data: Data) -> Result:
    """Runs on every rank: one training step."""
    rank = Rank(make_group())
    pipeline = rank.pipeline(*data.x.shape[:2], training=True)
    return rank.step(pipeline, data)


def run_plan(plan: list[tuple[str, Data]]) -> list[Result]:
    """Runs on every rank: training and evaluation steps by turns, each kind and shape with one pipeline of its own."""
    rank = Rank(make_group())
    pipelines: dict[Any, tuple[Pipeline, RunMicrobatch]] = {}
    results = []
    for kind, data in plan:
        training = kind == "train"
        key = (kind, *data.x.shape[:2])
        if key not in pipelines:
            pipelines[key] = rank.pipeline(*data.x.shape[:2], training=training)
        results.append(copy.deepcopy(rank.step(pipelines[key], data)))
    return results


def assert_exactly(results: list[Result], expected: Result) -> None:
    """Every bit: the ranks do the same operations in the same order as one process."""
    gradients = {name: gradient for result in results for name, gradient in result.gradients.items()}
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=0, atol=0, msg=name)
    last = results[0]  # rank 0 has the last stage
    torch.testing.assert_close(last.losses, expected.losses, rtol=0, atol=0)
    torch.testing.assert_close(last.outputs, expected.outputs, rtol=0, atol=0)


@pytest.mark.parametrize("num_microbatches", [2, 5])
def test_training_is_exactly_that_of_one_process(ranks: Callable[[int], RankPool], num_microbatches: int) -> None:
    data = Data.make(num_microbatches, 3, seed=num_microbatches)
    assert_exactly(ranks(2).run(train_once, data), in_one_process(2, data))


def test_relays_with_and_without_gradient_pass_a_stage_that_does_not_use_them(ranks: Callable[[int], RankPool]) -> None:
    data = Data.make(4, 3, seed=9)
    assert_exactly(ranks(3).run(train_once, data), in_one_process(3, data))


def test_received_tensors_require_a_gradient_where_the_sent_ones_do(ranks: Callable[[int], RankPool]) -> None:
    """A gradient for a mask would be computed and sent for nothing; none for a skip connection would be a wrong result."""
    last, middle, first = ranks(3).run(train_once, Data.make(3, 3, seed=9))
    assert first.received == [()] * 3
    assert middle.received == [(True, False, False)] * 3
    assert last.received == [(True, False, False, True)] * 3


def test_1f1b_keeps_no_more_microbatches_alive_than_there_are_stages(ranks: Callable[[int], RankPool]) -> None:
    for result in ranks(2).run(train_once, Data.make(6, 3, seed=0)):
        alive, most = 0, 0
        for event in result.order:
            alive += 1 if event.startswith("forward") else -1
            most = max(most, alive)
        assert alive == 0
        assert most <= 2
        assert [event for event in result.order if event.startswith("backward")] == [f"backward {i}" for i in range(6)]


def test_training_and_evaluation_alternate(ranks: Callable[[int], RankPool]) -> None:
    """Each kind keeps its buffers; a step must see nothing of the one before."""
    plan = [(kind, Data.make(3, 2, seed)) for seed, kind in enumerate(("train", "evaluate", "train", "evaluate", "train"))]
    results = ranks(2).run(run_plan, plan)
    for step, (kind, data) in enumerate(plan):
        assert_exactly([result[step] for result in results], in_one_process(2, data, training=kind == "train"))


def test_a_remainder_is_a_pass_of_its_own(ranks: Callable[[int], RankPool]) -> None:
    """Another size and number of microbatches, in another pipeline, between two steps of the first."""
    plan = [("train", Data.make(3, 4, 0)), ("train", Data.make(2, 2, 1)), ("train", Data.make(3, 4, 2))]
    results = ranks(2).run(run_plan, plan)
    for step, (_, data) in enumerate(plan):
        assert_exactly([result[step] for result in results], in_one_process(2, data))


def test_evaluation_keeps_no_gradients(ranks: Callable[[int], RankPool]) -> None:
    plan = [("evaluate", Data.make(3, 2, 0))]
    for (result,) in ranks(2).run(run_plan, plan):
        assert result.order == ["forward 0", "forward 1", "forward 2"]
        assert result.gradients == {}


# ------------------------------------------------------------------ the bubble, in one process


@pytest.mark.parametrize(("num_stages", "num_microbatches", "expected"), [(1, 4, 0.0), (2, 1, 0.5), (4, 1, 0.75), (4, 12, 0.2)])
def test_bubble_fraction_is_gpipes(num_stages: int, num_microbatches: int, expected: float) -> None:
    assert bubble_fraction(num_stages, num_microbatches) == pytest.approx(expected)
