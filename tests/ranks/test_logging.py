"""Whatever a LightningModule logs, and however, is on every rank of a pipeline what it is on one device."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchmetrics import AUROC, F1Score, MeanMetric, SumMetric

from lightning_fxpipe import FxPipeStrategy
from tests.lit import make_trainer
from tests.logmodules import KIND, MACRO, VARIANTS, Base
from tests.logruns import loader, run_variant
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]


def piped_variants(names: list[str], microbatches: int, stages: int) -> dict[str, Any]:
    return {name: run_variant(name, strategy=FxPipeStrategy(num_microbatches=microbatches), devices=stages) for name in names}


expected_variant = cache(run_variant)


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Where two records differ; the order of names counts."""
    if isinstance(expected, dict):
        if list(found) != list(expected):
            return [f"{path}: keys {list(found)} instead of {list(expected)}"]
        return [line for key in expected for line in differences(found[key], expected[key], f"{path}.{key}")]
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return [f"{path}: {len(found)} entries instead of {len(expected)}"]
        return [line for i in range(len(expected)) for line in differences(found[i], expected[i], f"{path}[{i}]")]
    if isinstance(expected, float) and isinstance(found, float):
        same = math.isclose(found, expected, abs_tol=1e-5) or (math.isnan(found) and math.isnan(expected))
        return [] if same else [f"{path}: {found} instead of {expected}"]
    return [] if found == expected else [f"{path}: {found!r} instead of {expected!r}"]


def check_variants(ranks: Ranks, names: list[str], microbatches: int, stages: int) -> None:
    results = ranks(stages).run(piped_variants, names, microbatches, stages, timeout_seconds=300)
    found = []
    for name in names:
        expected = expected_variant(name)
        for rank, result in enumerate(results):
            # What loggers write, they write on rank 0.
            wanted = expected if rank == 0 else {**expected, "history": []}
            found += [f"{name}, rank {rank}: {line}" for line in differences(result[name], wanted)[:3]]
    assert found == []


def test_a_record_that_differs_is_seen() -> None:
    expected = {"a": [1.0, (2.0, "x")], "b": float("nan")}
    assert differences({"a": [1.0, (2.0, "x")], "b": float("nan")}, expected) == []
    assert differences({"a": [1.0, (2.1, "x")], "b": 0.0}, expected) == [
        ".a[1][0]: 2.1 instead of 2.0",
        ".b: 0.0 instead of nan",
    ]
    assert differences({"b": float("nan"), "a": [1.0]}, expected) != []


def test_whatever_is_logged_is_the_same_on_every_rank(ranks: Ranks) -> None:
    check_variants(ranks, list(VARIANTS), 3, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("microbatches", "stages"), [(1, 2), (2, 2), (4, 2), (3, 3)])
def test_other_microbatches_and_stages(ranks: Ranks, microbatches: int, stages: int) -> None:
    check_variants(ranks, list(VARIANTS), microbatches, stages)


# --------------------------------------------------------------------------- monitors, files, callbacks, checkpoints


class Monitored(Base):
    """A scheduler and a checkpoint follow a training metric step by step; two metrics are saved."""

    def make_metrics(self) -> None:
        self.f1, self.auroc, self.val = F1Score(**MACRO), AUROC(**KIND), AUROC(**KIND)
        self.f1.persistent(True)
        self.auroc.persistent(True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits, y = self.common(batch)
        self.log("f1", self.f1(logits, y), on_step=True, on_epoch=True)
        self.auroc.update(logits.softmax(1), y)
        self.log("auroc", self.auroc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        _, logits, y = self.common(batch)
        self.val.update(logits.softmax(1), y)
        self.log("v_auroc", self.val)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=1, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "interval": "step", "monitor": "f1"}}


class Counting(L.Callback):
    """A callback with metrics of its own, updated in hooks."""

    def __init__(self) -> None:
        self.mean, self.by_name = MeanMetric(), {"batches": SumMetric()}
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mean.update(outputs["loss"])
        self.by_name["batches"].update(1)
        rate = module.optimizers().param_groups[0]["lr"]
        self.seen.append((float(rate), float(self.by_name["batches"].compute())))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.mean.update_count:
            self.log("callback_mean", self.mean.compute())
            self.mean.reset()


