"""A run that goes on in the middle of an epoch, and one with callbacks and schedulers that have states of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy
from tests.lit import make_trainer, snapshot
from tests.ranks.pool import RankPool
from tests.ranks.test_training import merged
from tests.stateful import BATCHES, Loader

Ranks = Callable[[int], RankPool]


class Model(L.LightningModule):
    """Noise in the step and dropout in the model; a scheduler of any kind."""

    def __init__(self, *, noise: float = 0.0, schedule: Callable[[Any], Any] | None = None, interval: str = "step") -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            layers = [nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.2 if noise else 0.0), nn.Tanh()) for _ in range(4)]
            self.backbone, self.head = nn.Sequential(*layers), nn.Linear(12, 5)
        self.noise, self.schedule, self.interval = noise, schedule, interval
        self.losses: list[tuple[int, int, float]] = []

    def _loss(self, batch: Any) -> Tensor:
        x = batch[0] + self.noise * torch.randn_like(batch[0]) if self.noise else batch[0]
        return nn.functional.cross_entropy(self.head(self.backbone(x)), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append((self.trainer.current_epoch, batch_idx, float(outputs["loss"])))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)
        if self.schedule is None:
            return optimizer
        scheduler = {"scheduler": self.schedule(optimizer), "interval": self.interval, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def fit(
    module: Model, folder: str, ckpt_path: str | None, *, every: dict[str, Any], callbacks: Any = (), **options: Any
) -> dict[str, Any]:
    keep = ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, **every)
    defaults = {"max_epochs": 4, "callbacks": [keep, *callbacks], "enable_checkpointing": True, "num_sanity_val_steps": 0}
    trainer = make_trainer(**(defaults | options))
    values = DataLoader(TensorDataset(torch.linspace(-1, 1, 120).view(10, 12), torch.arange(10) % 5), batch_size=5)
    trainer.fit(module, Loader(), values, ckpt_path=ckpt_path)
    return {
        "losses": module.losses,
        "state": snapshot(module),
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "counters": [trainer.global_step, trainer.current_epoch],
        "waited": [callback.wait_count for callback in callbacks if isinstance(callback, EarlyStopping)],
        "rng": torch.get_rng_state(),
    }


def noisy_runs(folder: str, schedule: Any) -> list[dict[str, Any]]:
    results = []
    for ckpt_path, seed in ((None, 5), (f"{folder}/step=3.ckpt", 77), (f"{folder}/step=6.ckpt", None)):
        if seed is not None:
            L.seed_everything(seed, verbose=False)
        place = {"strategy": FxPipeStrategy(num_microbatches=4, schedule=schedule), "devices": 2}
        results.append(fit(Model(noise=0.1), folder, ckpt_path, every={"every_n_train_steps": 3}, **place))
    return results


@pytest.mark.parametrize("schedule", ["auto", "zbv_zero_bubble", pytest.param("interleaved_1f1b", marks=pytest.mark.slow)])
def test_in_the_middle_of_an_epoch_data_noise_and_dropout_go_on_whatever_the_new_seed(
    ranks: Ranks, tmp_path: Path, schedule: str
) -> None:
    for whole, *resumed in ranks(2).run(noisy_runs, str(tmp_path), schedule):
        assert [loss[:2] for loss in whole["losses"]] == [(epoch, batch) for epoch in range(4) for batch in range(BATCHES)]
        for steps, after in zip((3, 6), resumed, strict=True):
            assert after["losses"] == whole["losses"][steps:]
            assert torch.equal(after["rng"], whole["rng"])
            assert all(torch.equal(after["state"][fqn], value) for fqn, value in whole["state"].items())


STEP, EPOCH = {"every_n_train_steps": 4}, {"every_n_epochs": 1}
CASES: dict[str, dict[str, Any]] = {
    "averaging": {"every": STEP, "callbacks": lambda: [EMAWeightAveraging(decay=0.8)]},
    "finetuning": {"every": EPOCH, "callbacks": lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1)]},
    "one cycle": {"every": STEP, "schedule": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=30)},
    "accumulated": {
        "every": STEP,
        "schedule": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
        "options": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    },
    "plateau": {
        "every": EPOCH,
        "schedule": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.3, threshold=0.5),
        "interval": "epoch",
        "callbacks": lambda: [EarlyStopping("val_loss", patience=2, min_delta=0.05)],
    },
}


def run_case(name: str, folder: str, stages: int, ckpt_path: str | None) -> dict[str, Any]:
    case = CASES[name]
    L.seed_everything(5 if ckpt_path is None else 77, verbose=False)
    module = Model(schedule=case.get("schedule"), interval=case.get("interval", "step"))
    place = {"strategy": FxPipeStrategy(num_microbatches=2), "devices": stages} if stages else {}
    callbacks = case.get("callbacks", list)()
    return fit(module, folder, ckpt_path, every=case["every"], callbacks=callbacks, **place, **case.get("options", {}))


def first_checkpoint(folder: Path) -> str:
    return str(min(folder.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1])))


@pytest.mark.parametrize(
    "name", [name if name == "averaging" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_callbacks_and_schedulers_go_on_as_on_one_device(ranks: Ranks, tmp_path: Path, name: str) -> None:
    run_case(name, str(tmp_path / "alone"), 0, None)
    ranks(2).run(run_case, name, str(tmp_path / "two"), 2, None)
    expected = run_case(name, str(tmp_path / "again"), 0, first_checkpoint(tmp_path / "alone"))
    assert expected["losses"]
    for stages, origin in ((3, "two"), (2, "alone")):
        path = first_checkpoint(tmp_path / origin)
        results = ranks(stages).run(run_case, name, str(tmp_path / f"again {stages}"), stages, path)
        for result in results:
            for key in ("counters", "waited", "rates"):
                assert result[key] == pytest.approx(expected[key], abs=1e-9), key
            assert [loss[:2] for loss in result["losses"]] == [loss[:2] for loss in expected["losses"]]
            assert [loss[2] for loss in result["losses"]] == pytest.approx([loss[2] for loss in expected["losses"]], abs=2e-6)
        for fqn, value in merged(results, "state").items():
            assert (value - expected["state"][fqn]).abs().max() <= 5e-6, fqn
