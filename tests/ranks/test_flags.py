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

from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, documented, go, rows_of

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


def logged(folder: Path) -> int:
    """Lines that the logger has got."""
    return (folder / "log" / "metrics.csv").read_text().count("\n")


# Lightning refuses them together, unless they are left open.
NOT_WITH_BAREBONES = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


def profiled(trainer: L.Trainer, module: Any, folder: Path) -> Any:
    return any("training_step" in name for name in getattr(trainer.profiler, "recorded_durations", {}))


# Names start with the arguments that a run is about.
RUNS: dict[str, Run] = {
    "limit_train_batches+limit_val_batches": flags(limit_train_batches=0.5, limit_val_batches=2),
    "limit_test_batches+limit_predict_batches": flags(("test", "predict"), limit_test_batches=1, limit_predict_batches=2),
    "overfit_batches": flags(overfit_batches=2),
    "fast_dev_run": flags(("fit", "test"), fast_dev_run=2),
    "val_check_interval+check_val_every_n_epoch": flags(val_check_interval=4, check_val_every_n_epoch=None),
    "num_sanity_val_steps": flags(num_sanity_val_steps=-1, val_check_interval=0.5, max_epochs=1),
    "max_time": flags(max_time={"seconds": 0}),
    "max_steps+min_steps+min_epochs": flags(min_steps=9, max_steps=10, min_epochs=1, max_epochs=5),
    "logger+log_every_n_steps+enable_checkpointing+default_root_dir": flags(
        logger=True, log_every_n_steps=3, enable_checkpointing=True, look_at_zero=lambda t, m, f: (files(t, m, f), logged(f))
    ),
    "accumulate_grad_batches+gradient_clip_val": flags(accumulate_grad_batches=4, gradient_clip_val=0.1),
    "gradient_clip_algorithm": flags(gradient_clip_val=0.1, gradient_clip_algorithm="value"),
    "deterministic+benchmark+detect_anomaly+plugins+callbacks": flags(
        deterministic=True, benchmark=True, detect_anomaly=True, plugins=[LightningEnvironment()]
    ),
    "enable_progress_bar+enable_model_summary+enable_autolog_hparams+model_registry": flags(
        enable_progress_bar=True, enable_model_summary=True, enable_autolog_hparams=False, model_registry="somebody/something"
    ),
    "inference_mode+use_distributed_sampler": flags(("validate", "fit"), inference_mode=False, use_distributed_sampler=True),
    "profiler simple": flags(profiler="simple", look_at_zero=profiled),
    "profiler pytorch": flags(profiler="pytorch", max_epochs=1),
    "barebones": Run(options={"barebones": True, **dict.fromkeys(NOT_WITH_BAREBONES)}),
    "sync_batchnorm": Run(module=Normed, options={"sync_batchnorm": True}, strategy={"num_microbatches": 1}),
    "reload_dataloaders_every_n_epochs": flags(reload_dataloaders_every_n_epochs=1, module=Reloads, max_epochs=3),
    "num_nodes": Run(nodes=True),
}
# Other values of these arguments.
SLOW: dict[str, Run] = {
    "limit_val_batches": flags(limit_val_batches=0),
    "limit_predict_batches": flags(("predict",), limit_predict_batches=0.5),
    "overfit_batches": flags(overfit_batches=0.5, max_epochs=3),
    "val_check_interval": flags(val_check_interval=2),
    "check_val_every_n_epoch": flags(check_val_every_n_epoch=2, max_epochs=5),
    "num_sanity_val_steps": flags(num_sanity_val_steps=0),
    "max_steps": flags(max_steps=7, max_epochs=-1),
    "min_epochs": flags(min_epochs=2, max_epochs=3),
    "accumulate_grad_batches": flags(accumulate_grad_batches=3),
    "gradient_clip_val": flags(gradient_clip_val=0.1),
    "deterministic": flags(deterministic="warn"),
    "use_distributed_sampler": flags(use_distributed_sampler=False),
    "profiler advanced": flags(profiler="advanced"),
}
RUNS |= {f"{name} again": run for name, run in SLOW.items()}
# What every run here sets, and what has tests of its own.
ELSEWHERE = {"accelerator", "strategy", "devices", "max_epochs", "precision"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name.endswith(" again") else name for name in RUNS]
)
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
