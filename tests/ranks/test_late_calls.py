"""A call of the model that begins later in the run: refused in that step, by its line; a resumed run is traced with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_fxpipe import FxPipeStrategy
from lightning_fxpipe.errors import FxPipeError
from tests.lit import make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import NetWithLoss, Run, compare, go, run_once


class Consistent(NetWithLoss):
    """After a warm-up, results for other inputs are to be alike."""

    shuffle = False  # a checkpoint of a pipeline continues with its random numbers, one of one device does not

    def loss(self, batch: Any) -> Tensor:
        scores = self(batch[0])
        loss = nn.functional.cross_entropy(scores, batch[1])
        if self.trainer.current_epoch > 0:
            loss = loss + self.difference(self(batch[0] * 1.1), scores)
        return loss

    def difference(self, found: Tensor, expected: Tensor) -> Tensor:
        return nn.functional.mse_loss(found, expected.detach())


class ConsistentInside(Consistent):
    """Calls a part of the model once more, of which another rank has the parameters."""

    def loss(self, batch: Any) -> Tensor:
        hidden = self.backbone(batch[0])
        loss = nn.functional.cross_entropy(self.head(hidden), batch[1])
        if self.trainer.current_epoch > 0:
            loss = loss + self.difference(self.backbone(batch[0] * 1.1), hidden)
        return loss


class Repeated(Consistent):
    """The second call is one of the first's result, so that no cut of one pipeline through both is left."""

    def loss(self, batch: Any) -> Tensor:
        hidden = self.backbone(batch[0])
        if self.trainer.current_epoch > 0:
            hidden = self.backbone(hidden)
        return nn.functional.cross_entropy(self.head(hidden), batch[1])


class Counted(Consistent):
    """The number of calls is known before the first one."""

    def loss(self, batch: Any) -> Tensor:
        hidden = batch[0]
        for _ in range(1 + self.trainer.current_epoch):
            hidden = self.backbone(hidden)
        return nn.functional.cross_entropy(self.head(hidden), batch[1])


class Lazy(Consistent):
    """Regularises every few steps, from the first on."""

    def loss(self, batch: Any) -> Tensor:
        scores = self(batch[0])
        loss = nn.functional.cross_entropy(scores, batch[1])
        if self.trainer.global_step % 3 == 0:
            loss = loss + self.difference(self(batch[0] * 1.1), scores)
        return loss


class TwoParts(nn.Module):
    """Calls its parts in one order or the other, with a function that a flag chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12)) for _ in range(2))
        self.is_turned = self.is_flipped = False

    def forward(self, x: Tensor) -> Tensor:
        for part in reversed(self.parts) if self.is_turned else self.parts:
            x = torch.relu(part(x)) if self.is_flipped else torch.tanh(part(x))
        return x


class Turned(Consistent):
    """Optimises by hand, and calls parts of the model in another order after a while."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.backbone = TwoParts()

    def on_train_epoch_start(self) -> None:
        self.backbone.is_turned = self.current_epoch > 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.backbone(batch[0]).square().mean())
        optimizer.step()


class Flipped(Consistent):
    """Has a flag that the recorded code reads, and that is the other one in each step, which needs a dry run."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = TwoParts()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.backbone.is_flipped = not self.backbone.is_flipped

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.backbone(batch[0] * (1 + batch_idx % 2))
        loss = nn.functional.cross_entropy(self.head(hidden * 1.1), batch[1])
        self.log("loss", loss)
        return loss


class FewerBefore(Consistent):
    """Makes a tensor before it calls parts of the model in every second step, so that these calls have other numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = torch.ones(len(batch[0])) if batch_idx % 2 else None
        hidden = self.backbone(batch[0])
        if weight is not None:
            hidden = hidden * weight[:, None]
        loss = nn.functional.cross_entropy(self.head(hidden), batch[1])
        self.log("loss", loss)
        return loss


