"""Plugins that write and read checkpoints: they get that of one device, and a run goes on from theirs."""

from __future__ import annotations

import gzip
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO

from lightning_fxpipe import FxPipeStrategy, UnsupportedError
from tests.lit import LitModel, make_loader, make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go


class Compressed(CheckpointIO):
    """Files that only it can read; notes who writes and removes them."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.note(path, "saved")
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        Path(path).write_bytes(gzip.compress(buffer.getvalue()))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        content: dict[str, Any] = torch.load(io.BytesIO(gzip.decompress(Path(path).read_bytes())), weights_only=weights_only)
        return content

    def remove_checkpoint(self, path: Any) -> None:
        self.note(path, "removed")
        Path(path).unlink(missing_ok=True)

    def note(self, path: Any, what: str) -> None:
        Path(path).parent.mkdir(exist_ok=True, parents=True)
        with (Path(path).parents[1] / "notes.txt").open("a") as file:
            file.write(f"{what} {Path(path).name}\n")


class Slow(Compressed):
    """Is still writing when the run ends."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        time.sleep(0.2)
        super().save_checkpoint(checkpoint, path, storage_options)


class ReadsInItsWay(TorchCheckpointIO):
    """As darts has it: how a file is read is not Lightning's affair."""

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_checkpoint(path, *args, **kwargs) | {"read_by": type(self).__name__}


class InOrder(Net):
    shuffle = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.read_by = checkpoint.get("read_by")  # type: ignore[assignment]


def last_files(trainer: L.Trainer, module: Any, folder: Path) -> Any:
    """What was written, and that it is the checkpoint of one device."""
    notes = folder / "notes.txt"
    found = sorted(path.name for path in (folder / "kept").iterdir())
    checkpoint = trainer.strategy.checkpoint_io.load_checkpoint(folder / "kept" / found[-1], weights_only=False)
    first = next(iter(checkpoint["optimizer_states"][0]["state"].values()))
    return (
        found,
        sorted(notes.read_text().splitlines()) if notes.exists() else None,  # in the background in any order
        {fqn: value.tolist() for fqn, value in checkpoint["state_dict"].items()},
        first["momentum_buffer"].tolist(),
        getattr(module, "read_by", None),
    )


def _run(plugin: Callable[[], CheckpointIO]) -> Run:
    return Run(
        module=InOrder,
        callbacks=lambda f: [ModelCheckpoint(f / "kept", filename="{epoch}", monitor="loss", save_top_k=2)],
        options={"enable_checkpointing": True, "max_epochs": 3, "plugins": [plugin()]},
        look_at_zero=last_files,
        resume_from="kept/epoch=1.ckpt",
    )


RUNS = {
    "compressed": _run(Compressed),
    "compressed in the background": _run(lambda: AsyncCheckpointIO(Slow())),
    "reads in its way": _run(ReadsInItsWay),
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    return go(RUNS[name], Path(folder) / f"{name}{stages}", stages)


def test_files_and_resumed_runs_are_those_of_one_device(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    """Plugins were refused, so all models of wrappers that bring one, such as darts."""
    compare(ranks, do, list(RUNS), tmp_path, 2)


@pytest.mark.parametrize("option", ["save_distributed_checkpoint", "async_save"])
def test_forms_that_the_strategy_writes_by_itself_are_refused(option: str) -> None:
    strategy = FxPipeStrategy(num_stages=2, **{option: True})  # type: ignore[arg-type]
    trainer = make_trainer(max_steps=1, strategy=strategy, plugins=[Compressed()])
    with pytest.raises(UnsupportedError, match=f"(?s)Checkpoint plugins write single files.*Compressed and {option}=True"):
        trainer.fit(LitModel("mlp"), make_loader("mlp"))
