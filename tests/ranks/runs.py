"""Small runs of the Trainer that are the same on one device and in a pipeline, and what they must agree on."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy
from tests.lit import Recorder, make_trainer, snapshot
from tests.ranks.pool import RankPool

Look = Callable[[L.Trainer, Any, Path], Any]


class Net(L.LightningModule):
    """An ordinary module with a backbone and a head, all loaders, and a rate that a callback may change."""

    shuffle = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.lr = 0.05
        self.batch_size = 8
        self.backbone = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)))
        self.head = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _loader(self, samples: int, shuffle: bool = False) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(8)
        data = TensorDataset(torch.randn(samples, 12, generator=generator), torch.arange(samples) % 5)
        return DataLoader(data, batch_size=self.batch_size, shuffle=shuffle)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(44, shuffle=self.shuffle)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(20)

    test_dataloader = predict_dataloader = val_dataloader


class NetWithLoss(Net):
    """Trains and validates by a loss of the batch, which subclasses compute in their own way."""

    def loss(self, batch: Any) -> Tensor:
        """Returns the loss of a batch."""
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


def nothing_else(trainer: L.Trainer, module: Any, folder: Path) -> None:
    """Losses, weights, metrics and counters are all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run of the Trainer.

    Attributes:
        callbacks: Makes the callbacks, from a folder for what they write.
        options: Arguments of the Trainer.
        module: Makes the module.
        calls: Methods of the Trainer, one after the other.
        look: What else must be the same on every rank.
        look_at_zero: What else rank 0 must have.
        strategy: Arguments of the strategy.
        resume_from: A checkpoint that the run writes, to start another run from.
        raises: Name of the exception that ends it.
        nodes: Whether each rank is a machine of its own.
    """

    callbacks: Callable[[Path], Sequence[L.Callback]] = lambda folder: ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    module: Callable[[], L.LightningModule] = Net
    calls: tuple[str, ...] = ("fit",)
    look: Look = nothing_else
    look_at_zero: Look = nothing_else
    strategy: dict[str, Any] = dataclasses.field(default_factory=lambda: {"num_microbatches": 2})
    resume_from: str | None = None
    raises: str | None = None
    nodes: bool = False


def go(run: Run, folder: Path, stages: int) -> dict[str, Any]:
    """Does a run on one device (``stages=0``) or in a pipeline; returns what must agree."""
    if run.resume_from is not None:
        run_once(run, folder, stages, None)
    return run_once(run, folder, stages, run.resume_from and str(folder / run.resume_from))


def run_once(run: Run, folder: Path, stages: int, ckpt_path: str | None) -> dict[str, Any]:
    """Does a run from a checkpoint, if there is one; arguments and result as those of :func:`go`."""
    L.seed_everything(3, verbose=False)
    recorder = Recorder()
    module = run.module()
    count = {"devices": 1, "num_nodes": stages} if run.nodes else {"devices": stages}
    place = {"strategy": FxPipeStrategy(**run.strategy), **count} if stages else {}
    options = {"max_epochs": 2, "default_root_dir": folder, **run.options, **place}
    trainer = make_trainer(callbacks=[recorder, *run.callbacks(folder)], **options)
    returned = []
    raised = None
    for call in run.calls:
        how = {"ckpt_path": ckpt_path} if call == "fit" else {"verbose": False} if call in ("validate", "test") else {}
        try:
            returned.append(getattr(trainer, call)(module, **how))
        except BaseException as error:
            raised = type(error).__name__
            if raised != run.raises:
                raise
    assert raised == run.raises
    seen = {
        "losses": recorder.losses,
        "state": snapshot(module),
        "metrics": {key: float(value) for key, value in sorted(trainer.callback_metrics.items())},
        "counters": (trainer.global_step, trainer.current_epoch, trainer.should_stop),
        "looked": run.look(trainer, module, folder),
        "rates": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
        "returned": [r for c, r in zip(run.calls, returned, strict=False) if c != "fit"],
    }
    if trainer.is_global_zero:
        seen["at_zero"] = run.look_at_zero(trainer, module, folder)
    return seen


def assert_same(found: Any, expected: Any, where: str) -> None:
    """Equal but for rounding, looked into containers."""
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-5, rel=1e-5, nan_ok=True), where
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        for index, (mine, theirs) in enumerate(zip(found, expected, strict=False)):
            assert_same(mine, theirs, f"{where}[{index}]")
        assert len(found) == len(expected), f"{where}: {len(found)} for {len(expected)}"
    else:
        assert found == expected, f"{where}: {found} for {expected}"


def assert_as_on_one_device(results: list[dict[str, Any]], expected: dict[str, Any], where: str) -> None:
    """Each rank has seen what one device has, and together they have its parameters."""
    merged = {key: value for result in results for key, value in result["state"].items()}
    assert merged.keys() == expected["state"].keys(), where
    for rank, result in enumerate(results):
        for key in ("losses", "metrics", "counters", "looked", "rates"):
            assert_same(result[key], expected[key], f"{where}, rank {rank}: {key}")
    for fqn, value in expected["state"].items():
        assert_same(merged[fqn], value, f"{where}: {fqn}")
    assert_same(results[0]["at_zero"], expected["at_zero"], f"{where}, rank 0")


def some(names: Sequence[str]) -> list[str]:
    """Returns the rows of a table of runs that the suite does: every second of six and more, all with ``.ci/all_tests.py``."""
    return [*names] if len(names) < 6 or "FXPIPE_ALL_TESTS" in os.environ else [*names[::2]]


def compare(ranks: Callable[[int], RankPool], do: Callable[..., Any], names: Sequence[str], folder: Path, stages: int) -> None:
    """Does runs on one device and in a pipeline, in one job, and compares them; of a long table some (:func:`some`)."""
    names = some(names)
    expected = [do(name, str(folder), 0) for name in names]
    results = ranks(stages).run(_do_all, do.__module__, names, str(folder), stages, timeout_seconds=30 + 20 * len(names))
    for index, name in enumerate(names):
        assert_as_on_one_device([result[index] for result in results], expected[index], name)


def _do_all(module: str, names: Sequence[str], folder: str, stages: int) -> list[Any]:
    return [importlib.import_module(module).do(name, folder, stages) for name in names]


def documented(heading: str) -> dict[str, str]:
    """The rows of a table in docs/reference/lightning.md: names and verdicts."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "lightning.md").read_text(encoding="utf-8")
    table = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]*?) \|", table, re.MULTILINE))


def rows_of(runs: Collection[str]) -> set[str]:
    """The rows that runs are about: their first words."""
    return {row for name in runs for row in name.partition(" ")[0].split("+")}
