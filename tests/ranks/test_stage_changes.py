"""A forward that counts its calls, or moves frozen parameters, does so once for a batch: such a batch is not cut."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fxpipe import FxPipeStrategy
from tests.lit import LitModel, make_trainer
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]
TOLERANCE = 1e-5


def mlp() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))


class Annealing(nn.Module):
    """Counts its calls, and computes with their number."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.steps = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        self.steps.append(self.step)
        return x / (1 + 0.5 / self.step)


class Collecting(nn.Module):
    """Keeps something of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(self.seen))
        return x


class Sizing(nn.Module):
    """Notes for later how many samples it had."""

    capacity = 0

    def forward(self, x: Tensor) -> Tensor:
        self.capacity = 2 * len(x)
        return x


def sizing() -> nn.Module:
    return nn.Sequential(mlp(), Sizing(), mlp())


def annealing() -> nn.Module:
    return nn.Sequential(mlp(), Annealing(), mlp())


def collecting() -> nn.Module:
    return nn.Sequential(mlp(), Collecting(), mlp())


class Teaching(nn.Module):
    """Moves a teacher in place."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def move(self) -> None:
        for teachers, mine in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            teachers.data.mul_(0.9).add_(mine.data, alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.move()
        return self.net(x) - self.teacher(x).detach()


class Bounded(nn.Linear):
    """Bounds its weights, as EEGNet's layers do: doing it again changes nothing."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.4)
        return super().forward(x)


def bounded() -> nn.Module:
    return nn.Sequential(mlp(), Bounded(6, 6), mlp())


class Lit(LitModel):
    def __init__(self, make: Callable[[], nn.Module], *, is_manual: bool) -> None:
        super().__init__("mlp")
        self.model = make()
        self.automatic_optimization = not is_manual

    def loss(self, batch: Tensor) -> Tensor:
        return (self.model(batch) - 1).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def fit(make: Callable[[], nn.Module], is_manual: bool, **options: Any) -> dict[str, Any]:
    """Runs on one device, or on every rank."""
    torch.manual_seed(3)
    module = Lit(make, is_manual=is_manual)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer = make_trainer(max_epochs=1, limit_val_batches=1.0 if make is bounded else 0, **options)
        trainer.fit(module, DataLoader(torch.randn(15, 6), batch_size=4), DataLoader(torch.randn(6, 6), batch_size=4))
    own = [{name: getattr(child, name, None) for name in ("step", "steps", "seen")} for child in module.model.modules()]
    return {"state": module.state_dict(), "own": own, "warned": [str(one.message) for one in warned]}


def fit_in_stages(make: Callable[[], nn.Module], is_manual: bool) -> dict[str, Any]:
    """Runs on every rank."""
    return fit(make, is_manual, strategy=FxPipeStrategy(num_microbatches=2), devices=2)


@pytest.mark.parametrize(
    ("make", "is_manual", "why"),
    [
        (annealing, False, "changes model.1.step with each call"),
        (annealing, True, "changes model.1.step with each call"),
        (collecting, False, "changes model.1.seen with each call"),
        (Teaching, False, "changes model.teacher"),
        (bounded, False, ""),
        (Teaching, True, ""),  # the code that moves it is taken for the step's, and each net's call is cut
    ],
)
def test_a_forward_that_counts_or_teaches_runs_once_for_a_batch(
    ranks: Ranks, make: Callable[[], nn.Module], is_manual: bool, why: str
) -> None:
    expected = fit(make, is_manual)
    found = ranks(2).run(fit_in_stages, make, is_manual)
    assert any("the model's forward" in text and why in text for text in found[0]["warned"]) == bool(why)
    for each in found:
        torch.testing.assert_close(each["state"], expected["state"], rtol=0, atol=TOLERANCE)
        assert each["own"] == expected["own"]


def test_a_number_that_a_module_sets_by_the_number_of_samples_is_told_of(ranks: Ranks) -> None:
    """It is that of a microbatch then."""
    found = ranks(2).run(fit_in_stages, sizing, False)
    assert any("updates buffers or numbers" in text and "model.1.capacity" in text for text in found[0]["warned"])
