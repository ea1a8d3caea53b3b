"""What a run patches is as it was when the run has ended: in torch and Lightning, and on the user's own objects."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_fxpipe import FxPipeStrategy
from tests.lit import LitModel, make_loader, make_trainer
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]
# A metric of a run that is over must not gather either: each process goes on with the states of the whole pipeline while the
# process group is there, so that a sum would count them twice.
STAYS = {"module.mean.distributed_available_fn"}
LIBRARIES = (
    "torch",
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "pytorch_lightning",
    "torchmetrics",
    "logging",
    "threading",
)


class WithMetric(LitModel):
    def __init__(self) -> None:
        super().__init__("mlp")
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss)
        self.log("mean", self.mean)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm())


def functions() -> dict[str, Any]:
    """Every function, property and class in the libraries' modules, and what a patch of a process would change."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in LIBRARIES or module is None:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__.split(".")[0] in LIBRARIES:
                found |= {f"{value.__module__}.{value.__qualname__}.{k}": v for k, v in vars(value).items() if is_code(v)}
            elif is_code(value):
                found[f"{name}.{key}"] = value
    found |= {f"signal {number}": signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    found |= {"stdout": sys.stdout, "stderr": sys.stderr, "excepthook": sys.excepthook, "threads": threading.excepthook}
    return found | {"filters": list(warnings.filters), "level": logging.getLogger("lightning_fxpipe").level}


def is_code(value: Any) -> bool:
    return isinstance(value, (FunctionType, MethodType, property, staticmethod, classmethod)) or callable(value)


def own_attributes(module: L.LightningModule, trainer: L.Trainer) -> dict[str, Any]:
    """Names of what users' objects hold themselves, and their classes."""
    owners: Iterator[tuple[str, Any]] = iter(
        [
            *((f"module.{path}", child) for path, child in module.named_modules()),
            *((f"callbacks[{index}]", callback) for index, callback in enumerate(trainer.callbacks)),
            *((f"optimizers[{index}]", optimizer) for index, optimizer in enumerate(trainer.optimizers)),
            *((f"loggers[{index}]", logger) for index, logger in enumerate(trainer.loggers)),
        ]
    )
    found: dict[str, Any] = {}
    for path, owner in owners:
        found[path] = type(owner)
        found |= {f"{path}.{name}": named(value) if is_code(value) else "" for name, value in vars(owner).items()}
    return found


def named(code: Any) -> str:
    """Which function, or object that can be called, it is."""
    return f"{getattr(code, '__module__', '')}.{getattr(code, '__qualname__', type(code).__qualname__)}"


def run(folder: str, make_strategy: Callable[[], dict[str, Any]] = dict) -> tuple[dict[str, Any], list[str]]:
    """What users' objects hold after a run, and what it has left changed in the libraries."""
    torch.manual_seed(1)
    module = WithMetric()
    loader = make_loader("mlp")

    def fit() -> L.Trainer:
        trainer = make_trainer(
            max_epochs=1,
            enable_checkpointing=True,
            callbacks=[
                ModelCheckpoint(folder, save_last=True),
                EarlyStopping("val_loss"),
                ThroughputMonitor(batch_size_fn=len, window_size=2),
            ],
            **make_strategy() | {"logger": CSVLogger(folder), "log_every_n_steps": 1},
        )
        trainer.fit(module, loader, loader)
        trainer.validate(module, loader)
        return trainer

    fit()  # whatever is imported or made once and for all
    before = functions()
    trainer = fit()
    after = functions()
    return own_attributes(module, trainer), sorted(
        name for name in before if after.get(name) is not before[name] and after.get(name) != before[name]
    )


def run_in_stages(folder: str) -> tuple[dict[str, Any], list[str]]:
    """Runs on every rank."""
    return run(folder, lambda: {"strategy": FxPipeStrategy(num_microbatches=4), "devices": 2})


def test_a_run_leaves_no_patch(ranks: Ranks, tmp_path: Path) -> None:
    expected, changed = run(str(tmp_path / "one"))
    for found, changed_in_stages in ranks(2).run(run_in_stages, str(tmp_path / "two")):
        assert set(changed_in_stages) <= set(changed)
        assert {name for name, value in found.items() if expected.get(name) != value} == STAYS
        assert expected.keys() - found.keys() == set()


@pytest.mark.parametrize("name", ["torch.Tensor.backward", "lightning.pytorch.core.module.LightningModule.log"])
def test_patches_would_be_seen(name: str) -> None:
    assert name in functions()
