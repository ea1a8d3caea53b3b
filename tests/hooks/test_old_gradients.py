"""Whose gradients are given up before a batch runs, by what would look at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe.hooks.old_gradients import OldGradients
from tests.lit import make_trainer


class Asks(L.LightningModule):
    """Asks in its step for which parameters it is so, and notes after it whether they had no gradients when backward began."""

    def __init__(self, change: Callable[[Any], Any] = lambda module: None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.found: list[list[int]] = []
        self.gone: list[bool] = []
        change(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parameters = [id(p) for p in OldGradients(self.trainer, self).parameters()]
        self.found.append([i for i, p in enumerate(self.parameters()) if id(p) in parameters])
        return sum(p.sum() for p in self.parameters()) * batch[0].sum()  # type: ignore[return-value]

    def on_before_backward(self, loss: Tensor) -> None:
        self.gone.append(all(p.grad is None for p in self.parameters()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def asked(module: Asks, *callbacks: L.Callback, **options: Any) -> Asks:
    trainer = make_trainer(max_epochs=2, callbacks=list(callbacks), **options)
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(3, 1)), batch_size=1))
    return module


@pytest.mark.parametrize("count", [1, 2])
def test_they_are_those_that_lightning_sets_to_zero_after_the_step(count: int) -> None:
    """An epoch of three batches begins to accumulate anew, with the gradients of its first."""
    module = asked(Asks(), accumulate_grad_batches=count)
    assert [bool(found) for found in module.found] == module.gone
    assert [found for found in module.found if found] == [[0, 1]] * sum(module.gone)


def test_what_no_optimizer_has_is_kept() -> None:
    class OfWeight(Asks):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.layer.weight], lr=0.0)

    assert asked(OfWeight()).found == [[0]] * 6


class HasHook(Asks):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        pass


class SetsToZeros(Asks):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class OwnSGD(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)


class HasOptimizer(Asks):
    def configure_optimizers(self) -> Any:
        return OwnSGD(self.parameters(), lr=0.0)


class Looks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if self.weight.grad is None else 2)


class LooksByName(nn.Linear):
    def _scale(self) -> int:
        return 1 if getattr(self.weight, "grad") is None else 2  # noqa: B009

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self._scale()


def looks(layer: Any, *_: Any) -> None:
    assert layer.weight.grad is None or layer.weight.grad is not None


class SeesAll(L.Callback):
    def on_before_zero_grad(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("module", "callbacks"),
    [
        (HasHook, ()),
        (SetsToZeros, ()),
        (HasOptimizer, ()),
        (lambda: Asks(lambda m: setattr(m, "layer", Looks(1, 1))), ()),
        (lambda: Asks(lambda m: setattr(m, "layer", LooksByName(1, 1))), ()),
        (lambda: Asks(lambda m: m.layer.register_forward_hook(looks)), ()),
        (lambda: Asks(lambda m: m.register_forward_pre_hook(looks)), ()),
        (Asks, (SeesAll(),)),
        (Asks, (LambdaCallback(on_before_zero_grad=lambda *args: None),)),
    ],
    ids=["hook", "to zeros", "optimizer", "layer", "by name", "around a layer", "around the module", "callback", "lambda"],
)
def test_they_are_kept_where_user_code_may_look_at_them(module: Callable[[], Asks], callbacks: tuple[Any, ...]) -> None:
    assert asked(module(), *callbacks).found == [[]] * 6


class SeesLoss(L.Callback):
    def on_before_backward(self, *args: Any) -> None:
        pass


class OwnBackward(L.LightningModule):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class OwnPrecision(Precision):
    pass


@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (L.LightningModule, {}, True),
        (L.LightningModule, {"callbacks": [SeesLoss()]}, False),
        (Asks, {}, False),
        (OwnBackward, {}, False),
        (L.LightningModule, {"plugins": [OwnPrecision()]}, False),
        (L.LightningModule, {"precision": "bf16-mixed"}, True),
    ],
    ids=["nobody", "callback", "hook", "backward", "precision", "Lightning's precision"],
)
def test_new_ones_may_stay_where_no_code_of_users_runs_before_the_backward_pass(
    module: Callable[[], Any], options: dict[str, Any], expected: bool
) -> None:
    trainer, made = make_trainer(**options), module()
    assert OldGradients(trainer, made).new_may_stay is expected


def test_new_ones_are_kept_from_lightning_until_they_are_released() -> None:
    parameter: Any = nn.Parameter(torch.zeros(1))
    trainer, optimizer = make_trainer(), torch.optim.SGD([parameter])
    trainer.strategy.optimizers = [optimizer]
    gradients = OldGradients(trainer, L.LightningModule())
    for _ in range(2):
        parameter.grad = torch.ones(1)
        gradients.keep_new(lambda function: function)
        optimizer.zero_grad()
        optimizer.zero_grad(set_to_none=False)
        assert parameter.grad.tolist() == [1.0]
    gradients.release()
    optimizer.zero_grad()
    assert parameter.grad is None
    assert "zero_grad" not in vars(optimizer)
