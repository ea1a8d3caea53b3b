"""Checkpoints of P stages x D replicas: any other P and D, one device and DDP go on from them, bit for bit, and the reverse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_fxpipe import FxPipeStrategy
from tests.lit import LitModel, make_loader, make_trainer
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]


class Look(L.Callback):
    """Keeps parameters, buffers and optimizer states, by name, as training begins or ends."""

    def __init__(self) -> None:
        self.begun: dict[str, Tensor] = {}
        self.ended: dict[str, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.begun = everything(trainer, pl_module)
        trainer.should_stop = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.ended = everything(trainer, pl_module)


def everything(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Tensor]:
    (optimizer,) = trainer.optimizers
    found = {name: value.detach().clone() for name, value in module.state_dict().items() if not value.is_meta}
    for name, parameter in module.named_parameters():
        if not parameter.is_meta:
            found |= {f"{name}/{key}": torch.as_tensor(value).clone() for key, value in optimizer.state[parameter].items()}
    return found


def strategy_of(stages: int | None, as_folder: bool = True, shards: bool = False) -> Any:
    """``stages`` of each pipeline; 0 is one device, None is DDP. ``shards`` as ``shard_optimizer_state``."""
    if stages is None:
        return "ddp"
    options: dict[str, Any] = {"num_microbatches": 2, "save_distributed_checkpoint": as_folder, "shard_optimizer_state": shards}
    return FxPipeStrategy(num_stages=stages, **options) if stages else "auto"


def save(path: str, devices: int, stages: int | None, as_folder: bool, shards: bool = False) -> dict[str, Tensor]:
    """Runs on every rank."""
    L.seed_everything(3, verbose=False)
    look = Look()
    trainer = make_trainer(max_epochs=1, callbacks=[look], strategy=strategy_of(stages, as_folder, shards), devices=devices)
    look.on_train_start = lambda *_: None  # type: ignore[method-assign]
    trainer.fit(LitModel("gpt"), make_loader("gpt"))
    trainer.save_checkpoint(path)
    return look.ended


def save_in_background(folder: str, shards: bool = False) -> dict[str, Tensor]:
    """Runs on every rank."""
    L.seed_everything(3, verbose=False)
    look, keep = Look(), ModelCheckpoint(dirpath=folder, save_last=True)
    look.on_train_start = lambda *_: None  # type: ignore[method-assign]
    strategy = FxPipeStrategy(num_stages=2, num_microbatches=2, async_save=True, shard_optimizer_state=shards)
    options = {"max_epochs": 1, "strategy": strategy, "devices": 4, "enable_checkpointing": True}
    trainer = make_trainer(callbacks=[look, keep], **options)
    trainer.fit(LitModel("gpt"), make_loader("gpt"))
    return look.ended


def resume(path: str, devices: int, stages: int | None, shards: bool = False) -> dict[str, Tensor]:
    """Runs on every rank."""
    L.seed_everything(4, verbose=False)
    look = Look()
    trainer = make_trainer(max_epochs=2, callbacks=[look], strategy=strategy_of(stages, shards=shards), devices=devices)
    trainer.fit(LitModel("gpt"), make_loader("gpt"), ckpt_path=path)
    assert trainer.global_step > 0
    return look.begun


def merged(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Of all ranks together, which must not contradict each other."""
    found: dict[str, Tensor] = {}
    for result in results:
        for name, value in result.items():
            if name in found:
                torch.testing.assert_close(value, found[name], rtol=0, atol=0, msg=name)
        found |= result
    return found


def check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


def test_any_number_of_stages_and_replicas_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "folder.ckpt")
    expected = merged(ranks(4).run(save, path, 4, 2, True))
    for devices, stages in ((4, 4), (4, 1), (2, 2), (2, 1)):
        check(merged(ranks(devices).run(resume, path, devices, stages)), expected)
    check(resume(path, 1, 1), expected)


@pytest.mark.slow
def test_checkpoints_written_in_the_background_are_as_good(ranks: Ranks, tmp_path: Path) -> None:
    """Only the ranks of the first replica make the group that they write with."""
    expected = merged(ranks(4).run(save_in_background, str(tmp_path)))
    check(merged(ranks(2).run(resume, str(tmp_path / "last.ckpt"), 2, 2)), expected)


def save_beside_other_groups(folder: str) -> dict[str, Tensor]:
    """Runs on every rank, of which each has another number of process groups."""
    save_in_background(folder)  # from here on there is a default process group
    groups = [dist.new_group([dist.get_rank()], use_local_synchronization=True) for _ in range(dist.get_rank())]
    try:
        return save_in_background(folder)
    finally:
        for group in groups:
            dist.destroy_process_group(group)


def test_the_ranks_that_write_in_the_background_find_each_other_whatever_groups_they_have(ranks: Ranks, tmp_path: Path) -> None:
    """torch names a group that only its members make by how many others a process has."""
    expected = merged(ranks(4).run(save_beside_other_groups, str(tmp_path), timeout_seconds=60))
    check(merged(ranks(2).run(resume, str(tmp_path / "last.ckpt"), 2, 2)), expected)


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_single_files_go_to_one_device_and_to_ddp_and_come_from_there(ranks: Ranks, tmp_path: Path, stages: int) -> None:
    path, of_ddp = str(tmp_path / "ours.ckpt"), str(tmp_path / "ddp.ckpt")
    devices = 2 * stages
    expected = merged(ranks(devices).run(save, path, devices, stages, False))
    check(resume(path, 1, 0), expected)
    check(merged(ranks(2).run(resume, path, 2, None)), expected)
    expected = merged(ranks(2).run(save, of_ddp, 2, None, False))
    check(merged(ranks(devices).run(resume, of_ddp, devices, stages)), expected)
