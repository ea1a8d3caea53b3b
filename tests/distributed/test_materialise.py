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

from lightning_fxpipe import FxPipeStrategy
from tests import blank
from tests.distributed.pool import RankPool
from tests.distributed.runs import assert_same
from tests.lit import Recorder, make_trainer

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


@pytest.mark.parametrize("stages", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_configure_model_gives_the_values_of_one_device(ranks: Ranks, stages: int) -> None:
    expected = fit("Late", 0)
    check(ranks(stages).run(fit, "Late", stages), expected)


def several(stages: int, ckpts: str) -> dict[str, Any]:
    return {
        "init_module": fit("Late", stages, "init_module"),
        "asks": fit("Asks" if stages else "AsksNothing", stages),
        "meta": fit("Plain", stages, "meta"),
        "resets": fit("Resets", stages, "meta"),
    }


def test_other_ways_to_make_a_module_without_data(ranks: Ranks, tmp_path: Path) -> None:
    expected = several(0, "")
    one = ranks(1).run(several, 1, "")[0]
    for stages in (2, 3):
        results = ranks(stages).run(several, stages, "")
        for way in expected:
            reference = expected[way] if way != "resets" else one[way]
            try:
                check([result[way] for result in results], reference)
            except AssertionError as e:
                print("XX", way, stages, str(e)[:300])
        for way in ("init_module", "meta", "asks"):
            try:
                check([one[way]], expected[way])
            except AssertionError as e:
                print("XX", way, 1, str(e)[:300])
    assert 0


def checkpointed(stages: int, folder: str, pipe_folder: str) -> dict[str, Any]:
    seen = {}
    for name, context in (("Late", ""), ("Late", "init_module"), ("Plain", "meta"), ("Asks", "")):
        kind = name
        for where in (folder, pipe_folder):
            seen[name + context, where] = fit(
                kind,
                stages,
                context,
                ckpt_path=f"{where}/{name.replace('Asks', 'AsksNothing') if where == folder else name}/end.ckpt",
                max_epochs=2,
            )
    seen["validate"] = None
    return seen


def test_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    plain, piped = str(tmp_path / "plain"), str(tmp_path / "piped")
    for name in ("Late", "Plain", "AsksNothing"):
        fit(name, 0, folder=f"{plain}/{name}", max_epochs=1)
    for name in ("Late", "Plain", "Asks"):
        ranks(2).run(fit, name, 2, "meta" if name == "Plain" else "", folder=f"{piped}/{name}", max_epochs=1)
    results = ranks(3).run(checkpointed, 3, plain, piped)
    for key in results[0]:
        if key == "validate":
            continue
        (way, where) = key
        name = way.replace("init_module", "").replace("meta", "").replace("Asks", "AsksNothing")
        expected = fit(name, 0, ckpt_path=f"{plain}/{name}/end.ckpt", max_epochs=2)
        if where == piped:
            # whole run
            expected = fit(name, 0, max_epochs=2)
            expected["losses"] = expected["losses"][3:]
        for result in results:
            r = result[key]
            for k in ("losses", "end", "random", "tied"):
                try:
                    assert_same(r[k], expected[k], k)
                except AssertionError as e:
                    print("XX", key, k, str(e)[:200])
    assert 0
