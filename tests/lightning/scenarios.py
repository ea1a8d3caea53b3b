"""What Lightning's own tests look at, as runs of a plain Trainer: each is done without the strategy and with it.

A scenario gets a folder, asserts what Lightning promises, and returns what must be the same. It knows nothing of a strategy:
:func:`default_strategy` makes ``Trainer()`` take one.

Different, documented in docs/reference/lightning.md, and in no scenario: ``train_dataloader`` and the batch transfer hooks run
once more before the first step; ``inference_mode`` becomes ``no_grad`` with gloo; a training step that never
calls the model is refused, and so are StochasticWeightAveraging, ModelPruning, BatchSizeFinder,
``dataloader_iter`` and ``val_check_interval`` as a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as shipped
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_fxpipe import FxPipeStrategy
from lightning_fxpipe._compat.torch import patched_attributes
from tests.inmemory import InMemory

_QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}


@contextmanager
def default_strategy(stages: int) -> Iterator[None]:
    """In the block ``Trainer()`` has so many stages by default; for 0, Lightning's own strategy. It is quiet, too."""
    original = L.Trainer.__init__

    def init(self: L.Trainer, **options: Any) -> None:
        strategy = FxPipeStrategy(num_microbatches=2, save_distributed_checkpoint=False) if stages else "auto"
        original(self, **{**_QUIET, "strategy": strategy, "devices": stages or 1, "enable_checkpointing": False, **options})

    with patched_attributes((L.Trainer, "__init__", init)):
        yield


class Net(BoringModel):
    """Lightning's model, with layers to cut and batches of several samples; logs its losses."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(4)
        self.layer = nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 2))  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.step(batch))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("tested", self.step(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]

    def train_dataloader(self) -> Any:
        return loader()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader  # type: ignore[assignment]


def loader(count: int = 16, batch_size: int = 4) -> DataLoader[Any]:
    torch.manual_seed(7)
    return DataLoader(RandomDataset(32, count), batch_size=batch_size)


def seen(trainer: L.Trainer, module: L.LightningModule, **more: Any) -> dict[str, Any]:
    """What must agree after any run."""
    return {
        "state": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "counters": (trainer.global_step, trainer.current_epoch, trainer.should_stop),
        **more,
    }


def names(folder: Path) -> list[str]:
    """Files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def fit(module: L.LightningModule, /, **options: Any) -> tuple[L.Trainer, L.LightningModule]:
    trainer = L.Trainer(**{"max_epochs": 2, **options})
    trainer.fit(module)
    return trainer, module


class Note(L.Callback):
    """Writes down at which step something happens."""

    def __init__(self, *hooks: str) -> None:
        self.notes: list[tuple[str, int, int]] = []
        for hook in hooks:
            setattr(self, hook, partial(self._note, hook))

    def _note(self, hook: str, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if not trainer.sanity_checking:
            self.notes.append((hook, trainer.global_step, trainer.current_epoch))


# ------------------------------------------------------------------ callbacks


def early_stopping(folder: Path) -> Any:
    class Worse(Net):
        def on_validation_epoch_end(self) -> None:
            self.log("watched", [3.0, 2.0, 2.5, 2.4, 2.3][self.current_epoch])

    stop = shipped.EarlyStopping("watched", patience=2)
    trainer, module = fit(Worse(), callbacks=[stop], max_epochs=5)
    assert (stop.stopped_epoch, stop.wait_count, float(stop.best_score)) == (3, 2, 2.0)
    return seen(trainer, module)


def early_stopping_at_thresholds(folder: Path) -> Any:
    found = []
    for options in ({"stopping_threshold": 5.5}, {"divergence_threshold": 6.5, "mode": "min"}, {"check_finite": True}):

        class Falls(Net):
            def on_train_epoch_end(self) -> None:
                values = {"stopping_threshold": [6, 5, 4], "divergence_threshold": [6, 7, 4]}
                name = next(iter(options))
                self.log("watched", float(values.get(name, [1, float("inf"), 1])[self.current_epoch]))

        stop = shipped.EarlyStopping("watched", check_on_train_epoch_end=True, **options)  # type: ignore[arg-type]
        trainer, _ = fit(Falls(), callbacks=[stop], max_epochs=3)
        assert stop.stopped_epoch == 1
        found.append((trainer.current_epoch, stop.stopping_reason_message))
    return found


def checkpoints(options: dict[str, Any], folder: Path) -> Any:
    keep = shipped.ModelCheckpoint(folder, **options)
    trainer, module = fit(Net(), callbacks=[keep], enable_checkpointing=True, max_epochs=3)
    best = {Path(path).name: float(score) for path, score in keep.best_k_models.items()}
    return seen(trainer, module, files=names(folder), best=best, path=Path(keep.best_model_path).name)


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "default": {},
    "top 2": {"monitor": "val", "save_top_k": 2, "mode": "max", "filename": "{epoch}-{step}-{val:.3f}"},
    "all": {"save_top_k": -1},
    "none": {"save_top_k": 0},
    "every 3 steps": {"every_n_train_steps": 3, "save_top_k": -1},
    "every 2 epochs": {"every_n_epochs": 2, "save_top_k": -1},
    "last": {"save_last": True, "monitor": "loss_epoch"},
    "weights": {"save_weights_only": True},
    "on train epoch end": {"save_on_train_epoch_end": True, "monitor": "loss", "filename": "a{epoch}"},
    "at any time": {"train_time_interval": timedelta(0), "save_top_k": -1},
}


