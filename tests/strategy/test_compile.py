"""``compile=True``: blocks that are alike are compiled once, and what is compiled trains as one device does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy, UnsupportedError, make_plan
from lightning_fxpipe.planner.alternatives import Alternative
from tests.lit import make_trainer

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        L.seed_everything(2, verbose=False)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for block in self.blocks:
            x = block(x)
        loss: Tensor = x.square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("value", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counting:
    """A backend that counts the graphs that it gets, and how often they run."""

    def __init__(self) -> None:
        self.num_graphs = self.num_runs = 0

    def __call__(self, module: fx.GraphModule, example: Any) -> Callable[..., Any]:
        self.num_graphs += 1

        def run(*args: Any) -> Any:
            self.num_runs += 1
            return module(*args)

        return run


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Counting:
    torch._dynamo.reset()
    found = Counting()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=found))
    return found


def fitted(**options: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    module = Lit()
    data = TensorDataset(torch.randn(22, WIDTH, generator=torch.Generator().manual_seed(0)))
    trainer = make_trainer(max_epochs=2, **options)
    trainer.fit(module, DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
    return dict(module.state_dict()), {name: float(value) for name, value in trainer.callback_metrics.items()}


def assert_as_on_one_device(**options: Any) -> None:
    (state, logged), (expected, values) = fitted(strategy=FxPipeStrategy(stages_per_rank=2, **options)), fitted()
    assert logged == pytest.approx(values, abs=1e-5)
    assert state.keys() == expected.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "options", [{"schedule": "gpipe"}, {"schedule": "1f1b"}, {"schedule": "interleaved_1f1b", "activation_checkpointing": True}]
)
def test_blocks_that_are_alike_are_compiled_once_and_run_in_every_step(backend: Counting, options: dict[str, Any]) -> None:
    assert_as_on_one_device(num_microbatches=2, compile=True, **options)
    # One graph for the first size of microbatch, one for all others, and both with and without gradients.
    assert 1 <= backend.num_graphs <= 6
    # Four blocks, two microbatches of each of two epochs' three batches: in training and in validation.
    assert backend.num_runs >= 2 * (4 * 2 * 2 * 3) - 4 * 2 * 4  # looks at the first batch run as they are


def test_without_it_nothing_is_compiled(backend: Counting) -> None:
    assert_as_on_one_device(num_microbatches=2)
    assert backend.num_graphs == 0


@pytest.mark.slow
def test_torchs_own_compiler_gives_the_same() -> None:
    torch._dynamo.reset()
    assert_as_on_one_device(num_microbatches=2, compile=True, schedule="1f1b")


@pytest.mark.parametrize("schedule", ["zb_h1", "zbv_zero_bubble", "interleaved_zero_bubble"])
def test_a_schedule_that_splits_backward_passes_is_refused(schedule: Any) -> None:
    with pytest.raises(ValueError, match="the backward pass of a compiled module cannot be split"):
        FxPipeStrategy(compile=True, schedule=schedule)


def test_a_plan_that_was_chosen_for_such_a_schedule_is_refused() -> None:
    plan = make_plan(Lit(), [torch.randn(8, WIDTH)], num_stages=2)
    chosen = Alternative(
        schedule="zbv_zero_bubble",
        stages_per_rank=2,
        num_microbatches=4,
        step_seconds=1.0,
        idle_share=0.0,
        peak_bytes=1,
        fits=True,
    )
    strategy = FxPipeStrategy(plan=replace(plan, alternatives=(chosen,)), compile=True)
    with pytest.raises(UnsupportedError, match="is for a schedule that splits"):
        make_trainer(max_epochs=1, strategy=strategy).fit(Lit(), DataLoader(TensorDataset(torch.randn(8, WIDTH)), batch_size=8))


def test_a_step_that_every_rank_runs_is_refused() -> None:
    class ByHand(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    strategy = FxPipeStrategy(stages_per_rank=2, compile=True)
    with pytest.raises(UnsupportedError, match="does not support steps that run on every rank"):
        make_trainer(max_epochs=1, strategy=strategy).fit(
            ByHand(), DataLoader(TensorDataset(torch.randn(8, WIDTH)), batch_size=8)
        )


def test_what_is_chosen_does_not_split_backward_passes() -> None:
    strategy = FxPipeStrategy(balance="auto", compile=True)
    fitted(strategy=strategy)
    assert {each.schedule for each in strategy.plan.alternatives} == {"gpipe", "1f1b", "interleaved_1f1b"}
