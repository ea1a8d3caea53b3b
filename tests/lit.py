"""LightningModules and callbacks that tests run on one device and through the pipeline, to compare."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.models import loss_of, make_model, make_samples


class LitModel(L.LightningModule):
    """An ordinary module: AdamW with two parameter groups, an LR scheduler, logging per step and epoch."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.model = make_model(name)

    def _loss(self, batch: Any) -> Tensor:
        x, y = batch
        return loss_of(self.name, self.model(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("constant", 2.5)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch), on_step=True, on_epoch=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0])

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}


class Recorder(L.Callback):
    """Keeps what a run can be compared by: losses and gradients of each step, by name."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.gradients.append(
            {fqn: p.grad.clone() for fqn, p in pl_module.named_parameters() if p.grad is not None and not p.is_meta}
        )

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]) if outputs else math.nan)  # a step may skip its batch


def make_loader(name: str, *, num_samples: int = 71, batch_size: int = 16, shuffle: bool = False) -> DataLoader[Any]:
    """71 samples in batches of 16 are four full batches and one of 7."""
    return DataLoader(TensorDataset(*make_samples(name, num_samples)), batch_size=batch_size, shuffle=shuffle)


def make_trainer(**options: Any) -> L.Trainer:
    """A quiet trainer on the CPU."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**(defaults | options))


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """What this rank has of the module's state."""
    return {fqn: value.detach().clone() for fqn, value in module.state_dict().items() if not value.is_meta}


def fit_and_record(name: str, **trainer_options: Any) -> dict[str, Any]:
    """Trains two epochs of five steps; returns everything that must be equal on one device and in a pipeline."""
    L.seed_everything(3, verbose=False)
    module, recorder = LitModel(name), Recorder()
    loader = make_loader(name)
    trainer = make_trainer(max_epochs=2, callbacks=[recorder], **trainer_options)
    trainer.fit(module, loader, make_loader(name, num_samples=23, batch_size=8))
    return {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "state": snapshot(module),
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "global_step": trainer.global_step,
    }
