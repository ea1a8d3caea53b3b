"""Modules that are made without data get, stage by stage, the values that they have on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_fxpipe import FxPipeStrategy, UnsupportedError
from tests import blank
from tests.lit import Recorder, make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import assert_same

Ranks = Callable[[int], RankPool]


class Looker(L.Callback):
    """Keeps what the rank holds when the first batch begins, and what is a placeholder."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if not hasattr(self, "seen"):
            tensors = dict([*pl_module.named_parameters(), *pl_module.named_buffers()])
            self.seen = {fqn: tensor.detach().clone() for fqn, tensor in tensors.items() if not tensor.is_meta}
            self.missing = [fqn for fqn, tensor in tensors.items() if tensor.is_meta]


def fit(
    name: str, stages: int, context: str = "", *, ckpt_path: str | None = None, folder: str | None = None, **options: Any
) -> dict[str, Any]:
    L.seed_everything(6, verbose=False)
    recorder, looker = Recorder(), Looker()
    keep = [ModelCheckpoint(folder, filename="end")] if folder else []
    place = {"strategy": FxPipeStrategy(num_microbatches=1), "devices": stages} if stages else {}
    trainer = make_trainer(
        **{"max_epochs": 1, "callbacks": [recorder, looker, *keep], "enable_checkpointing": bool(folder), **options, **place}
    )
    contexts = {"": contextlib.nullcontext, "init_module": lambda: trainer.init_module(empty_init=True)}
    with contexts.get(context, lambda: torch.device("meta"))() if stages else contextlib.nullcontext():
        module = getattr(blank, name)()
        if context == "init_module":
            module.configure_model()
    trainer.fit(module, blank.make_data(), ckpt_path=ckpt_path)
    return {
        "losses": recorder.losses,
        "start": looker.seen,
        "missing": looker.missing,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "end": {fqn: value.detach().clone() for fqn, value in module.state_dict().items()},
        "tied": name != "Late" or module.model.head.weight is module.model.embedding.weight,
        "random": float(torch.rand(())),
    }


def check(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """The initial values are one device's to the bit, and so is what follows, up to rounding."""
    assert not expected["missing"]
    for result in results:
        assert len(results) == 1 or result["missing"]
        for fqn, value in result["start"].items():
            assert torch.equal(value, expected["start"][fqn]), fqn
        for key in ("losses", "metrics", "end", "random", "tied"):
            assert_same(result[key], expected[key], key)
    assert set().union(*(result["start"] for result in results)) == expected["start"].keys()


WAYS = {
    "configure_model": ("Late", ""),
    "init_module": ("Late", "init_module"),
    "asks": ("Asks", ""),
    "meta": ("Plain", "meta"),
}
# What one device does instead.
ON_ONE_DEVICE = {"Asks": "AsksNothing"}


def every_way(stages: int) -> dict[str, Any]:
    found = {way: fit(name, stages, context) for way, (name, context) in {**WAYS, "resets": ("Resets", "meta")}.items()}
    return {**found, "precision": fit("Late", stages, precision="64-true")}


@pytest.mark.parametrize("stages", [3, *(pytest.param(stages, marks=pytest.mark.slow) for stages in (2, 4))])
def test_a_module_without_data_gets_the_values_of_one_device(ranks: Ranks, stages: int) -> None:
    results = ranks(stages).run(every_way, stages, timeout_seconds=150)
    for way, (name, _) in WAYS.items():
        check([result[way] for result in results], fit(ON_ONE_DEVICE.get(name, name), 0))
    check([result["precision"] for result in results], fit("Late", 0, precision="64-true"))
    # Nothing on one device is like a module that initialises itself late: it is the same for any number of stages.
    alone = ranks(1).run(fit, "Resets", 1, "meta")[0]
    check([result["resets"] for result in results], alone)
    assert 0.4 < float(alone["start"]["model.1.scale"].mean()) < 0.6
    assert torch.equal(alone["start"]["model.1.shift"], alone["start"]["model.1.shift"].clamp(0, 1))


def resume(ways: list[tuple[str, str, str]], stages: int) -> list[dict[str, Any]]:
    return [fit(name, stages, context, ckpt_path=f"{folder}/end.ckpt", max_epochs=2) for name, context, folder in ways]


def test_a_checkpoint_gives_a_module_without_data_its_values(ranks: Ranks, tmp_path: Path) -> None:
    plain, piped = str(tmp_path / "plain"), str(tmp_path / "piped")
    fit("Late", 0, folder=plain)
    ranks(2).run(fit, "Late", 2, folder=piped)
    whole = fit("Late", 0, max_epochs=2)
    from_plain = fit("Late", 0, ckpt_path=f"{plain}/end.ckpt", max_epochs=2)
    ways = [("Late", "", plain), ("Late", "", piped), ("Late", "init_module", piped)]
    for result in ranks(3).run(resume, ways, 3):
        for (_, _, folder), found in zip(ways, result, strict=True):
            # From a folder the random numbers go on, too; from a single file they are those of one device that starts from it.
            expected = whole if folder == piped else from_plain
            assert_same(found["losses"], expected["losses"][-3:], folder)
            for key in ("end", "random", "tied"):
                assert_same(found[key], expected[key], f"{folder}: {key}")


class Drops(blank.Late):
    """Starts its head, and a buffer, anew."""

    strict_loading = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for fqn in ("model.head.bias", "model.blocks.3.shift"):
            del checkpoint["state_dict"][fqn]


blank.Drops = Drops  # type: ignore[attr-defined]


def start_anew(name: str, ckpt_path: str, stages: int) -> dict[str, Any]:
    return fit(name, stages, ckpt_path=ckpt_path, max_epochs=2)


def test_what_a_checkpoint_does_not_bring_is_initialised(ranks: Ranks, tmp_path: Path) -> None:
    fit("Late", 0, folder=str(tmp_path / "plain"))
    ranks(2).run(fit, "Late", 2, folder=str(tmp_path / "piped"))
    path = str(tmp_path / "plain" / "end.ckpt")
    expected = start_anew("Drops", path, 0)
    check_end(ranks(2).run(start_anew, "Drops", path, 2), expected)
    for result in ranks(2).run(start_anew, "Drops", str(tmp_path / "piped" / "end.ckpt"), 2):
        for fqn in ("model.head.bias", "model.blocks.3.shift"):
            if fqn in result["start"]:
                assert torch.equal(result["start"][fqn], expected["start"][fqn])


def check_end(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for result in results:
        assert_same(result["losses"], expected["losses"], "losses")
        assert_same(result["end"], expected["end"], "end")


class Spoilt(blank.Late):
    """Is changed when nobody looks."""

    def setup(self, stage: str) -> None:
        nn.init.zeros_(self.model.blocks[2].linear.weight)


blank.Spoilt = Spoilt  # type: ignore[attr-defined]


def refused(name: str, context: str) -> str:
    try:
        fit(name, 2, context)
    except UnsupportedError as error:
        return str(error)
    return "nothing"


def test_what_nobody_can_initialise_is_refused_by_name_before_the_first_step(ranks: Ranks) -> None:
    for message in ranks(2).run(refused, "Unaided", "meta"):
        assert "model.1.scale (no module method" in message
        assert "model.1.unsaved" in message
    for message in ranks(2).run(refused, "Special", "meta"):
        assert "model.1.0.weight (its module's constructor does more" in message
        assert "configure_model" in message
    for message in ranks(2).run(refused, "Spoilt", "init_module"):
        assert "model.blocks.2.linear.weight (it was changed after construction" in message
