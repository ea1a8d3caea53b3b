"""Checkpoints of a pipeline: an interrupted and resumed run is, bit for bit, the run that was not interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_fxpipe import FxPipeStrategy
from tests.lit import LitModel, Recorder, make_loader, make_trainer, snapshot
from tests.ranks.pool import RankPool
from tests.ranks.test_training import assert_same_state, merged

Ranks = Callable[[int], RankPool]


class WithDropout(LitModel):
    """Random numbers in the stages, in the sampler and in the step must all continue where they were."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.model.layers = nn.ModuleList(nn.Sequential(layer, nn.Dropout(0.2)) for layer in self.model.layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((x + 0.01 * torch.randn_like(x), y), batch_idx)


def run(folder: str, max_epochs: int, ckpt_path: str | None, options: dict[str, Any], seed: int = 5) -> dict[str, Any]:
    L.seed_everything(seed, verbose=False)
    module, recorder = WithDropout("mlp"), Recorder()
    keep = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    trainer = make_trainer(max_epochs=max_epochs, callbacks=[recorder, keep], enable_checkpointing=True, **options)
    trainer.fit(module, make_loader("mlp", shuffle=True), make_loader("mlp", num_samples=20), ckpt_path=ckpt_path)
    return {
        "state": snapshot(module),
        "losses": recorder.losses,
        "step": trainer.global_step,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "moments": {
            name: trainer.optimizers[0].state[p]["exp_avg_sq"]
            for name, p in module.named_parameters()
            if p in trainer.optimizers[0].state
        },
    }


def piped_run(folder: str, max_epochs: int, ckpt_path: str | None, stages: int, seed: int = 5) -> dict[str, Any]:
    strategy = FxPipeStrategy(num_microbatches=4, save_distributed_checkpoint=True)
    return run(folder, max_epochs, ckpt_path, {"strategy": strategy, "devices": stages}, seed)


