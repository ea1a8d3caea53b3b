"""Every argument of the Trainer, on one device and in a pipeline: the same run, or a refusal with the way out."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader

from tests.distributed.pool import RankPool
from tests.distributed.runs import Net, Run, compare, documented, go, rows_of

Ranks = Callable[[int], RankPool]


class Seen(Callback):
    """When what began, and with which batch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(("train", trainer.global_step, float(batch[0].sum())))

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        mode = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self.seen.append(("validate", trainer.sanity_checking, trainer.global_step, float(batch[0].sum()), mode))

    def on_test_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(("test", float(batch[0].sum())))


def seen(trainer: L.Trainer, module: Any, folder: Path) -> Any:
    return next(c.seen for c in trainer.callbacks if isinstance(c, Seen))


def flags(calls: tuple[str, ...] = ("fit",), module: Any = Net, look_at_zero: Any = None, **options: Any) -> Run:
    more = {} if look_at_zero is None else {"look_at_zero": look_at_zero}
    return Run(callbacks=lambda folder: [Seen()], options=options, calls=calls, look=seen, module=module, **more)


class Reloads(Net):
    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(16 + 8 * (self.current_epoch if self._trainer else 0))


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone.append(nn.BatchNorm1d(12))


def files(trainer: L.Trainer, module: Any, folder: Path) -> list[str]:
    """What the run has written; a checkpoint is a file on one device and a folder in a pipeline."""
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file() or path.suffix == ".ckpt"]
    return sorted(str(path) for path in paths if not any(parent.suffix == ".ckpt" for parent in path.parents))


def profiled(trainer: L.Trainer, module: Any, folder: Path) -> Any:
    return any("training_step" in name for name in getattr(trainer.profiler, "recorded_durations", {}))


RUNS: dict[str, Run] = {
    "limit_train_batches": flags(limit_train_batches=0.5, limit_val_batches=2),
    "limit_val_batches": flags(limit_val_batches=0),
    "limit_test_batches": flags(("test",), limit_test_batches=1),
    "limit_predict_batches": flags(("predict",), limit_predict_batches=2),
    "overfit_batches": flags(overfit_batches=2),
    "overfit_batches share": flags(overfit_batches=0.5, max_epochs=3),
    "fast_dev_run": flags(("fit", "test"), fast_dev_run=2),
    "val_check_interval": flags(val_check_interval=2),
    "val_check_interval share": flags(val_check_interval=0.5, max_epochs=1),
    "val_check_interval over epochs": flags(val_check_interval=4, check_val_every_n_epoch=None),
    "check_val_every_n_epoch": flags(check_val_every_n_epoch=2, max_epochs=5),
    "num_sanity_val_steps": flags(num_sanity_val_steps=-1),
    "num_sanity_val_steps none": flags(num_sanity_val_steps=0),
    "max_time": flags(max_time={"seconds": 0}),
    "max_steps": flags(max_steps=7, max_epochs=-1),
    "min_steps": flags(min_steps=9, max_steps=12, min_epochs=1, max_epochs=5),
    "min_epochs": flags(min_epochs=2, max_epochs=3),
    "log_every_n_steps": flags(
        log_every_n_steps=3, logger=True, look_at_zero=lambda t, m, f: (f / "log" / "metrics.csv").read_text().count("\n")
    ),
    "enable_checkpointing": flags(enable_checkpointing=True, look_at_zero=files),
    "logger": flags(enable_checkpointing=True, logger=True, look_at_zero=files),
    "enable_progress_bar": flags(enable_progress_bar=True),
    "enable_model_summary": flags(enable_model_summary=True),
    "accumulate_grad_batches": flags(accumulate_grad_batches=4),
    "gradient_clip_val": flags(gradient_clip_val=0.1),
    "gradient_clip_algorithm": flags(gradient_clip_val=0.1, gradient_clip_algorithm="value"),
    "deterministic": flags(deterministic=True),
    "deterministic warn": flags(deterministic="warn"),
    "benchmark": flags(benchmark=True),
    "inference_mode": flags(inference_mode=False),
    "use_distributed_sampler": flags(use_distributed_sampler=False),
    "use_distributed_sampler true": flags(use_distributed_sampler=True),
    "profiler simple": flags(profiler="simple", look_at_zero=profiled),
    "profiler advanced": flags(profiler="advanced"),
    "profiler pytorch": flags(profiler="pytorch", max_epochs=1),
    "detect_anomaly": flags(detect_anomaly=True),
    "barebones": Run(
        options={
            "barebones": True,
            "logger": None,
            "enable_checkpointing": None,
            "enable_progress_bar": None,
            "enable_model_summary": None,
        }
    ),
    "sync_batchnorm": Run(module=Normed, options={"sync_batchnorm": True}, strategy={"num_microbatches": 1}),
    "reload_dataloaders_every_n_epochs": flags(reload_dataloaders_every_n_epochs=1, module=Reloads, max_epochs=3),
    "plugins": flags(plugins=[LightningEnvironment()]),
    "enable_autolog_hparams": flags(enable_autolog_hparams=False),
    "default_root_dir": flags(enable_checkpointing=True, look_at_zero=files),
}


RUNS |= {
    "num_nodes": Run(nodes=True),
    "model_registry": flags(model_registry="somebody/something"),
    "callbacks": flags(),
}
# What every run here sets, and what has tests of its own.
ELSEWHERE = {"accelerator", "strategy", "devices", "max_epochs", "precision"}
# Other values of an argument that another run has shown to work.
SLOW = {
    *("overfit_batches share", "val_check_interval share", "val_check_interval over epochs", "num_sanity_val_steps none"),
    *("deterministic warn", "use_distributed_sampler true", "profiler advanced", "enable_checkpointing", "min_epochs"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in RUNS])
def test_an_argument_does_what_it_does_on_one_device(ranks: Ranks, tmp_path: Path, name: str) -> None:
    compare(ranks, do, [name], tmp_path, 2)


def test_the_table_has_a_verdict_for_each_argument_of_the_trainer() -> None:
    verdicts = documented("Trainer arguments")
    assert set(verdicts) == set(inspect.signature(L.Trainer).parameters)
    assert set(verdicts) == rows_of(RUNS) | ELSEWHERE


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    run = RUNS[name]
    path = Path(folder) / str(stages)
    path.mkdir(exist_ok=True)
    if run.options.get("logger"):
        run.options["logger"] = CSVLogger(path, name="", version="log")
    if not run.nodes or not stages:
        return go(run, path, stages)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NODE_RANK", os.environ["RANK"])
        environment.setenv("LOCAL_RANK", "0")
        return go(run, path, stages)