def learning_rate_monitor(folder: Path) -> Any:
    logger = InMemory()
    monitor = shipped.LearningRateMonitor(log_momentum=True)
    fit(Net(), callbacks=[monitor], logger=logger, max_epochs=3, log_every_n_steps=1)
    assert monitor.lrs == {"lr-SGD": [0.1, 0.05, 0.025]}
    return logger.history


def accumulation_by_epoch(folder: Path) -> Any:
    note = Note("on_before_optimizer_step")
    schedule = shipped.GradientAccumulationScheduler({0: 4, 1: 2, 2: 1})
    trainer, module = fit(Net(), callbacks=[schedule, note], max_epochs=3)
    assert trainer.global_step == 1 + 2 + 4
    return seen(trainer, module, notes=note.notes)


def timer(folder: Path) -> Any:
    trainer, module = fit(Net(), callbacks=[shipped.Timer(duration=timedelta(0))])
    assert trainer.global_step == 0
    return seen(trainer, module)


def backbone(folder: Path) -> Any:
    class Parts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.layer = self.layer[:2], self.layer[2:]  # type: ignore[index]

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.backbone(x))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    trainer, module = fit(Parts(), callbacks=[shipped.BackboneFinetuning(1, lambda epoch: 2.0)], max_epochs=3)
    groups = [(len(group["params"]), group["lr"]) for group in trainer.optimizers[0].param_groups]
    return seen(trainer, module, groups=groups)


def lambda_callback(folder: Path) -> Any:
    called: list[str] = []
    hooks = [name for name in vars(L.Callback) if name.startswith("on_") and "checkpoint" not in name and "exc" not in name]
    callback = shipped.LambdaCallback(**{name: lambda *_, name=name, **__: called.append(name) for name in hooks})
    trainer, module = fit(Net(), callbacks=[callback])
    for run in (trainer.validate, trainer.test, trainer.predict):
        run(module)
    assert {*hooks} - {*called} == set()
    return called


def prediction_writer(folder: Path) -> Any:
    written: list[Any] = []

    class Writer(shipped.BasePredictionWriter):
        def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *rest: Any) -> None:
            written.append((prediction, batch_indices, rest[1:]))

        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
            written.append((predictions, batch_indices))

    L.Trainer(callbacks=[Writer("batch_and_epoch")]).predict(Net(), [loader(8), loader(4)])
    return written


def weight_averaging(folder: Path) -> Any:
    return seen(*fit(Net(), callbacks=[shipped.EMAWeightAveraging(decay=0.9)]))


