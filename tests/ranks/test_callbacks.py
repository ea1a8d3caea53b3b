"""Every callback that Lightning ships, on one device and in a pipeline: the same run, or a refusal with the way out."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as shipped
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import device_stats_monitor
from lightning.pytorch.loggers import CSVLogger

from lightning_fxpipe import UnsupportedError
from tests.lit import make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, documented, go, rows_of

Ranks = Callable[[int], RankPool]


def names_in(trainer: L.Trainer, module: Any, folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("kept/*"))


def callback_state(kind: type) -> Callable[..., Any]:
    def look(trainer: L.Trainer, module: Any, folder: Path) -> Any:
        return next(c for c in trainer.callbacks if isinstance(c, kind)).state_dict()

    return look


def logged(trainer: L.Trainer, module: Any, folder: Path) -> Any:
    """The logged table, with numbers that are compared but for rounding."""
    header, *rows = (line.split(",") for line in (folder / "log" / "metrics.csv").read_text().splitlines())
    return header, [[float(entry) if entry else None for entry in row] for row in rows]


def columns(trainer: L.Trainer, module: Any, folder: Path) -> Any:
    return logged(trainer, module, folder)[0]


class Raises(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 4:
            raise ArithmeticError("on purpose")


class Summary(shipped.ModelSummary):
    """Keeps what it shows."""

    shown: tuple[Any, ...] = ()

    @staticmethod
    def summarize(*args: Any, **kwargs: Any) -> None:
        Summary.shown = args[1:3]


class RichSummary(shipped.RichModelSummary):
    """Keeps what it shows."""

    @staticmethod
    def summarize(*args: Any, **kwargs: Any) -> None:
        shipped.RichModelSummary.summarize(*args, **kwargs)
        Summary.shown = args[1:3]


def summarised(trainer: L.Trainer) -> Any:
    """Numbers of parameters, all and trainable."""
    assert Summary.shown[0] > 600
    return Summary.shown


def device_stats() -> L.Callback:
    """Statistics of a CPU need psutil, which the tests do without."""
    device_stats_monitor._PSUTIL_AVAILABLE = True  # type: ignore[assignment]
    CPUAccelerator.get_device_stats = lambda self, device: {"cpu_percent": 12.5}  # type: ignore[method-assign]
    return shipped.DeviceStatsMonitor()


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


class AveragesByHand(L.Callback):
    """Keeps averaged weights under their names in an entry of its own."""

    average: dict[str, torch.Tensor]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not hasattr(self, "average"):
            self.average = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        for name, value in pl_module.state_dict().items():
            self.average[name].lerp_(value, 0.2)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = {name: value.clone() for name, value in self.average.items()}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.average = {name: value.clone() for name, value in checkpoint["average"].items()}

    def norms(self) -> dict[str, float]:
        """The averaged weights' norms."""
        return {name: float(value.norm()) for name, value in self.average.items()}


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
    "Callback resumed": Run(
        callbacks=lambda f: [AveragesByHand(), checkpoint(f, filename="{epoch}", save_top_k=-1)],
        options=SAVING,
        resume_from="kept/epoch=1.ckpt",
        module=InOrder,
        look=lambda trainer, module, folder: trainer.callbacks[1].norms(),
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
    "Timer": Run(callbacks=lambda f: [shipped.Timer(timedelta(hours=1))]),
    "Timer stops": Run(callbacks=lambda f: [shipped.Timer(timedelta(seconds=0))]),
    "BasePredictionWriter batch": Run(callbacks=lambda f: [Writer(f, "batch")], calls=("predict",), look_at_zero=written),
    "BasePredictionWriter epoch": Run(callbacks=lambda f: [Writer(f, "epoch")], calls=("predict",), look_at_zero=written),
    "ThroughputMonitor": Run(
        callbacks=lambda f: [shipped.ThroughputMonitor(lambda batch: len(batch[0]), window_size=3)],
        options={"logger": True, "log_every_n_steps": 2},
        look_at_zero=columns,
    ),
    "SpikeDetection": Run(callbacks=lambda f: [shipped.SpikeDetection(warmup=2, rtol=5.0)]),
}


RUNS |= {
    "LearningRateMonitor": Run(
        callbacks=lambda f: [shipped.LearningRateMonitor("step", log_momentum=True)],
        options={"log_every_n_steps": 1, "logger": True},
        look_at_zero=logged,
    ),
    "LearningRateFinder": Run(
        callbacks=lambda f: [shipped.LearningRateFinder(num_training_steps=30, min_lr=1e-4)],
        look=lambda trainer, module, folder: module.lr,
    ),
    "DeviceStatsMonitor": Run(
        callbacks=lambda f: [device_stats()], options={"logger": True, "log_every_n_steps": 1}, look_at_zero=logged
    ),
    "ModelSummary": Run(callbacks=lambda f: [Summary(max_depth=2)], look_at_zero=lambda t, m, f: summarised(t)),
    "RichModelSummary": Run(callbacks=lambda f: [RichSummary(max_depth=2)], look_at_zero=lambda t, m, f: summarised(t)),
    "OnExceptionCheckpoint": Run(
        callbacks=lambda f: [Raises(), shipped.OnExceptionCheckpoint(f / "kept")],
        options={"enable_checkpointing": True},
        raises="ArithmeticError",
        look_at_zero=names_in,
    ),
}

REFUSED: dict[str, Callable[[], L.Callback]] = {
    "ModelPruning": lambda: shipped.ModelPruning("l1_unstructured"),
    "StochasticWeightAveraging": lambda: shipped.StochasticWeightAveraging(0.01),
    "BatchSizeFinder": lambda: shipped.BatchSizeFinder(),
}
# Nothing but what the callbacks above inherit from them.
BASES = {"Callback", "Checkpoint", "ProgressBar"}
# Further ways to use a callback that another run has shown to work.
SLOW = {
    *("ModelCheckpoint time", "ModelCheckpoint train epoch end", "ModelCheckpoint every n steps", "EarlyStopping train"),
    *("Timer stops", "EMAWeightAveraging", "BaseFinetuning", "BasePredictionWriter epoch"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in RUNS])
def test_a_callback_does_what_it_does_on_one_device(ranks: Ranks, tmp_path: Path, name: str) -> None:
    compare(ranks, do, [name], tmp_path, 2)


def refusals() -> list[str]:
    messages = []
    for make in REFUSED.values():
        trainer = make_trainer(strategy="fxpipe", devices=2, max_epochs=1, callbacks=[make()])
        with pytest.raises(UnsupportedError) as caught:
            trainer.fit(Net())
        messages.append(str(caught.value))
    return messages


def test_other_callbacks_are_refused_with_the_way_out(ranks: Ranks) -> None:
    for messages in ranks(2).run(refusals):
        for name, message in zip(REFUSED, messages, strict=True):
            assert name in message
            assert "What to do" in message


def test_the_table_has_a_verdict_for_each_callback_that_lightning_ships() -> None:
    verdicts = documented("Callbacks")
    assert set(verdicts) == set(shipped.__all__)
    assert {name for name, verdict in verdicts.items() if verdict == "refused"} == set(REFUSED)
    assert {name for name, verdict in verdicts.items() if verdict == "works"} == rows_of(RUNS) | BASES


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    run = RUNS[name]
    path = Path(folder) / f"{stages}"
    path.mkdir(exist_ok=True)
    if run.options.get("logger"):
        run.options["logger"] = csv(path)
    return go(run, path, stages)