def test_resumed_after_an_epoch_is_bit_for_bit_the_uninterrupted_run(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks(2).run(piped_run, str(tmp_path / "whole"), 4, None, 2)
    ranks(2).run(piped_run, str(tmp_path / "part"), 2, None, 2)
    # Another seed: all that continues must come from the checkpoint.
    resumed = ranks(2).run(piped_run, str(tmp_path / "part"), 4, str(tmp_path / "part" / "epoch=1.ckpt"), 2, 77)
    for before, after in zip(whole, resumed, strict=True):
        assert after["step"] == before["step"] == 20
        assert after["lr"] == before["lr"]
        for kind in ("state", "moments"):
            assert before[kind].keys() == after[kind].keys()
            for fqn, value in before[kind].items():
                assert torch.equal(after[kind][fqn], value), f"{kind} {fqn}"


def test_the_folder_is_keyed_by_fqn_and_says_nothing_of_stages(ranks: Ranks, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    ranks(2).run(piped_run, str(tmp_path), 1, None, 2)
    keys = set(FileSystemReader(tmp_path / "epoch=0.ckpt").read_metadata().state_dict_metadata)
    module = WithDropout("mlp")
    assert {key for key in keys if key.startswith("model.")} == {f"model.{fqn}" for fqn in module.state_dict()}
    states = {f"optimizer_0.state.{fqn}.{s}" for fqn, _ in module.named_parameters() for s in ("exp_avg", "exp_avg_sq", "step")}
    assert {key for key in keys if key.startswith("optimizer_0.state.")} == states


def test_a_single_device_checkpoint_resumes_in_a_pipeline(ranks: Ranks, tmp_path: Path) -> None:
    def plain(folder: str, epochs: int, ckpt_path: str | None) -> dict[str, Any]:
        L.seed_everything(5, verbose=False)
        module = LitModel("gpt")
        keep = ModelCheckpoint(dirpath=folder, filename="{epoch}")
        trainer = make_trainer(max_epochs=epochs, callbacks=[keep], enable_checkpointing=True)
        trainer.fit(module, make_loader("gpt"), ckpt_path=ckpt_path)
        return snapshot(module)

    plain(str(tmp_path / "start"), 1, None)
    expected = plain(str(tmp_path / "end"), 3, str(tmp_path / "start" / "epoch=0.ckpt"))
    results = ranks(3).run(piped_gpt, str(tmp_path / "pipe"), str(tmp_path / "start" / "epoch=0.ckpt"))
    assert_same_state(merged(results, "state"), expected)


def piped_gpt(folder: str, ckpt_path: str) -> dict[str, Any]:
    L.seed_everything(5, verbose=False)
    module = LitModel("gpt")
    trainer = make_trainer(max_epochs=3, strategy=FxPipeStrategy(num_microbatches=4), devices=3)
    trainer.fit(module, make_loader("gpt"), ckpt_path=ckpt_path)
    return {"state": snapshot(module)}


def piped_decoder(folder: str, max_epochs: int, ckpt_path: str | None, stages: int) -> dict[str, Any]:
    L.seed_everything(5, verbose=False)
    module = LitModel("rotary")
    if ckpt_path is not None:
        module.model.later.zero_()  # it must come from the checkpoint
    keep = ModelCheckpoint(dirpath=folder, filename="{epoch}")
    strategy = FxPipeStrategy(num_microbatches=4)
    trainer = make_trainer(
        max_epochs=max_epochs, callbacks=[keep], enable_checkpointing=True, strategy=strategy, devices=stages
    )
    trainer.fit(module, make_loader("rotary"), ckpt_path=ckpt_path)
    return {"state": snapshot(module), "later": None if module.model.later.is_meta else module.model.later.clone()}


def test_buffers_that_several_stages_recompute_from_are_saved_once_and_restored_everywhere(
    ranks: Ranks, tmp_path: Path
) -> None:
    whole = ranks(3).run(piped_decoder, str(tmp_path / "whole"), 2, None, 3)
    ranks(3).run(piped_decoder, str(tmp_path / "part"), 1, None, 3)
    resumed = ranks(3).run(piped_decoder, str(tmp_path / "part"), 2, str(tmp_path / "part" / "epoch=0.ckpt"), 3)
    expected = LitModel("rotary").model.later
    holders = [result["later"] for result in resumed if result["later"] is not None]
    assert len(holders) > 1
    assert all(torch.equal(later, expected) for later in holders)
    assert_same_state(merged(resumed, "state"), merged(whole, "state"))


def load_into_another_model(ckpt_path: str) -> str:
    trainer = make_trainer(max_epochs=3, strategy=FxPipeStrategy(), devices=2)
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(LitModel("gpt"), make_loader("gpt"), ckpt_path=ckpt_path)
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(piped_run, str(tmp_path), 1, None, 2)
    for message in ranks(2).run(load_into_another_model, str(tmp_path / "epoch=0.ckpt")):
        assert "model.blocks.0.ln1.bias" in message
        assert "model.layers.0.0.bias" in message


class Scheduled(LitModel):
    """Has a scheduler, which puts options of its own into the optimizer's groups, or none."""

    def __init__(self, name: str, has_scheduler: bool) -> None:
        super().__init__(name)
        self.has_scheduler = has_scheduler

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return ([optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]) if self.has_scheduler else optimizer


def change_schedule(folder: str, stages: int) -> list[list[str]]:
    names, path = [], f"{folder}/epoch=0.ckpt"
    for has_scheduler, ckpt_path in ((False, None), (True, path), (True, None), (False, path)):
        L.seed_everything(5, verbose=False)
        keep = ModelCheckpoint(dirpath=folder, filename="{epoch}", enable_version_counter=False)
        saves: dict[str, Any] = {"callbacks": [keep], "enable_checkpointing": True} if ckpt_path is None else {}
        strategy = FxPipeStrategy(num_microbatches=2) if stages > 1 else "auto"
        trainer = make_trainer(max_epochs=1 if ckpt_path is None else 2, strategy=strategy, devices=stages, **saves)
        trainer.fit(Scheduled("mlp", has_scheduler), make_loader("mlp"), ckpt_path=ckpt_path)
        names.append(sorted(trainer.optimizers[0].param_groups[0]))
    return names


def test_a_run_may_be_resumed_with_a_scheduler_that_it_did_not_have_or_without_the_one_it_had(
    ranks: Ranks, tmp_path: Path
) -> None:
    alone = change_schedule(str(tmp_path / "alone"), 1)
    assert [set(alone[1]) - {"params"}, set(alone[3]) - {"params"}] == [set(alone[0]) - {"params"}, set(alone[2]) - {"params"}]
    for names in ranks(2).run(change_schedule, str(tmp_path / "piped"), 2):
        assert names == alone