def progress_bar(folder: Path) -> Any:
    class Bar(shipped.TQDMProgressBar):
        def get_metrics(self, *args: Any, **kwargs: Any) -> Any:
            items = super().get_metrics(*args, **kwargs)
            items.pop("v_num", None)
            shown.append(dict(items))
            return items

    class Shows(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("a", float(batch_idx), prog_bar=True)
            return super().training_step(batch, batch_idx)

    shown: list[Any] = []
    bar = Bar(refresh_rate=1)
    fit(Shows(), callbacks=[bar], enable_progress_bar=True)
    assert bar.train_progress_bar.total == bar.train_progress_bar.n == 4
    return shown, bar.total_val_batches


# ------------------------------------------------------------------ trainer


def run_lengths(options: dict[str, Any], folder: Path) -> Any:
    note = Note("on_train_batch_end", "on_validation_batch_end", "on_validation_end", "on_train_epoch_end")
    trainer, module = fit(Net(), callbacks=[note], **options)
    return seen(trainer, module, notes=note.notes, batches=trainer.num_training_batches)


LENGTHS: dict[str, dict[str, Any]] = {
    "numbers": {"limit_train_batches": 3, "limit_val_batches": 1},
    "shares": {"limit_train_batches": 0.5, "limit_val_batches": 0.25},
    "fast_dev_run": {"fast_dev_run": 2},
    "overfit_batches": {"overfit_batches": 2},
    "val_check_interval": {"val_check_interval": 2},
    "val_check_interval of the run": {"val_check_interval": 3, "check_val_every_n_epoch": None},
    "check_val_every_n_epoch": {"check_val_every_n_epoch": 2, "max_epochs": 4},
    "max_steps": {"max_steps": 6, "max_epochs": -1},
    "min_steps": {"min_steps": 6, "max_epochs": 1},
    "no training": {"max_epochs": 0},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
    "accumulate": {"accumulate_grad_batches": 3},
    "clip by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "clip by norm": {"gradient_clip_val": 0.01},
    "detect_anomaly": {"detect_anomaly": True},
    "barebones": {"barebones": True},
}


def combined(mode: str, folder: Path) -> Any:
    class Sums(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch = batch[0] if isinstance(batch, tuple) else batch
            parts = [part for part in batch.values() if part is not None]
            return self.step(torch.cat(parts))

    loaders = CombinedLoader({"a": loader(12), "b": loader(8)}, mode)
    trainer, module = L.Trainer(max_epochs=1), Sums()
    trainer.fit(module, loaders)
    return seen(trainer, module, batches=trainer.num_training_batches)


def several_loaders(folder: Path) -> Any:
    class Several(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:  # type: ignore[override]
            self.log("val", self.step(batch))
            self.log("same", 1.0 + dataloader_idx, add_dataloader_idx=True)

    trainer, module = L.Trainer(max_epochs=1), Several()
    trainer.fit(module, loader(), [loader(8), loader(4)])
    validated = trainer.validate(module, [loader(8), loader(4)], verbose=False)
    tested = trainer.test(module, loader(8), verbose=False)
    predicted = trainer.predict(module, [loader(8), loader(4)])
    return seen(trainer, module, results=(validated, tested, predicted))


def datamodule(folder: Path) -> Any:
    class Data(BoringDataModule):
        def train_dataloader(self) -> Any:
            return loader()

        val_dataloader = test_dataloader = predict_dataloader = train_dataloader

        def state_dict(self) -> dict[str, Any]:
            return {"mine": 3}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state

    trainer, module, data = L.Trainer(max_epochs=1), Net(), Data()
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(folder / "a.ckpt")
    again = Data()
    L.Trainer(max_epochs=2).fit(Net(), datamodule=again, ckpt_path=folder / "a.ckpt")
    assert again.loaded == {"mine": 3}
    return seen(trainer, module, tested=trainer.test(module, datamodule=data, verbose=False))


def skipped_batches(folder: Path) -> Any:
    class Skips(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == 3 else None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    note = Note("on_train_batch_end", "on_before_zero_grad", "on_train_epoch_end")
    return seen(*fit(Skips(), callbacks=[note]), notes=note.notes)


def stop_by_hand(folder: Path) -> Any:
    class Stops(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trainer.should_stop = self.global_step == 5
            return super().training_step(batch, batch_idx)

    return seen(*fit(Stops(), max_epochs=5))


def generator_as_loader(folder: Path) -> Any:
    batches = (torch.full((4, 32), float(number)) for number in itertools.count())
    used: list[float] = []

    class Looks(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            used.append(float(batch[0, 0]))

    trainer, module = L.Trainer(max_steps=3, max_epochs=-1, limit_val_batches=0), Looks(lr=1e-3)
    trainer.fit(module, batches)
    assert used == [0.0, 1.0, 2.0]
    return seen(trainer, module)


def place_of_logs(folder: Path) -> Any:
    class Writes(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.logger is not None
            self.places = [Path(self.trainer.log_dir or ""), Path(self.logger.log_dir), Path(self.logger.save_dir)]  # type: ignore[attr-defined, arg-type]
            return super().training_step(batch, batch_idx)

    trainer, module = fit(Writes(), logger=CSVLogger(folder, name="a", version="b"))
    assert module.places == [folder / "a" / "b", folder / "a" / "b", folder]
    return seen(trainer, module)


def number_of_steps(folder: Path) -> Any:
    found = []

    class Asks(Net):
        def configure_optimizers(self) -> Any:
            found.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    trainer, module = fit(Asks(), accumulate_grad_batches=2)
    assert found == [4]
    before = L.Trainer(max_epochs=3)
    before.strategy.connect(module)
    before._data_connector.attach_data(module)  # as Lightning's own test does
    assert before.estimated_stepping_batches == 12
    return seen(trainer, module)


# ------------------------------------------------------------------ optimization


class TwoOptimizers(Net):
    """Manual optimization, with a scheduler for one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = self.step(batch)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        parts = [torch.optim.SGD(self.layer[index].parameters(), lr=0.1) for index in (0, 2)]  # type: ignore[index]
        return parts, [torch.optim.lr_scheduler.ExponentialLR(parts[0], 0.9)]


def manual(folder: Path) -> Any:
    trainer, module = fit(TwoOptimizers())
    assert trainer.global_step == 16
    return seen(trainer, module, rates=[optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers])


def schedulers(folder: Path) -> Any:
    found = []
    for options in (
        {"interval": "step", "frequency": 2},
        {"interval": "epoch"},
        {"monitor": "val", "kind": "plateau"},
        {"monitor": "val", "kind": "plateau", "interval": "step", "strict": False},
    ):
        options = dict(options)
        is_plateau = options.pop("kind", None) is not None

        class Scheduled(Net):
            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
                plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
                step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau if is_plateau else step, **options}}

        trainer, module = fit(Scheduled(), max_epochs=3)
        found.append(seen(trainer, module, rate=trainer.optimizers[0].param_groups[0]["lr"]))
    return found


def no_optimizer(folder: Path) -> Any:
    class Nothing(Net):
        def configure_optimizers(self) -> Any:
            return None

    trainer, module = fit(Nothing())
    return seen(trainer, module)


# ------------------------------------------------------------------ logging


def logged_names(folder: Path) -> Any:
    class Logs(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.step(batch)
            self.log("step", loss)
            self.log("epoch", loss, on_step=False, on_epoch=True)
            self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("unseen", loss, logger=False)
            self.log("largest", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="max")
            self.log("total", 1.0, on_step=False, on_epoch=True, reduce_fx=torch.sum)
            self.log_dict({"c": loss, "d": batch_idx * 2.0})
            self.mean(loss)
            self.log("metric", self.mean, on_step=True, on_epoch=True)
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("at_end", float(self.current_epoch))

    logger = InMemory()
    trainer, module = fit(Logs(), logger=logger, log_every_n_steps=2)
    expected = {"step", "epoch", "both", "both_step", "both_epoch", "unseen", "largest", "total", "c", "d", "at_end", "val"}
    assert expected | {"metric", "metric_step", "metric_epoch"} == {*trainer.callback_metrics}
    shown = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
    logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
    return seen(trainer, module, history=logger.history, logged=logged, shown=shown)


# ------------------------------------------------------------------ checkpoints


def resumed(save: dict[str, Any], folder: Path) -> Any:
    """In the middle of an epoch a plain loader begins anew: then it is another run, and the same without the strategy."""
    keep = shipped.ModelCheckpoint(folder, save_top_k=-1, filename="{step}", **save)
    whole, _ = fit(Net(), callbacks=[keep], enable_checkpointing=True)
    found = []
    for path in sorted(folder.glob("*.ckpt")):
        trainer, again = L.Trainer(max_epochs=2), Net(lr=5.0)
        trainer.fit(again, ckpt_path=path)
        assert trainer.global_step == whole.global_step
        found.append(seen(trainer, again))
    assert len(found) > 1
    return found, names(folder)


def hyperparameters(folder: Path) -> Any:
    trainer, module = fit(Net(lr=0.3))
    trainer.save_checkpoint(folder / "a.ckpt")
    trainer.save_checkpoint(folder / "b.ckpt", weights_only=True)
    found = [Net.load_from_checkpoint(folder / name, map_location="cpu") for name in ("a.ckpt", "b.ckpt")]
    assert [one.hparams["lr"] for one in found] == [0.3, 0.3]
    other = Net.load_from_checkpoint(folder / "a.ckpt", lr=0.7)
    assert other.hparams["lr"] == 0.7
    parts = [sorted({*torch.load(folder / name, weights_only=False)} - {"lightning_fxpipe"}) for name in ("a.ckpt", "b.ckpt")]
    return [one.state_dict() for one in found], parts


def checkpoint_hooks(folder: Path) -> Any:
    called: list[str] = []

    class Hooked(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            called.append("module saves")
            checkpoint["mine"] = 7

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            called.append(f"module loads {checkpoint['mine']}")

    class Stateful(L.Callback):
        def state_dict(self) -> dict[str, Any]:
            called.append("state_dict")
            return {"a": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            called.append(f"load_state_dict {state_dict}")

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            called.append("callback saves")

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            called.append("callback loads")

    trainer, _ = fit(Hooked(), callbacks=[Stateful()], max_epochs=1)
    trainer.save_checkpoint(folder / "a.ckpt")
    L.Trainer(max_epochs=2, callbacks=[Stateful()]).fit(Hooked(), ckpt_path=folder / "a.ckpt")
    return called


def old_checkpoint(folder: Path) -> Any:
    """As Lightning 1.5 wrote it: numbers of the Trainer's own, and callbacks by their classes' names."""
    trainer, module = fit(Net(), max_epochs=1)
    trainer.save_checkpoint(folder / "new.ckpt")
    saved = torch.load(folder / "new.ckpt", weights_only=False)
    saved |= {"pytorch-lightning_version": "1.5.0", "epoch": 1, "global_step": 4}
    for absent in ("loops", "hparams_name"):
        saved.pop(absent, None)
    saved["callbacks"] = {}
    torch.save(saved, folder / "old.ckpt")
    later, again = L.Trainer(max_epochs=3), Net()
    later.fit(again, ckpt_path=folder / "old.ckpt")
    return seen(later, again)


Scenario = Callable[[Path], Any]
SCENARIOS: dict[str, Scenario] = {
    **{
        function.__name__: function
        for function in (
            *(early_stopping, early_stopping_at_thresholds, learning_rate_monitor, accumulation_by_epoch, timer, backbone),
            *(lambda_callback, prediction_writer, weight_averaging, progress_bar, several_loaders, datamodule),
            *(skipped_batches, stop_by_hand, generator_as_loader, place_of_logs, number_of_steps, manual, schedulers),
            *(no_optimizer, logged_names, hyperparameters, checkpoint_hooks, old_checkpoint),
        )
    },
    **{f"checkpoints: {name}": partial(checkpoints, options) for name, options in CHECKPOINTS.items()},
    **{f"length: {name}": partial(run_lengths, options) for name, options in LENGTHS.items()},
    **{f"combined: {mode}": partial(combined, mode) for mode in ("min_size", "max_size", "max_size_cycle")},
    "resumed: in an epoch": partial(resumed, {"every_n_train_steps": 3}),
    "resumed: after an epoch": partial(resumed, {"every_n_epochs": 1}),
}


def do(names_of_scenarios: list[str], folder: str, stages: int) -> list[Any]:
    """Does scenarios with so many stages, 0 for Lightning's own strategy; an error's text in place of what one returns."""
    found = []
    with default_strategy(stages):
        for name in names_of_scenarios:
            place = Path(folder, f"{stages} {name.replace(' ', '_').replace(':', '')}")
            place.mkdir(exist_ok=True)
            L.seed_everything(3, verbose=False)
            found.append(SCENARIOS[name](place))
    return found
