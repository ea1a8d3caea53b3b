"""The check of the loss while a pipeline trains: it costs no run, tells once, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fxpipe import FxPipeStrategy
from tests.distributed.pool import RankPool
from tests.lit import make_trainer, snapshot
from tests.zoo.lightning_modules import StepRecorder, said_to_the_user, same_batch
from tests.zoo.steps_case import Sgd, classifier, labelled, mlp

Ranks = Callable[[int], RankPool]
UNCHECKED = "could not be checked"
WRONG = "trains with another loss than one device"


class Mean(Sgd):
    """Counts how often its step has come to its end, where only the test can see it."""

    calls: list[int] = []

    def __init__(self) -> None:
        super().__init__()
        self.model = classifier()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        logits = self.model(batch[0])
        if type(logits) is Tensor:  # not while it is traced
            self.calls.append(len(logits))
        return self.loss(logits, batch[1], batch_idx)

    def loss(self, logits: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(logits, labels)

    def batches(self, sizes: tuple[int, ...]) -> list[Any]:
        return labelled(*sizes)


class FailsOnTheBatch(Mean):
    def loss(self, logits: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        if len(logits) > 4:
            raise MemoryError("too much for one go")
        return F.cross_entropy(logits, labels)


class DropoutInModel(Mean):
    """Whether the check can run depends on nothing but the model's own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(mlp(6, 10, 10), nn.Dropout(0.5), mlp(10, 10, 3))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), labels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(*batch)


class ZeroFirst(Mean):
    """The first batch tells nothing, the second that it is a sum."""

    def loss(self, logits: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(logits, labels, reduction="sum") * 0.1 * min(batch_idx, 1)


class AlwaysZero(Mean):
    def loss(self, logits: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(logits, labels) * 0


class WrongLater(Mean):
    """Batches of another shape are another trace, and another loss."""

    def batches(self, sizes: tuple[int, ...]) -> list[Any]:
        return [(x.reshape(4, 2, 6), y.reshape(4, 2)) if i > 1 else (x, y) for i, (x, y) in enumerate(labelled(*sizes))]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        reduction = "mean" if batch[0].dim() == 2 else "sum"
        return F.cross_entropy(self.model(batch[0]).flatten(0, -2), batch[1].flatten(), reduction=reduction)


class WrongFromTheTenth(Mean):
    def loss(self, logits: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        losses = F.cross_entropy(logits, labels, reduction="none")
        return losses.mean() if batch_idx < 9 else losses.mean() / losses.detach().std()


class MovesCenter(Mean):
    """Changes a frozen parameter of its own through its data, which no version counts, and keeps what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.rand(6), requires_grad=False)
        self.norm = nn.BatchNorm1d(3)
        self.losses: list[float] = []

    def loss(self, logits: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        self.center.data.mul_(0.9)
        self.losses.append(0.0)
        return F.cross_entropy(logits + self.center.sum(), labels)


MODULES = {kind.__name__: kind for kind in Mean.__subclasses__()} | {"Mean": Mean}


def fit(name: str, options: dict[str, Any], sizes: tuple[int, ...] = (8, 8, 8)) -> dict[str, Any]:
    L.seed_everything(7, verbose=False)
    Mean.calls.clear()
    module, recorder = MODULES[name](), StepRecorder()
    trainer = make_trainer(max_epochs=1, num_sanity_val_steps=0, callbacks=[recorder], **options)
    loader = torch.utils.data.DataLoader(module.batches(sizes), batch_size=None, collate_fn=same_batch)  # type: ignore[arg-type]
    with said_to_the_user() as said:
        trainer.fit(module, loader)
    told = [text for text in said if UNCHECKED in text or WRONG in text]
    state = snapshot(module)
    return {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "state": state,
        "told": told,
        "calls": list(Mean.calls),
        "kept": len(getattr(module, "losses", [])),
    }


def piped(name: str, microbatches: int, sizes: tuple[int, ...] = (8, 8, 8), **strategy: Any) -> dict[str, Any]:
    return fit(name, {"strategy": FxPipeStrategy(num_microbatches=microbatches, **strategy), "devices": 2}, sizes)


def last_stage(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 0 holds it."""
    return results[0]


def assert_same(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        for step, gradients in enumerate(result["gradients"]):
            for fqn, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected["gradients"][step][fqn], rtol=1e-5, atol=1e-6)
        for fqn, value in result["state"].items():
            torch.testing.assert_close(value, expected["state"][fqn], rtol=1e-5, atol=1e-6, msg=lambda m, f=fqn: f"{f}: {m}")


def test_a_mean_is_checked_once_and_nothing_is_said(ranks: Ranks) -> None:
    results = ranks(2).run(piped, "Mean", 4)
    assert_same(results, fit("Mean", {}))
    assert [result["told"] for result in results] == [[], []]
    assert last_stage(results)["calls"] == [2] * 4 + [8] + [2] * 8  # the whole batch once, after the first batch
    assert results[1]["calls"] == []


def test_the_tenth_batch_is_checked_again(ranks: Ranks) -> None:
    result = last_stage(ranks(2).run(piped, "WrongFromTheTenth", 2, (8,) * 12))
    assert [i for i, size in enumerate(result["calls"]) if size == 8] == [2, 21]
    (told,) = result["told"]
    assert WRONG in told


def test_code_that_fails_on_the_whole_batch_costs_the_check_only(ranks: Ranks) -> None:
    results = ranks(2).run(piped, "FailsOnTheBatch", 2)
    assert_same(results, fit("Mean", {}))
    (told,) = last_stage(results)["told"]
    assert UNCHECKED in told
    assert "MemoryError: too much for one go" in told
    assert "test_reduction.py" in told
    assert last_stage(results)["calls"].count(8) == 1


def test_a_loss_behind_dropout_in_the_model_is_told_to_be_unchecked(ranks: Ranks) -> None:
    (told,) = last_stage(ranks(2).run(piped, "DropoutInModel", 2))["told"]
    assert UNCHECKED in told
    assert "draws random numbers" in told


def test_a_loss_of_zero_is_checked_on_the_next_batch(ranks: Ranks) -> None:
    results = ranks(2).run(piped, "ZeroFirst", 4)
    assert_same(results, fit("ZeroFirst", {}))
    assert last_stage(results)["calls"].count(8) == 2
    assert last_stage(results)["told"] == []


def test_a_loss_that_stays_zero_is_given_up(ranks: Ranks) -> None:
    result = last_stage(ranks(2).run(piped, "AlwaysZero", 2, (8,) * 14))
    assert result["calls"].count(8) == 10
    (told,) = result["told"]
    assert UNCHECKED in told


def test_another_trace_is_checked_again(ranks: Ranks) -> None:
    result = last_stage(ranks(2).run(piped, "WrongLater", 2, (8,) * 6))
    (told,) = result["told"]
    assert WRONG in told
    assert "It is a sum over samples, not a mean." in told


def test_what_the_check_runs_changes_no_parameter_and_no_list(ranks: Ranks) -> None:
    result = last_stage(ranks(2).run(piped, "MovesCenter", 4))
    expected = fit("MovesCenter", {})["state"]["center"] / 0.9**3 * 0.9**12  # four microbatches, three batches
    torch.testing.assert_close(result["state"]["center"], expected)
    assert result["kept"] == 3  # what microbatches append becomes one entry for the batch, as on one device