class Hooked(Consistent):
    """Registers a hook on a part of the model while it calls that."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        handle = self.backbone[1].register_forward_hook(lambda module, args, output: output * 0.5)
        scores = self(batch[0])
        handle.remove()
        loss = nn.functional.cross_entropy(scores, batch[1])
        self.log("loss", loss)
        return loss


def has_few_traces(trainer: Any, module: Any, folder: Path) -> bool:
    """True if the training step is traced once for each value of the flag and size of batch, at most."""
    if not isinstance(trainer.strategy, FxPipeStrategy):
        return True
    return sum(made.step == "training_step" for made in trainer.strategy.session.trace_log.traces) <= 4


MODULES = {"the module": Consistent, "backbone": ConsistentInside, "repeated": Repeated}
GOING_ON = {"counted": Counted, "lazy": Lazy, "flipped": Flipped, "fewer before": FewerBefore, "hooked": Hooked}


def refused(name: str, folder: str) -> str:
    """The message that ends a run in its second epoch."""
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "default_root_dir": folder, "limit_val_batches": 0}
    module = {**MODULES, "turned": Turned}[name]()
    trainer = make_trainer(devices=2, strategy=FxPipeStrategy(num_microbatches=2), **options)
    try:
        trainer.fit(module)
    except FxPipeError as error:
        assert trainer.current_epoch == 1
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["the module", "backbone"])
def test_a_call_that_begins_later_is_refused_with_what_to_do(
    ranks: Callable[[int], RankPool], tmp_path: Path, name: str
) -> None:
    pool = ranks(2)
    try:
        messages = pool.run(refused, name, str(tmp_path))
        assert any(f"The step calls {name} more often than when it was traced." in message for message in messages)
        assert any(f"{__file__}:" in message and "resume from the last checkpoint" in message for message in messages)
    finally:
        pool.kill()


def test_calls_of_a_manual_step_that_no_longer_fit_the_cuts_are_refused_with_their_place(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """Every rank runs the step already: there is no other way to go on."""
    pool = ranks(2)
    try:
        for message in pool.run(refused, "turned", str(tmp_path)):
            assert "in an order that the plan's stages cannot follow" in message
            assert f"{__file__}:" in message
    finally:
        pool.kill()


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    """Resumes where the call begins; or goes on."""
    home = Path(folder) / f"{name}{stages}"
    if name in GOING_ON:
        return go(Run(module=GOING_ON[name], options={"max_epochs": 2}, look=has_few_traces), home, stages)
    keep = [ModelCheckpoint(home, save_last=True)]
    run = Run(module=MODULES[name], options={"max_epochs": 1, "enable_checkpointing": True}, callbacks=lambda _: keep)
    run_once(run, home, stages, None)
    return run_once(replace(run, options={"max_epochs": 2}, callbacks=lambda _: []), home, stages, str(home / "last.ckpt"))


@pytest.mark.parametrize("stages", [2, 3])
def test_a_run_that_is_resumed_where_the_call_begins_is_that_of_one_device(
    ranks: Callable[[int], RankPool], tmp_path: Path, stages: int
) -> None:
    compare(ranks, do, list(MODULES), tmp_path, stages)


def test_a_training_step_that_no_longer_fits_the_cuts_goes_on_on_every_rank(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    compare(ranks, do, ["counted"], tmp_path, 2)


def test_a_training_step_may_make_a_further_call_every_few_steps(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    """In the steps between, a trace of one call is known, and in the next such step what is read has another value."""
    compare(ranks, do, ["lazy"], tmp_path, 2)


def test_a_step_goes_back_to_the_trace_of_an_earlier_value(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    """A trace that is out of date for this value is no reason to record: another one may hold."""
    compare(ranks, do, ["flipped"], tmp_path, 2)


def test_a_step_may_make_fewer_calls_before_it_calls_the_model(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    """Compared with the trace, the model's call was taken for one before it, and ran on a rank that lacks its parameters."""
    compare(ranks, do, ["fewer before"], tmp_path, 2)


def test_hooks_that_the_step_registers_run_in_every_step(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    """Only the rank that runs the step registered them, from the second batch on."""
    compare(ranks, do, ["hooked"], tmp_path, 2)
