"""Every callback that Lightning ships, on one device and in a pipeline: the same run, or a refusal with the way out."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as shipped
from lightning.pytorch.loggers import CSVLogger

from tests.distributed.runs import Net, Run, go


def names_in(trainer: L.Trainer, module: Any, folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("kept/*"))


def callback_state(kind: type) -> Callable[..., Any]:
    def look(trainer: L.Trainer, module: Any, folder: Path) -> Any:
        return next(c for c in trainer.callbacks if isinstance(c, kind)).state_dict()

    return look


def logged(trainer: L.Trainer, module: Any, folder: Path) -> list[str]:
    return (folder / "log" / "metrics.csv").read_text().splitlines()


def csv(folder: Path) -> CSVLogger:
    return CSVLogger(folder, name="", version="log")


class Writer(shipped.BasePredictionWriter):
    def __init__(self, folder: Path, interval: Any) -> None:
        super().__init__(interval)
        self.folder = folder

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *rest: Any) -> None:
        with (self.folder / "batches.txt").open("a") as file:
            file.write(f"{batch_indices} {prediction.argmax(1).tolist()}\n")

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        with (self.folder / "epochs.txt").open("a") as file:
            file.write(f"{batch_indices} {[p.argmax(1).tolist() for p in predictions]}\n")


def written(trainer: L.Trainer, module: Any, folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("*.txt"))]


class Unfreeze(shipped.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.backbone])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[2], optimizer, lr=0.01)
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.backbone[:2], optimizer)


class HeadOnly(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=0.01)


def checkpoint(folder: Path, **options: Any) -> shipped.ModelCheckpoint:
    return shipped.ModelCheckpoint(dirpath=folder / "kept", **options)


class InOrder(HeadOnly):
    """A resumed pipeline goes on with the random numbers of the run that it resumes, and one device does not."""

    shuffle = False


SAVING = {"enable_checkpointing": True, "max_epochs": 4}
KEPT: dict[str, Any] = {"options": SAVING, "look_at_zero": names_in}

RUNS: dict[str, Run] = {
    "ModelCheckpoint top k": Run(
        callbacks=lambda f: [
            checkpoint(f, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{val_loss:.4f}")
        ],
        **KEPT,
    ),
    "ModelCheckpoint every n steps": Run(
        callbacks=lambda f: [checkpoint(f, every_n_train_steps=4, save_top_k=-1, filename="{step}")], **KEPT
    ),
    "ModelCheckpoint step metric": Run(
        callbacks=lambda f: [
            checkpoint(f, monitor="loss_step", every_n_train_steps=3, save_top_k=2, filename="{step}-{loss_step:.4f}")
        ],
        **KEPT,
    ),
    "ModelCheckpoint time": Run(
        callbacks=lambda f: [checkpoint(f, train_time_interval=timedelta(seconds=0), save_top_k=-1, filename="{step}")], **KEPT
    ),
    "ModelCheckpoint train epoch end": Run(
        callbacks=lambda f: [
            checkpoint(f, monitor="loss", save_on_train_epoch_end=True, every_n_epochs=2, save_top_k=-1, filename="{epoch}")
        ],
        **KEPT,
    ),
    "EarlyStopping": Run(
        callbacks=lambda f: [shipped.EarlyStopping("val_loss", patience=1, min_delta=0.02)],
        options={"max_epochs": 12},
        look=callback_state(shipped.EarlyStopping),
    ),
    "EarlyStopping train": Run(
        callbacks=lambda f: [shipped.EarlyStopping("loss_epoch", check_on_train_epoch_end=True, stopping_threshold=1.6)],
        options={"max_epochs": 12},
        look=callback_state(shipped.EarlyStopping),
    ),
    "LearningRateMonitor": Run(
        callbacks=lambda f: [
            shipped.LearningRateMonitor("step", log_momentum=True),
        ],
        options={"log_every_n_steps": 1, "logger": True},
        look_at_zero=logged,
    ),
    "GradientAccumulationScheduler": Run(
        callbacks=lambda f: [shipped.GradientAccumulationScheduler({0: 2, 1: 3, 2: 1})], options={"max_epochs": 3}
    ),
    "EMAWeightAveraging resumed": Run(
        callbacks=lambda f: [shipped.EMAWeightAveraging(decay=0.8), checkpoint(f, filename="{epoch}", save_top_k=-1)],
        options=SAVING,
        resume_from="kept/epoch=1.ckpt",
        module=InOrder,
        look_at_zero=names_in,
    ),
    "BaseFinetuning resumed": Run(
        callbacks=lambda f: [Unfreeze(), checkpoint(f, filename="{epoch}", save_top_k=-1)],
        options=SAVING,
        module=InOrder,
        resume_from="kept/epoch=1.ckpt",
    ),
    "EMAWeightAveraging": Run(callbacks=lambda f: [shipped.EMAWeightAveraging(decay=0.8)], options=SAVING),
    "WeightAveraging": Run(callbacks=lambda f: [shipped.WeightAveraging(), checkpoint(f, filename="{step}")], **KEPT),
    "BackboneFinetuning": Run(
        callbacks=lambda f: [shipped.BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_ratio_lr=0.2)],
        options={"max_epochs": 4},
        module=HeadOnly,
    ),
    "BaseFinetuning": Run(callbacks=lambda f: [Unfreeze()], options={"max_epochs": 4}, module=HeadOnly),
    "LambdaCallback": Run(
        callbacks=lambda f: [
            shipped.LambdaCallback(
                on_train_batch_end=lambda trainer, module, outputs, batch, index: module.log("twice", 2 * outputs["loss"]),
                on_train_epoch_end=lambda trainer, module: module.log("epochs", float(trainer.current_epoch)),
            )
        ]
    ),
    "RichProgressBar": Run(
        callbacks=lambda f: [shipped.RichProgressBar()], options={"enable_progress_bar": True}, calls=("fit", "test", "predict")
    ),
    "TQDMProgressBar": Run(
        callbacks=lambda f: [shipped.TQDMProgressBar(refresh_rate=2)],
        options={"enable_progress_bar": True},
        calls=("fit", "validate", "predict"),
    ),
    "ModelSummary": Run(callbacks=lambda f: [shipped.ModelSummary(max_depth=2)]),
    "RichModelSummary": Run(callbacks=lambda f: [shipped.RichModelSummary(max_depth=2)]),
    "Timer": Run(callbacks=lambda f: [shipped.Timer(timedelta(hours=1))]),
    "Timer stops": Run(callbacks=lambda f: [shipped.Timer(timedelta(seconds=0))]),
    "DeviceStatsMonitor": Run(
        callbacks=lambda f: [shipped.DeviceStatsMonitor(cpu_stats=True)], options={"logger": True, "log_every_n_steps": 1}
    ),
    "BasePredictionWriter batch": Run(callbacks=lambda f: [Writer(f, "batch")], calls=("predict",), look_at_zero=written),
    "BasePredictionWriter epoch": Run(callbacks=lambda f: [Writer(f, "epoch")], calls=("predict",), look_at_zero=written),
    "OnExceptionCheckpoint": Run(callbacks=lambda f: [shipped.OnExceptionCheckpoint(f / "kept")]),
    "ThroughputMonitor": Run(
        callbacks=lambda f: [shipped.ThroughputMonitor(lambda batch: len(batch[0]), window_size=3)],
        options={"logger": True, "log_every_n_steps": 2},
    ),
    "SpikeDetection": Run(callbacks=lambda f: [shipped.SpikeDetection(warmup=2, rtol=5.0)]),
    "ModelPruning": Run(
        callbacks=lambda f: [shipped.ModelPruning("l1_unstructured", amount=0.3, use_global_unstructured=True)]
    ),
    "ModelPruning local": Run(
        callbacks=lambda f: [shipped.ModelPruning("l1_unstructured", amount=0.3, use_global_unstructured=False)]
    ),
    "StochasticWeightAveraging": Run(
        callbacks=lambda f: [shipped.StochasticWeightAveraging(0.01, swa_epoch_start=1)], options={"max_epochs": 4}
    ),
    "BatchSizeFinder": Run(callbacks=lambda f: [shipped.BatchSizeFinder(max_trials=2, steps_per_trial=2)]),
    "LearningRateFinder": Run(
        callbacks=lambda f: [shipped.LearningRateFinder(num_training_steps=30, min_lr=1e-4)],
        look=lambda trainer, module, folder: module.lr,
    ),
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    run = RUNS[name]
    path = Path(folder) / f"{stages}"
    path.mkdir(exist_ok=True)
    if run.options.get("logger"):
        run.options["logger"] = csv(path)
    return go(run, path, stages)
