"""Steps that read what the run has made before they call the model: rates, loaders, what hooks have set."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe import FxPipeStrategy, UnsupportedError
from tests.lit import make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go

Ranks = Callable[[int], RankPool]


class Reads(Net):
    """``factor`` is part of what the model gets, so that a wrong one shows in the loss."""

    shuffle = False

    def factor(self) -> Any:
        return 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch[0] * self.factor(), batch[1]], batch_idx)


class OptimizerRate(Reads):
    def factor(self) -> Any:
        return 1.0 + self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]


class SchedulerRate(Reads):
    def factor(self) -> Any:
        return 1.0 + self.lr_schedulers().get_last_lr()[0]  # type: ignore[union-attr]


class TrainersRates(Reads):
    def factor(self) -> Any:
        rates = [group["lr"] for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        return 1.0 + sum(rates) + self.trainer.lr_scheduler_configs[0].scheduler.last_epoch


class Counts(Reads):
    def factor(self) -> Any:
        batches = len(self.trainer.train_dataloader) + self.trainer.num_training_batches  # type: ignore[arg-type]
        return 1.0 / (batches + self.trainer.estimated_stepping_batches + self.global_step)


class FitStart(Reads):
    def on_fit_start(self) -> None:
        self.noise = torch.linspace(0.1, 1.0, 10)

    def factor(self) -> Any:
        return self.noise[torch.arange(self.batch_size) % 10][: self.rows].view(-1, 1).sqrt()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.rows = len(batch[0])
        return super().training_step(batch, batch_idx)


class TrainStart(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = None

    def on_train_start(self) -> None:
        self.scale = 0.5

    def on_train_epoch_start(self) -> None:
        self.by_epoch = [0.5 + 0.1 * self.current_epoch]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.by_batch = {"factor": 1.0 + batch_idx}

    def factor(self) -> Any:
        return self.scale * self.by_epoch[0] * self.by_batch["factor"]


class ValidationStart(TrainStart):
    def on_validation_epoch_start(self) -> None:
        self.val_scale = torch.tensor(0.3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step([batch[0] * self.val_scale, batch[1]], batch_idx)


class SetsOnModule(L.Callback):
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.from_callback = 0.7  # type: ignore[assignment]


class FromCallback(Reads):
    def factor(self) -> Any:
        return self.from_callback


class NoiseToModel(Net):
    """The model's second input is looked up in what a hook has made."""

    shuffle = False

    def on_train_start(self) -> None:
        self.sigmas = torch.linspace(0.1, 1.0, 10)

    on_validation_start = on_train_start

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.backbone(x) * sigma[:, None])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0], self.sigmas[batch[1]]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0], self.sigmas.gather(0, batch[1])), batch[1]))


class ManyArguments(Net):
    def training_step(self, *args: Any) -> Tensor:  # type: ignore[override]
        batch, batch_idx = args
        return super().training_step(batch, batch_idx)

    def validation_step(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        batch, batch_idx = args
        assert not kwargs
        super().validation_step([batch[0] + batch_idx, batch[1]], batch_idx)


class BatchOnly(Net):
    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)

    def validation_step(self, batch: Any) -> None:  # type: ignore[override]
        super().validation_step(batch, 0)


class Undone(Net):
    """Its validation step alone can be tried before the run."""

    def on_train_start(self) -> None:
        self.table = {"factor": torch.rand(12, generator=torch.Generator().manual_seed(1))}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        factor = self.table["factor"]
        if not isinstance(factor, Tensor):
            raise TypeError("a table of tensors is needed")
        return super().training_step([batch[0] * factor, batch[1]], batch_idx)


def with_mock(kind: Any) -> dict[str, Any]:
    logger = kind()
    logger.save_dir, logger.name, logger.version, logger.log_dir = "logs", "mock", 0, "logs"
    return {"logger": logger}


def reads(module: Any, **more: Any) -> Run:
    return Run(module=module, options={"max_epochs": 2}, **more)


RUNS: dict[str, Run] = {
    "optimizer": reads(OptimizerRate),
    "scheduler": reads(SchedulerRate),
    "trainer's rates": reads(TrainersRates),
    "counts": reads(Counts),
    "fit start": reads(FitStart, strategy={"num_microbatches": 1}),
    "train start": reads(TrainStart),
    "validation start": reads(ValidationStart),
    "callback": reads(FromCallback, callbacks=lambda folder: [SetsOnModule()]),
    "noise to the model": reads(NoiseToModel),
    "args": reads(ManyArguments),
    "batch only": reads(BatchOnly),
    "from validation": reads(Undone),
    "no validation": Run(module=NoiseToModel, options={"max_epochs": 1, "limit_val_batches": 0}),
    "Mock": Run(options={"max_epochs": 1, **with_mock(Mock)}),
    "MagicMock": Run(options={"max_epochs": 1, **with_mock(MagicMock)}),
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    return go(RUNS[name], Path(folder) / f"{name}{stages}", stages)


def test_a_step_reads_what_it_reads_on_one_device(ranks: Ranks, tmp_path: Path) -> None:
    compare(ranks, do, list(RUNS), tmp_path, 2)


# ------------------------------------------------------------------ refused


class TakesLoader(Net):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class NothingToTry(Undone):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step([batch[0] * self.table["factor"].expand(12), batch[1]].pop(5), batch_idx)


def refusals() -> list[str]:
    found = []
    for module in (TakesLoader(), NothingToTry()):
        with pytest.raises(UnsupportedError) as caught:
            make_trainer(max_epochs=1, devices=2, strategy=FxPipeStrategy()).fit(module)
        found.append(str(caught.value))
    return found


def test_what_cannot_be_is_refused(ranks: Ranks) -> None:
    for loader, table in ranks(2).run(refusals):
        assert "dataloader_iter" in loader
        assert "no attribute 'table'" in table
        assert "test_run_state.py" in table


# ------------------------------------------------------------------ copies


def copies(folder: str, stages: int) -> list[Any]:
    """Copies of the Trainer and its strategy, made before a run and after it, and what runs with them give."""
    found = []
    trainer = make_trainer(
        max_epochs=1,
        devices=stages,
        strategy=FxPipeStrategy(num_microbatches=2) if stages > 1 else "auto",
        default_root_dir=folder,
    )
    module = Net()
    for _ in range(2):
        other = copy.deepcopy(trainer)
        copy.deepcopy(trainer.strategy)
        copy.deepcopy(trainer.callbacks)  # type: ignore[attr-defined]
        L.seed_everything(3, verbose=False)
        trainer.fit(module)
        fresh = Net()
        other.fit_loop.max_epochs = trainer.fit_loop.max_epochs
        other.fit(fresh)
        found += [float(trainer.callback_metrics["val_loss"]), float(other.callback_metrics["val_loss"])]
        trainer.fit_loop.max_epochs = 2
    return found


def test_a_trainer_can_be_copied(ranks: Ranks, tmp_path: Path) -> None:
    expected = copies(str(tmp_path / "alone"), stages=1)
    for found in ranks(2).run(copies, str(tmp_path / "piped"), stages=2):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
