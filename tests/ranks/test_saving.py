"""Saving: in the background nothing of what is saved changes, errors reach every rank, and the last good checkpoint stays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy
from lightning_fxpipe.checkpoint.folders import open_folder
from lightning_fxpipe.checkpoint.locations import Location
from lightning_fxpipe.checkpoint.pickles import Reading
from tests.lit import make_trainer
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]
WRITER = "lightning_fxpipe.checkpoint.saving.FileSystemWriter"


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.model = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)), nn.Linear(12, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(batches: int = 6) -> DataLoader[Any]:
    samples = TensorDataset(torch.linspace(-1, 1, 8 * batches * 12).view(-1, 12), torch.arange(8 * batches) % 5)
    return DataLoader(samples, batch_size=8)


def is_complete(path: Path) -> bool:
    return (path / ".metadata").exists() and (path / "meta.pt").exists()


def writer(before: Callable[[int], None]) -> type[FileSystemWriter]:
    """A writer that calls ``before`` with the number of the save."""
    count = 0

    class Writer(FileSystemWriter):
        def write_data(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            before(count)
            return super().write_data(*args, **kwargs)

    return Writer


class Watch(L.Callback):
    """Looks at the checkpoints after each batch, while others may be being written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[tuple[int, list[str]]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        names = sorted(path.name for path in self.folder.glob("*.ckpt"))
        assert all(is_complete(path) for path in self.folder.glob("*.ckpt")), names
        self.seen.append((trainer.global_step, names))


def fit(folder: str, stages: int, keep: dict[str, Any], *, slow: float, async_save: bool, **strategy: Any) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    watch, checkpoint = Watch(Path(folder)), ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, **keep)
    trainer = make_trainer(
        max_epochs=1,
        callbacks=[checkpoint, watch],
        enable_checkpointing=True,
        strategy=FxPipeStrategy(num_microbatches=2, async_save=async_save, save_distributed_checkpoint=True, **strategy),
        devices=stages,
    )
    module = Model()
    # A disk that is slow, so that steps go on while a checkpoint is being written.
    with mock.patch(WRITER, writer(lambda number: time.sleep(slow))):
        trainer.fit(module, data())
        names = sorted(path.name for path in Path(folder).iterdir())
        paths = {"best": checkpoint.best_model_path, "last": checkpoint.last_model_path}
        tested = trainer.test(module, data(2), ckpt_path="best", verbose=False)
        trainer.save_checkpoint(f"{folder}/after")
        assert is_complete(Path(folder, "after"))
    return {"seen": watch.seen, "names": names, "paths": {k: Path(p).name for k, p in paths.items()}, "tested": tested}


def contents(path: Path) -> dict[str, Any]:
    folder = open_folder(Location.of(path), Reading())
    read = folder.read({folder.model_root, "optimizer_0"}, lambda path: True)
    return {str(key): value for key, value in _flat((), read)}


def _flat(path: tuple[Any, ...], value: Any) -> Any:
    if isinstance(value, (dict, list)):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat((*path, key), entry)
    else:
        yield path, value


def both(folder: str, keep: dict[str, Any]) -> list[dict[str, Any]]:
    return [fit(f"{folder}/{name}", 2, keep, slow=slow, async_save=bool(slow)) for name, slow in (("now", 0.0), ("later", 0.3))]


def read_all(folder: str) -> dict[str, dict[str, Any]]:
    return {path.name: contents(path) for path in sorted(Path(folder).glob("*.ckpt"))}


def test_what_is_written_in_the_background_is_what_was_there_when_it_was_saved(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(2).run(both, str(tmp_path), {"save_top_k": -1})
    for now, later in results:
        assert now["names"] == later["names"] == [f"step={step}.ckpt" for step in range(1, 7)]
        assert later["tested"] == now["tested"]
        # A step had come to its end, with its update, before the checkpoint of the step before was there.
        assert any(f"step={step - 1}.ckpt" not in names for step, names in later["seen"])
    found, expected = (ranks(2).run(read_all, str(tmp_path / name))[0] for name in ("later", "now"))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].keys() == values.keys()
        for key, value in values.items():
            same = torch.equal(found[name][key], value) if isinstance(value, Tensor) else found[name][key] == value
            assert same, f"{name}: {key}"


@pytest.mark.parametrize(
    "keep", [{"save_top_k": 1, "save_last": "link"}, {"save_top_k": 2, "monitor": "loss", "save_last": True}]
)
def test_names_and_links_are_those_of_saving_at_once_and_always_lead_to_a_whole_checkpoint(
    ranks: Ranks, tmp_path: Path, keep: dict[str, Any]
) -> None:
    for now, later in ranks(2).run(both, str(tmp_path), keep):
        assert later["names"] == now["names"]
        assert later["paths"] == now["paths"]
        assert later["tested"] == now["tested"]
        first = next(index for index, (_, names) in enumerate(later["seen"]) if names)
        assert all(names for _, names in later["seen"][first:])


