"""A tensor between two stages that brings no gradient back: what made it has none, as on one device, and not a zero.

An optimizer skips parameters without a gradient. Of a zero, momentum and weight decay make a step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from lightning_fxpipe import FxPipeError, FxPipeStrategy
from tests.lit import make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import NetWithLoss, Run, compare, go


class Decayed(NetWithLoss):
    """Notes which gradients there are."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[bool]] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.3)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.found.append([parameter.grad is None for parameter in self.parameters()])


class StopsLater(Decayed):
    """Detaches between two blocks, from a step on."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.backbone(x)
        return self.head(hidden.detach() if self.global_step > 2 else hidden)


class Stop(nn.Module):
    """Detaches what it gets, inside a module that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.detach()))


class StopsInside(Decayed):
    """The last two of several blocks that are alike bring no gradient back."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(2)), Stop(), Stop())


class WithTeacher(Decayed):
    """Has two results, and compares one with the other, of which it takes no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.teacher = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)), nn.Linear(12, 5))

    def forward(self, x: Tensor) -> Any:
        taught = self.teacher(x)
        return self.head(self.backbone(x)), taught

    def loss(self, batch: Any) -> Tensor:
        scores, taught = self(batch[0])
        return cross_entropy(scores, batch[1]) + mse_loss(scores, taught.detach())


class ByTurns(WithTeacher):
    """Trains by one of its results, then by the other."""

    def loss(self, batch: Any) -> Tensor:
        found = self(batch[0])
        return cross_entropy(found[self.global_step % 2], batch[1])


class Written(Decayed):
    """Writes a part with gradients and one without into the same tensor."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.backbone[0](x)
        both = torch.zeros(len(x), 2, 12)
        both[:, 0] = hidden.detach()
        both[:, 1] = self.backbone[1](hidden.detach())
        return self.head(self.backbone[2](both.sum(1)))


class ByHand(Decayed):
    """Calls two parts of the model in a step that every rank runs."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        hidden = self.backbone(batch[0])
        self.manual_backward(cross_entropy(self.head(hidden.detach() if batch_idx % 2 else hidden), batch[1]))
        self.on_before_optimizer_step(optimizer)
        optimizer.step()


CASES: dict[str, tuple[type[Decayed], dict[str, Any]]] = {
    "later": (StopsLater, {}),
    "inside": (StopsInside, {}),
    "inside, 1f1b": (StopsInside, {"schedule": "1f1b"}),
    "teacher": (WithTeacher, {}),
    "teacher, 1f1b": (WithTeacher, {"schedule": "1f1b"}),
    "teacher, zb_h1": (WithTeacher, {"schedule": "zb_h1"}),
    "by turns": (ByTurns, {}),
    "written": (Written, {}),
    "by hand": (ByHand, {}),
}


def absent(trainer: Any, module: Any, folder: Path) -> list[list[bool]]:
    """True for each parameter without a gradient, step by step."""
    found: list[list[bool]] = module.found
    assert any(map(any, found))
    return found


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    """A short run."""
    module, options = CASES[name]
    run = Run(module=module, look=absent, strategy={"num_microbatches": 2, **options}, options={"limit_val_batches": 0})
    return go(run, Path(folder) / f"{name}{stages}", stages)


@pytest.mark.parametrize("stages", [2, 3])
def test_gradients_that_one_device_lacks_are_none(ranks: Callable[[int], RankPool], tmp_path: Path, stages: int) -> None:
    compare(ranks, do, list(CASES), tmp_path, stages)


class LeavesOut(WithTeacher):
    """Trains by both of its results, from the third step on by the scores alone."""

    def loss(self, batch: Any) -> Tensor:
        scores, taught = self(batch[0])
        loss = cross_entropy(scores, batch[1])
        return loss + taught.square().mean() if self.global_step < 2 else loss


def left_out() -> str:
    """Returns the error of a short run with 1F1B, after the number of its steps."""
    strategy = FxPipeStrategy(num_microbatches=2, schedule="1f1b")
    trainer = make_trainer(max_epochs=1, strategy=strategy, devices=2)
    with pytest.raises(FxPipeError) as caught:
        trainer.fit(LeavesOut())
    notes = getattr(caught.value, "__notes__", [])
    return "".join([f"{trainer.global_step} steps. ", str(caught.value), *notes])


def test_a_result_that_the_loss_leaves_out_later_is_refused_with_1f1b(ranks: Callable[[int], RankPool]) -> None:
    pool = ranks(2)
    try:
        for message in pool.run(left_out):
            assert message.startswith("2 steps. ")
            assert "The loss no longer depends on a result of the model that it has depended on before." in message
            assert "(8, 5)" in message
    finally:
        pool.kill()
