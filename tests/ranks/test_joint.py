"""Automatic optimization of steps that are no single region: every rank runs them, as on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fxpipe import FxPipeStrategy, PartitionPlan, make_plan
from tests.lit import make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import Run, compare, go
from tests.ranks.test_manual import Manual, mlp, seen

Ranks = Callable[[int], RankPool]


class Automatic(Manual):
    """Lightning calls backward and steps the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True
        self.net = mlp(5, 9, 9, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | dict[str, Tensor]:
        loss = self.loss(batch[0])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss}

    def loss(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), x)


class Again(Automatic):
    """Goes through all stages again, with what they gave."""

    def loss(self, x: Tensor) -> Tensor:
        once = self.net(x)
        return F.mse_loss(self.net(once), x) + F.mse_loss(self.net(once.detach()), x)


class Momentum(Automatic):
    """Moves a teacher and normalises weights before the model's call."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.head = copy.deepcopy(self.net).requires_grad_(False), nn.Linear(5, 5)

    def loss(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, teachers in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                teachers.mul_(0.9).add_(mine, alpha=0.1)
            self.head.weight /= self.head.weight.norm()
            target = self.teacher(x + 0.1 * torch.randn_like(x))
        return F.mse_loss(self.head(self.net(x)), target)


class MomentumInForward(Automatic):
    """Moves a teacher in the forward that the step calls, which cannot be recorded: its calls are pipelined one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.head = copy.deepcopy(self.net).requires_grad_(False), nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("queue", torch.zeros(4, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for mine, teachers in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                teachers.data = teachers.data * 0.9 + mine.data * 0.1
            target = self.teacher(x)
        found = self.head(self.net(x)) * self.scale + self.queue.mean(0)
        self.queue[int(x.sum() > 0)] = target[0]
        return found, target

    def loss(self, x: Tensor) -> Tensor:
        return F.mse_loss(*self(x))


class Drawing(Automatic):
    """Calls a module with a number: it draws its input itself, so that the call has no samples to be cut by."""

    def __init__(self) -> None:
        super().__init__()
        self.made = Drawn()

    def loss(self, x: Tensor) -> Tensor:
        once = self.net(x)
        return F.mse_loss(self.net(once), x) + self.made(len(x)).square().mean()


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 7, 7, 5)

    def forward(self, count: int) -> Tensor:
        return self.net(torch.ones(count, 3))


class Attacking(Automatic):
    """Trains on inputs that it has changed along their gradient."""

    def loss(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.mse_loss(self.net(x), x.detach()), x)
        return F.mse_loss(self.net(x.detach() + 0.1 * slope.sign()), x.detach())


class OwnBackward(Automatic):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        self.seen.append(torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm())


def _run(module: type[Automatic], **changes: Any) -> Run:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2}
    return Run(module=module, look=seen, options=options, **changes)


RUNS = {
    "again": _run(Again),
    "momentum": _run(Momentum),
    "momentum in forward": _run(MomentumInForward),
    "attacking": _run(Attacking),
    "drawing": _run(Drawing),
    "own backward": _run(OwnBackward),
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    place = Path(folder, f"{name}-{stages}")
    place.mkdir(exist_ok=True)
    return go(RUNS[name], place, stages)


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_step_that_is_no_region_is_that_of_one_device(ranks: Ranks, tmp_path: Path, stages: int) -> None:
    compare(ranks, do, list(RUNS), tmp_path, stages)


def trained_by_plan(path: str) -> tuple[str, list[float]]:
    plan = PartitionPlan.load(path)
    trainer = make_trainer(max_epochs=1, strategy=FxPipeStrategy(plan=plan, num_microbatches=2), devices=2)
    module = Again()
    trainer.fit(module)
    return trainer.strategy.plan.joint_reason, [float(p.detach().sum()) for p in module.parameters()]  # type: ignore[attr-defined]


def test_a_plan_says_that_a_step_is_run_jointly(ranks: Ranks, tmp_path: Path) -> None:
    plan = make_plan(Again(), next(iter(Again().train_dataloader())), num_stages=2)
    plan.save(tmp_path / "plan.json")
    assert "Every rank runs the whole step" in str(plan)
    (reason, sums), _ = ranks(2).run(trained_by_plan, str(tmp_path / "plan.json"))
    assert reason == plan.joint_reason
    module = Again()
    make_trainer(max_epochs=1).fit(module)
    assert sums == pytest.approx([float(p.detach().sum()) for p in module.parameters()], abs=1e-5)
