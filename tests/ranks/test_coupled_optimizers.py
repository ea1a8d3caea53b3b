"""Optimizers whose step needs all parameters together: every rank steps them for the whole model, as one device does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go

Ranks = Callable[[int], RankPool]


class Sharp(torch.optim.Optimizer):
    """SAM (Foret et al. 2021), as it is usually written: two closures for a step, and the norm of all gradients."""

    def __init__(self, params: Any, base: Any, radius: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"radius": radius, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        loss = closure()
        trained = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for _, p in trained]).norm()
        for group, p in trained:
            self.state[p]["before"] = p.data.clone()
            p.add_(p.grad * (group["radius"] / norm))
        closure()
        for _, p in trained:
            p.data.copy_(self.state[p]["before"])
        self.base.step()
        return loss


class Clipping(torch.optim.Optimizer):
    """LAMB's way: gradients are clipped by the norm of all, and a rate for each parameter; a moment is kept."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        parameters = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        factor = (0.1 / torch.stack([p.grad.square().sum() for _, p in parameters]).sum().sqrt()).clamp(max=1)
        for group, p in parameters:
            moment = self.state[p].setdefault("moment", torch.zeros_like(p))
            moment.mul_(0.9).add_(p.grad * factor)
            p.add_(moment, alpha=-group["lr"] * float(p.norm()))
        return loss


class Coupled(Net):
    shuffle = False

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], manual: bool = False) -> None:
        super().__init__()
        self.double()  # line searches amplify rounding
        self.make = make
        self.automatic_optimization = not manual
        self.num_runs = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_runs += 1
        if self.automatic_optimization:
            return super().training_step([batch[0].double(), batch[1]], batch_idx)
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            loss = F.cross_entropy(self(batch[0].double()), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        loss = optimizer.step(closure=closure)
        self.log("loss", loss)
        return {"loss": loss}  # type: ignore[return-value]

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LBFGS": partial(torch.optim.LBFGS, lr=0.5, max_iter=3, line_search_fn="strong_wolfe"),
    "SAM": partial(Sharp, base=torch.optim.SGD, lr=0.05, momentum=0.9),
    "LAMB": Clipping,
}


def counted(trainer: L.Trainer, module: Any, folder: Path) -> int:
    return int(module.num_runs)


def _run(name: str, *, manual: bool = False, resume_from: str | None = None, **strategy: Any) -> Run:
    options = {"limit_train_batches": 3, "limit_val_batches": 0, "enable_checkpointing": resume_from is not None}
    return Run(
        module=partial(Coupled, OPTIMIZERS[name], manual),
        look=counted,
        options=options,
        callbacks=_keeping if resume_from else lambda folder: (),
        strategy={"num_microbatches": 2, **strategy},
        resume_from=resume_from,
    )


def _keeping(folder: Path) -> list[L.Callback]:
    return [L.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)]


RUNS = {
    **{name: _run(name) for name in OPTIMIZERS},
    **{f"{name}, manual": _run(name, manual=True) for name in OPTIMIZERS},
    # The last stage's gradients are in place after its step, so only the others set theirs to zero: the ranks must meet still.
    "LBFGS, 1F1B": _run("LBFGS", schedule="1f1b"),
    **{f"{name}, resumed": _run(name, resume_from="epoch=0.ckpt") for name in ("LBFGS", "LAMB")},
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    place = Path(folder, f"{name}-{stages}")
    place.mkdir(exist_ok=True)
    return go(RUNS[name], place, stages)


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_it_trains_as_on_one_device(ranks: Ranks, tmp_path: Path, stages: int) -> None:
    compare(ranks, do, list(RUNS), tmp_path, stages)
