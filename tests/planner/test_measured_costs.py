"""Units are timed by running them: what sleeps longer takes longer, for any size of microbatch, and nothing stays of it."""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe import TraceError
from lightning_fxpipe.planner.cost import Chain
from lightning_fxpipe.planner.cut_rule import CutRule
from lightning_fxpipe.planner.measured_costs import measured_seconds
from lightning_fxpipe.planner.step_plan import make_plan, make_planned

WIDTH = 8


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        return value * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(0.02)
        value, weight = ctx.saved_tensors
        return gradient * weight, (gradient * value).sum(0)


class Slow(nn.Module):
    """Sleeps for each sample, and counts what it has seen."""

    def __init__(self, seconds: float = 0.0, slow_backward: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.seconds, self.slow_backward = seconds, slow_backward
        self.batches: list[int] = []

    def forward(self, value: Tensor) -> Tensor:
        if type(value) is Tensor:
            SEEN.put(len(value))
            time.sleep(self.seconds * len(value))
        self.seen += 1
        self.batches.append(1)
        result: Tensor = SlowBackward.apply(value, self.weight) if self.slow_backward else value * self.weight  # type: ignore[no-untyped-call]
        return result


SEEN = SimpleQueue[int]()  # which nobody can put back to what it was


def seen() -> list[int]:
    """The sizes since the last question."""
    return [SEEN.get() for _ in range(SEEN.qsize())]


def chain_of(*modules: nn.Module, batch: Tensor | None = None) -> Chain:
    batch = torch.randn(8, WIDTH) if batch is None else batch
    planned = make_planned(nn.Sequential(*modules), batch, rule=CutRule(num_stages=len(modules)), num_microbatches=2)
    assert planned.assignment is not None
    assert len(planned.assignment.chain.units) == len(modules)
    return planned.assignment.chain


def test_a_unit_takes_as_long_as_its_code_forward_and_backward() -> None:
    quick, slow, slow_back = measured_seconds(chain_of(Slow(), Slow(0.01), Slow(slow_backward=True))) or ()
    assert slow.forward >= 0.04  # four samples
    assert quick.forward < 0.02 < 0.02 + slow_back.forward < 0.04
    assert slow_back.input_backward >= 0.02
    assert slow.input_backward < 0.02


def test_the_first_unit_has_no_gradients_to_give_on() -> None:
    first, second = measured_seconds(chain_of(Slow(slow_backward=True), Slow(slow_backward=True))) or ()
    assert first.input_backward == 0.0
    assert first.weight_backward >= 0.02
    assert second.input_backward >= 0.02


def test_a_microbatch_may_have_any_size() -> None:
    chain = chain_of(Slow(0.005), Slow(0.005))
    for size in (1, 3, 16):
        seen()
        seconds = measured_seconds(chain, size)
        assert seconds is not None
        assert set(seen()) == {size}
        assert all(each.forward >= 0.005 * size for each in seconds)


def test_a_graph_of_one_size_is_not_timed_for_another() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Slow()

        def forward(self, value: Tensor) -> Tensor:
            assert value.shape[0] == 4
            result: Tensor = self.inner(value)
            return result

    planned = make_planned(
        nn.Sequential(Fixed(), Slow()), torch.randn(8, WIDTH), rule=CutRule(num_stages=2), num_microbatches=2
    )
    assert planned.assignment is not None
    assert measured_seconds(planned.assignment.chain, 2) is None
    assert measured_seconds(planned.assignment.chain, 4) is not None


def test_nothing_stays_of_it() -> None:
    chain = chain_of(Slow(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    root = chain.traced.root
    counter = root.get_submodule("0")
    assert isinstance(counter, Slow)
    before = {name: tensor.clone() for name, tensor in root.state_dict().items()}
    counts = len(counter.batches)
    state = torch.get_rng_state()
    assert measured_seconds(chain) is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert len(counter.batches) == counts
    assert all(torch.equal(tensor, before[name]) for name, tensor in root.state_dict().items())
    assert all(parameter.grad is None for parameter in root.parameters())


def test_of_units_that_are_alike_one_is_timed() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, value: Tensor) -> Tensor:
            if type(value) is Tensor:
                SEEN.put(len(value))
                time.sleep(0.01)
            result: Tensor = self.inner(value)
            return result

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(6))

        def forward(self, value: Tensor) -> Tensor:
            for block in self.blocks:
                value = block(value)
            return value

    planned = make_planned(Stack(), torch.randn(8, WIDTH), rule=CutRule(num_stages=2), num_microbatches=2)
    assert planned.assignment is not None
    seen()
    seconds = measured_seconds(planned.assignment.chain)
    assert seconds is not None
    assert len(seconds) == 6
    assert all(each.forward >= 0.01 for each in seconds)
    assert 0 < len(seen()) <= 2 * 11  # the first block, which has no gradients to give on, and one of the others


def test_parameters_without_data_are_made_up() -> None:
    with torch.device("meta"):
        modules = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    seconds = measured_seconds(chain_of(*modules))
    assert seconds is not None
    assert all(each.forward > 0 for each in seconds)
    assert all(parameter.is_meta for module in modules for parameter in module.parameters())


def test_what_needs_real_data_is_refused() -> None:
    class Picky(Slow):
        def forward(self, value: Tensor) -> Tensor:
            if type(value) is Tensor:
                raise ValueError("only real sentences, please")
            return super().forward(value)

    with pytest.raises(TraceError, match="cannot be timed separately") as caught:
        measured_seconds(chain_of(Slow(), Picky()))
    assert "only real sentences" in str(caught.value)


def test_a_pause_of_the_machine_is_not_the_unit_s() -> None:
    """Its mean would have said a tenth of the pause, for this unit and all that are like it."""

    class Paused(Slow):
        def forward(self, value: Tensor) -> Tensor:
            if type(value) is Tensor and SEEN.qsize() == 2:
                time.sleep(0.35)
            return super().forward(value)

    chain = chain_of(Paused(), Slow())
    seen()
    paused, _ = measured_seconds(chain) or ()
    assert len(seen()) > 2
    assert paused.forward < 0.02


def test_a_plan_by_seconds_gives_each_stage_as_much_to_do() -> None:
    """By parameters or flops the cut would be in the middle."""
    modules = [Slow(0.03), *(Slow() for _ in range(7))]
    batch = torch.randn(8, WIDTH)
    plan = make_plan(nn.Sequential(*modules), batch, num_stages=2, num_microbatches=2, balance="seconds")
    assert [(stage.first_module, stage.last_module) for stage in plan.stages] == [("0", "0"), ("1", "7")]
    assert plan.chosen is None
    middle = make_plan(nn.Sequential(*modules), batch, num_stages=2, num_microbatches=2)
    assert middle.stages[0].last_module == "3"
