"""Ranks come to the same graph: each has what the step puts back, and one that would record alone says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe import PeerError, TraceError
from tests.lit import make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go

Ranks = Callable[[int], RankPool]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.settings = nn.Linear(12, 12), 1.0, {"shift": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.scale + self.settings["shift"]

    def rescale(self, scale: float) -> None:
        self.scale = scale


class PutsBack(Net):
    """Sets something before the model's call and puts it back after, in validation otherwise than in training."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*(Scaled() for _ in range(4)))
        self.is_on, self.modes, self.stack, self.factor = False, {"now": 1}, [0], 1.0
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x) * (2.0 if self.is_on else 1.0) * self.factor)

    def _loss(self, batch: Any, is_on: bool) -> Tensor:
        self.is_on, self.factor, self.extra = is_on, 0.9 + 0.01 * self.global_step, 3
        self.modes["now"] = 2
        self.stack.append(1)
        for block in () if is_on else self.backbone:
            block.rescale(0.8)
            block.settings["shift"] = 0.2
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.is_on, self.factor, self.modes["now"] = False, 1.0, 1
        self.stack.pop()
        del self.extra
        for block in () if is_on else self.backbone:
            block.rescale(1.1)
            block.settings["shift"] = 0.1
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch, is_on=False)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch, is_on=True))

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append((self.is_on, self.factor, dict(self.modes), list(self.stack), hasattr(self, "extra")))

    on_validation_batch_end = on_train_batch_end


class PutsBackInParts(PutsBack):
    """Calls its parts from the step: one rank recorded the second epoch's steps anew, and the others waited for it."""

    def _loss(self, batch: Any, is_on: bool) -> Tensor:
        self.is_on = is_on
        loss = nn.functional.cross_entropy(self.head(self.backbone(batch[0]) + int(self.is_on)), batch[1])
        self.is_on = False
        return loss


RUNS = {
    f"{module.__name__} {schedule}": Run(
        module=module,
        look=lambda trainer, module, folder: module.seen,
        strategy={"num_microbatches": 2, "schedule": schedule},
    )
    for module, schedule in ((PutsBack, "gpipe"), (PutsBack, "1f1b"), (PutsBackInParts, "gpipe"))
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    path = Path(folder) / name / str(stages)
    path.mkdir(parents=True, exist_ok=True)
    return go(RUNS[name], path, stages)


def test_every_rank_has_what_the_step_puts_back(ranks: Ranks, tmp_path: Path) -> None:
    """Only what differed after the step was sent, and nothing of submodules: other ranks kept what they had set before the
    model's call."""
    compare(ranks, do, list(RUNS), tmp_path, 2)


class ChangesAlone(Net):
    """Rank 1 alone notices a new mode."""

    mode = "a"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if self.mode == "a" else 2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and torch.distributed.get_rank() == 1:
            self.mode = "b"


class SwitchesAlone(ChangesAlone):
    """Every rank knows both modes; in the fifth batch rank 0 alone has the other one."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        is_switched = self.global_step == 4 and torch.distributed.get_rank() == 0
        self.mode = "ab"[(self.global_step + is_switched) % 2]


class ScalesAlone(ChangesAlone):
    """The factor is an input of the graph, and one rank has another one."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.factor = 1 + 0.1 * self.global_step + 0.01 * (self.global_step == 4 and torch.distributed.get_rank() == 0)


def ends_with(module: type[ChangesAlone]) -> tuple[str, float, int]:
    """Runs on every rank; returns the error, after how many seconds it came, and the number of optimizer steps."""
    begin = time.monotonic()
    trainer = make_trainer(max_epochs=8, limit_val_batches=0, strategy="fxpipe", devices=2)
    with pytest.raises((TraceError, PeerError)) as raised:
        trainer.fit(module())
    return str(raised.value), time.monotonic() - begin, trainer.global_step


def test_a_rank_that_would_record_alone_ends_the_run(ranks: Ranks) -> None:
    """The others would wait for its stage, and it for them, until the timeout."""
    pool = ranks(2)
    _, (message, seconds, _) = pool.run(ends_with, ChangesAlone)
    pool.kill()
    assert "The ranks of the pipeline disagree on whether to retrace the step." in message
    assert "rank 1 would retrace it, since mode changed; rank 0 has a matching trace" in message
    assert seconds < 30


@pytest.mark.parametrize("module", [SwitchesAlone, ScalesAlone])
def test_ranks_that_use_different_known_graphs_end_the_run(ranks: Ranks, module: type[ChangesAlone]) -> None:
    """Each has a graph for what it reads, of the same shapes, so that no rank waited for another: the step was a mixture."""
    pool = ranks(2)
    found = pool.run(ends_with, module)
    pool.kill()
    for message, seconds, num_steps in found:
        assert "The ranks of the pipeline computed a batch with different traces." in message
        assert seconds < 30
        assert num_steps == 6  # the fifth is wrong, and its vote is counted before the seventh
