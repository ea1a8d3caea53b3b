"""Recomputed blocks train as kept ones do: every gradient of ten steps, with dropout, under every kind of schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy
from tests.lit import fit_and_record, make_trainer
from tests.ranks.pool import RankPool

TOLERANCE = 1e-5


@cache
def reference(model: str) -> dict[str, Any]:
    return fit_and_record(model)


def recomputing_fit(model: str, recompute: Any, schedule: str, devices: int, each: int) -> dict[str, Any]:
    """Runs on every rank."""
    strategy = FxPipeStrategy(schedule=schedule, activation_checkpointing=recompute, stages_per_rank=each)  # type: ignore[arg-type]
    result = fit_and_record(model, strategy=strategy, devices=devices)
    assert strategy.plan.checkpointed_modules
    return result


@pytest.mark.parametrize(
    ("model", "recompute", "schedule", "devices", "each"),
    [
        ("gpt", True, "gpipe", 2, 1),
        ("gpt", True, "1f1b", 2, 1),
        ("gpt", ["*.blocks.*"], "zbv_zero_bubble", 2, 2),
        ("unet", True, "zb_h1", 2, 1),
        pytest.param("gpt", True, "interleaved_1f1b", 2, 2, marks=pytest.mark.slow),
        pytest.param("gpt", True, "dualpipev", 2, 2, marks=pytest.mark.slow),
        pytest.param("rotary", True, "1f1b", 2, 1, marks=pytest.mark.slow),
        pytest.param("mlp", True, "gpipe", 3, 1, marks=pytest.mark.slow),
    ],
)
def test_equals_one_device_that_keeps_everything(
    ranks: Callable[[int], RankPool], model: str, recompute: Any, schedule: str, devices: int, each: int
) -> None:
    expected = reference(model)
    results = ranks(devices).run(recomputing_fit, model, recompute, schedule, devices, each)
    gradients: list[dict[str, Tensor]] = [{} for _ in range(10)]
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
        assert result["metrics"] == pytest.approx(expected["metrics"], abs=TOLERANCE)
        for step, found in enumerate(result["gradients"]):
            gradients[step] |= found
        for fqn, value in result["state"].items():
            torch.testing.assert_close(value, expected["state"][fqn], rtol=0, atol=TOLERANCE, msg=fqn)
    for step, found in enumerate(gradients):
        assert found.keys() == expected["gradients"][step].keys()
        for fqn, gradient in found.items():
            torch.testing.assert_close(gradient, expected["gradients"][step][fqn], rtol=1e-5, atol=TOLERANCE, msg=fqn)


class Counted(nn.Linear):
    """Counts how often it really runs."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            RUNS.put(None)
        return torch.tanh(super().forward(x))


RUNS = SimpleQueue[None]()  # which nobody can put back to what it was


class Counting(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Sequential(Counted(8, 8), Counted(8, 8)) for _ in range(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for part in self.body:
            x = part(x)
        return x.square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def on_train_batch_start(self, *_: Any) -> None:
        self.before = RUNS.qsize()

    def on_train_batch_end(self, *_: Any) -> None:
        self.last = RUNS.qsize() - self.before

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_zero_bubble"])
def test_a_block_that_is_recomputed_runs_again_for_each_microbatch_and_in_training_only(schedule: Any) -> None:
    loader = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4)
    runs: dict[str, tuple[int, int]] = {}
    for recompute in (False, True):
        strategy = FxPipeStrategy(schedule=schedule, activation_checkpointing=recompute, stages_per_rank=2, num_microbatches=2)  # type: ignore[arg-type]
        module, trainer = Counting(), make_trainer(max_epochs=1, strategy=strategy)
        trainer.fit(module, loader)
        before = RUNS.qsize()
        trainer.validate(module, loader, verbose=False)
        runs[recompute] = module.last, RUNS.qsize() - before
    assert runs[False][0] == 2 * 8  # layers for each microbatch
    again = runs[True][0] - runs[False][0]
    # Where gradients of weights come later, both halves of a backward need the block's activations.
    assert again == 2 * 8 or (schedule == "interleaved_zero_bubble" and 2 * 8 < again <= 2 * 2 * 8)
    assert runs[True][1] == runs[False][1]


class Noisy(L.LightningModule):
    """Dropout in modules that stay whole, in opened ones and, if wanted, in attention, which draws within one operator."""

    def __init__(self, attention_dropout: float) -> None:
        super().__init__()
        L.seed_everything(5, verbose=False)
        self.body = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True, norm_first=True) for _ in range(4)
        )
        for layer in self.body:
            layer.self_attn.dropout = attention_dropout  # type: ignore[union-attr]
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 3))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.body:
            x = layer(x)
        loss: Tensor = nn.functional.cross_entropy(self.head(x.mean(1)), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def noisy_fit(attention_dropout: float = 0.0, **options: Any) -> tuple[dict[str, Tensor], float]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 5, 8, generator=generator), torch.randint(0, 3, (24,), generator=generator))
    module = Noisy(attention_dropout)
    trainer = make_trainer(max_epochs=2, **options)
    trainer.fit(module, DataLoader(data, batch_size=8))
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return state, float(trainer.callback_metrics["loss"])


def noisy_in_stages(schedule: str, recompute: bool, attention_dropout: float = 0.0) -> tuple[dict[str, Tensor], float]:
    """Runs on every rank."""
    strategy = FxPipeStrategy(
        schedule=schedule,  # type: ignore[arg-type]
        activation_checkpointing=recompute,  # type: ignore[arg-type]
        num_microbatches=4,
        gather_after_run=True,
    )
    found = noisy_fit(attention_dropout, strategy=strategy, devices=2)
    assert bool(strategy.plan.checkpointed_modules) is recompute
    return found


def assert_same(results: list[Any], state: dict[str, Tensor], loss: float) -> None:
    for found, last in results:
        assert last == pytest.approx(loss, abs=TOLERANCE)
        for name, value in found.items():
            torch.testing.assert_close(value, state[name], rtol=0, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize("attention_dropout", [0.0, 0.3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zbv_zero_bubble"])
def test_dropout_is_the_same_when_a_block_runs_again(
    ranks: Callable[[int], RankPool], schedule: str, attention_dropout: float
) -> None:
    """With several microbatches each stage draws for itself, so the reference is the same pipeline that keeps everything."""
    kept = ranks(2).run(noisy_in_stages, schedule, False, attention_dropout)
    assert_same(ranks(2).run(noisy_in_stages, schedule, True, attention_dropout), *kept[0])


def test_where_there_is_room_nothing_is_recomputed(ranks: Callable[[int], RankPool]) -> None:
    kept = ranks(2).run(noisy_in_stages, "gpipe", False)
    assert_same(ranks(2).run(noisy_in_stages, "gpipe", "auto"), *kept[0])
