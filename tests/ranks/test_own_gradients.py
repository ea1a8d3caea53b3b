"""Steps of automatic optimization that compute gradients by themselves, as to weigh losses by them; hooks on gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe import FxPipeStrategy, UnsupportedError
from tests.lit import make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go


class ByResults(Net):
    """By what the model has given: as far as the stages, and no further."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        self.log("norm", gradient.norm())
        return loss + (gradient.detach() * logits).sum()


class ByParameter(Net):
    """GradNorm (Chen et al. 2018) weighs losses by their gradients with respect to a layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        losses = nn.functional.cross_entropy(logits, batch[1]), logits.square().mean()
        weight = self.head[2].weight
        norms = [torch.autograd.grad(loss, weight, retain_graph=True)[0].norm() for loss in losses]
        self.log_dict({"first": norms[0], "second": norms[1]})
        return losses[0] + (norms[0] / norms[1]).detach() * losses[1]


class ByOwnParameter(Net):
    """By a parameter that the step uses by itself, of whatever rank."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]) * self.scale, batch[1])
        (gradient,) = torch.autograd.grad(loss + self.scale.square().sum(), self.scale, retain_graph=True)
        self.log("norm", gradient.norm())
        return loss * (1 + gradient.norm().detach())


class OfAPart(Net):
    """What goes backward within the step is set to zero after it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        logits.square().mean().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("loss", loss)
        return loss


KINDS: dict[str, Any] = {each.__name__: each for each in (ByResults, ByParameter, ByOwnParameter, OfAPart)}
FEW = ("ByResults auto", "ByParameter 1f1b", "ByOwnParameter auto", "OfAPart auto")
MORE = ("ByResults gpipe", "ByParameter gpipe", "ByOwnParameter 1f1b", "OfAPart 1f1b")


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    """Runs on one device, or on every rank."""
    kind, schedule = name.split()
    run = Run(module=KINDS[kind], strategy={"num_microbatches": 4, "schedule": schedule})
    path = Path(folder) / f"{name} {stages}"
    path.mkdir(exist_ok=True)
    return go(run, path, stages)


@pytest.mark.parametrize("names", [FEW, pytest.param(MORE, marks=pytest.mark.slow)], ids=["few", "more"])
def test_they_are_those_of_one_device(ranks: Callable[[int], RankPool], names: tuple[str, ...], tmp_path: Path) -> None:
    """Through parameters every rank runs the step; by the model's results with a schedule in which it runs once."""
    compare(ranks, do, names, tmp_path, 2)


def fit(module: L.LightningModule, schedule: str = "1f1b", num_microbatches: int = 4) -> None:
    strategy = FxPipeStrategy(num_stages=2, schedule=schedule, num_microbatches=num_microbatches)
    make_trainer(strategy=strategy, devices=1, max_steps=4).fit(module)


def test_a_step_that_runs_for_each_microbatch_is_refused() -> None:
    """Each microbatch would have a gradient of its own."""
    with pytest.raises(UnsupportedError, match="1F1B does not support this loss") as caught:
        fit(ByResults())
    assert "the step computes gradients itself in " in str(caught.value)
    assert "test_own_gradients.py" in str(caught.value)


class Later(ByResults):
    """As if nobody could know before."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        step: Any = super().training_step if self.trainer.global_step > 1 else super(ByResults, self).training_step
        return step(batch, batch_idx)  # type: ignore[no-any-return]


def test_a_step_that_begins_to_is_refused_by_then() -> None:
    with pytest.raises(UnsupportedError, match="The step itself computes gradients, but this schedule runs the step once per"):
        fit(Later())


class Clips(Net):
    """Clips by hooks on parameters: each microbatch's part, where there are several."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.head[0].weight.register_hook(self.clip)

    def clip(self, gradient: Tensor) -> Tensor:
        self.seen += 1
        return gradient.clamp(-0.01, 0.01)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_hooks_on_parameters_are_told_to_run_for_each_microbatch(schedule: str) -> None:
    module = Clips()
    with pytest.warns(UserWarning, match="Gradient hooks of parameters run once per microbatch") as caught:
        fit(module, schedule)
    told = [str(each.message) for each in caught if "Gradient hooks" in str(each.message)]
    assert len(told) == 1
    assert "head.0.weight" in told[0]
    assert module.seen >= 4 * 4


def test_hooks_on_parameters_run_once_with_one_microbatch(recwarn: pytest.WarningsRecorder) -> None:
    module = Clips()
    fit(module, "gpipe", num_microbatches=1)
    assert module.seen == 4
    assert not [each for each in recwarn if "Gradient hooks" in str(each.message)]