def fit_monitored(folder: str, **options: Any) -> dict[str, Any]:
    L.seed_everything(11, verbose=False)
    counting, module = Counting(), Monitored()
    by_step = ModelCheckpoint(
        f"{folder}/steps", "{step}-{f1_step:.4f}", monitor="f1_step", mode="max", every_n_train_steps=2, save_top_k=2
    )
    by_epoch = ModelCheckpoint(f"{folder}/epochs", "{epoch}-{v_auroc:.4f}", monitor="v_auroc", mode="max", save_top_k=2)
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    trainer = L.Trainer(
        max_epochs=2,
        callbacks=[by_step, by_epoch, counting],
        logger=CSVLogger(folder, name="csv", version=0),
        **(quiet | {"devices": 1} | options),
    )
    trainer.fit(module, loader(27, 1), loader(21, 2))
    kept = [sorted(Path(path).name for path in callback.best_k_models) for callback in (by_step, by_epoch)]
    return {
        "kept": kept,
        "seen": counting.seen,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "saved": saved_and_loaded(module, trainer, f"{folder}/counting.ckpt"),
    }


def saved_and_loaded(module: Monitored, trainer: Any, path: str) -> list[float]:
    """What metrics have counted when a checkpoint is written, and once it is loaded again."""
    module.f1.update(torch.eye(4), torch.arange(4))
    module.auroc.update(torch.eye(4), torch.arange(4))
    module.auroc.update(torch.eye(4)[:2], torch.arange(2))
    trainer.save_checkpoint(path)
    module.f1.reset()
    module.auroc.reset()
    trainer.validate(module, loader(21, 2), ckpt_path=path, verbose=False)
    return [float(module.f1.tp.sum()), float(len(module.auroc.preds)), float(module.auroc.compute())]


def rows(folder: Path) -> list[dict[str, float | None]]:
    with (folder / "csv" / "version_0" / "metrics.csv").open() as file:
        return [{key: float(value) if value else None for key, value in row.items()} for row in csv.DictReader(file)]


def piped_monitored(folder: str) -> dict[str, Any]:
    return fit_monitored(folder, strategy=FxPipeStrategy(num_microbatches=3), devices=2)


def test_step_monitors_files_callbacks_and_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    expected = fit_monitored(str(tmp_path / "one"))
    assert expected["saved"][0] > 4
    assert expected["saved"][1] == 2
    for result in ranks(2).run(piped_monitored, str(tmp_path / "pipe")):
        assert differences(result, expected) == []
    assert differences(rows(tmp_path / "pipe"), rows(tmp_path / "one")) == []


# --------------------------------------------------------------------------- after the run, and what is refused


class Counted(Base):
    """Counts samples."""

    def make_metrics(self) -> None:
        self.samples = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _, y = self.common(batch)
        self.samples.update((y >= 0).sum())
        return loss


class InsideTheModel(Base):
    """The model counts while it runs."""

    def make_metrics(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 16), Counter(), nn.Linear(16, 16), nn.Linear(16, 4))


class Counter(nn.Module):
    """Counts its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        self.mean.update(x.detach().abs())
        return x


def quick_trainer(**options: Any) -> L.Trainer:
    strategy = FxPipeStrategy(num_microbatches=4)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
    return L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **quiet, **options)


def other_runs() -> tuple[float, float, float]:
    module = Counted()
    quick_trainer().fit(module, loader(32, 1))
    here = float(module.samples.compute()) if torch.distributed.get_rank() == 0 else math.nan
    return here, float(module.samples.compute()), counted_inside(quick_trainer())


def counted_inside(trainer: L.Trainer) -> float:
    """What a metric has counted that the model itself calls: the layers around it are pipelined one by one."""
    torch.manual_seed(0)
    module = InsideTheModel()
    trainer.fit(module, loader(32, 1))
    return float(module.model[1].mean.compute())


def test_a_metric_can_be_read_after_the_run_and_on_one_rank(ranks: Ranks) -> None:
    """It would wait for the other ranks, or count P times, if it were gathered."""
    results = ranks(2).run(other_runs, timeout_seconds=40)
    assert [everywhere for _, everywhere, _ in results] == [32.0, 32.0]
    assert results[0][0] == 32.0
    expected = counted_inside(make_trainer(max_epochs=1))
    assert [inside for *_, inside in results] == pytest.approx([expected] * 2, abs=1e-6)