def fail(folder: str, rank: int, number: int, keep: dict[str, Any], *, async_save: bool) -> dict[str, Any]:
    def before(count: int) -> None:
        time.sleep(0.1)  # a disk that is slow: training is a step further when it fails
        if count == number and int(os.environ["RANK"]) == rank:
            raise OSError(28, "No space left on device")

    checkpoint = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, **keep)
    trainer = make_trainer(
        max_epochs=1,
        callbacks=[checkpoint],
        enable_checkpointing=True,
        strategy=FxPipeStrategy(num_microbatches=2, async_save=async_save, save_distributed_checkpoint=True),
        devices=2,
    )
    with mock.patch(WRITER, writer(before)), pytest.raises(OSError, match="No space left") as caught:
        trainer.fit(Model(), data())
    return {"step": trainer.global_step, "error": str(caught.value)}


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_last_good_one(
    ranks: Ranks, tmp_path: Path, rank: int, async_save: bool
) -> None:
    for number, keep in ((3, {"save_top_k": 1}), (6, {"save_top_k": -1})):
        folder = tmp_path / f"{number}"
        for result in ranks(2).run(fail, str(folder), rank, number, keep, async_save=async_save):
            # In the background it is told when the next one is saved, at the end of the run for the last.
            assert result["step"] == min(number + async_save, 6)
        kept = [number - 1] if keep["save_top_k"] == 1 else range(1, number)
        assert sorted(path.name for path in folder.iterdir()) == [f"step={step}.ckpt" for step in kept]


def not_allowed(folder: str) -> str:
    Path(folder).parent.mkdir(exist_ok=True)
    if int(os.environ["RANK"]) == 0:
        Path(folder).write_text("a file where the folder should be")
    keep = ModelCheckpoint(dirpath=folder, filename="{step}")
    strategy = FxPipeStrategy(num_microbatches=2, save_distributed_checkpoint=True)
    trainer = make_trainer(max_epochs=1, callbacks=[keep], enable_checkpointing=True, strategy=strategy, devices=2)
    with pytest.raises(OSError) as caught:  # noqa: PT011
        trainer.fit(Model(), data(2))
    return type(caught.value).__name__


def test_a_place_that_cannot_be_written_to_is_told_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    names = ranks(2).run(not_allowed, str(tmp_path / "place"))
    assert len(set(names)) == 1
    assert names[0] in ("NotADirectoryError", "FileExistsError")


def interrupted_swap(folder: str) -> tuple[int, list[str]]:
    def run(ckpt_path: str | None, max_epochs: int) -> int:
        keep = ModelCheckpoint(dirpath=folder, filename="{step}", save_last=True)
        strategy = FxPipeStrategy(num_microbatches=2, save_distributed_checkpoint=True)
        trainer = make_trainer(max_epochs=max_epochs, callbacks=[keep], enable_checkpointing=True, strategy=strategy, devices=2)
        began: list[int] = []
        module = Model()
        module.on_train_start = lambda: began.append(module.trainer.global_step)
        trainer.fit(module, data(3), ckpt_path=ckpt_path)
        return began[0]

    run(None, 1)
    path = Path(folder, "last.ckpt")
    if int(os.environ["RANK"]) == 0:  # a process that died where the file system cannot swap two names
        old = path.parent / ".unfinished" / "old"
        old.mkdir(parents=True)
        path.rename(old / path.name)
    torch.distributed.barrier()
    return run("last", 2), sorted(entry.name for entry in Path(folder).iterdir())


def test_what_was_moved_aside_by_a_run_that_died_is_the_last_one_again(ranks: Ranks, tmp_path: Path) -> None:
    for began, names in ranks(2).run(interrupted_swap, str(tmp_path)):
        assert began == 3
        assert names == ["last.ckpt", "step=6.ckpt"]


def fail_while_saving(folder: str) -> tuple[float, list[str]]:
    module = Model()
    started = 0.0

    def on_train_batch_end(*args: Any) -> None:
        nonlocal started
        if module.trainer.global_step == 2:
            started = time.monotonic()
            raise ValueError("the user's own")

    module.on_train_batch_end = on_train_batch_end
    keep = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    strategy = FxPipeStrategy(num_microbatches=2, async_save=True, save_distributed_checkpoint=True)
    trainer = make_trainer(max_epochs=1, callbacks=[keep], enable_checkpointing=True, strategy=strategy, devices=2)
    # The error comes while a checkpoint is being written.
    with mock.patch(WRITER, writer(lambda number: time.sleep(0.5))), pytest.raises(ValueError, match="the user's own"):
        trainer.fit(module, data(3))
    return time.monotonic() - started, sorted(entry.name for entry in Path(folder).iterdir())


def test_what_is_being_written_when_a_run_fails_has_a_moment(ranks: Ranks, tmp_path: Path) -> None:
    for seconds, names in ranks(2).run(fail_while_saving, str(tmp_path)):
        assert seconds < 10
        assert names == ["step=1.ckpt", "step=2.ckpt"]
