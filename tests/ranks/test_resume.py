"""A checkpoint of any number of stages and cuts, or of one device, goes on with any other as the run would have gone on."""

from __future__ import annotations

import dataclasses
import itertools
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy, make_plan
from tests.lit import Recorder, make_trainer, snapshot
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]

STEPS = 5  # of an epoch
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
}


class Model(L.LightningModule):
    """Layers of different widths, two groups of parameters, a rate that changes with each step."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            widths = [12, 16, 8, 24, 8, 16, 5]
            self.model = nn.Sequential(
                *(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths[:-1])),
                nn.Linear(*widths[-2:]),
            )
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer = OPTIMIZERS[self.optimizer](groups)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40, cycle_momentum=False)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Looks(L.Callback):
    """Keeps the parameters and the optimizer's states as a run finds them, and as they are when a checkpoint is written."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.saved: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.found = self._look(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.global_step == STEPS:
            self.saved = self._look(trainer, pl_module)

    def _look(self, trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
        optimizer = trainer.optimizers[0]
        look: dict[str, Any] = {f"weight {fqn}": p.detach().clone() for fqn, p in module.named_parameters() if not p.is_meta}
        for fqn, parameter in module.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                look[f"{key} {fqn}"] = value.clone() if isinstance(value, Tensor) else value
        options = [{k: v for k, v in group.items() if not k.startswith("param")} for group in optimizer.param_groups]
        config = trainer.lr_scheduler_configs[0].scheduler.state_dict()
        counters = [trainer.global_step, trainer.fit_loop.epoch_loop.total_batch_idx]
        return {**look, "options": options, "scheduler": {k: v for k, v in config.items() if k != "_schedules"}, "at": counters}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run is.

    Attributes:
        stages: Of a pipeline; 0 for a plain Trainer on one device.
        is_uneven: Whether the first stage has two stages' share.
        options: Of the strategy.
    """

    stages: int
    is_uneven: bool = False
    options: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"num_microbatches": 2, "save_distributed_checkpoint": True}
    )

    def trainer_options(self) -> dict[str, Any]:
        if not self.stages:
            return {}
        plan = uneven_plan(self.stages) if self.is_uneven else None
        return {"strategy": FxPipeStrategy(**self.options, plan=plan), "devices": self.stages}


def uneven_plan(stages: int) -> Any:
    """A plan with one more stage, of which the first two are one."""
    plan = make_plan(Model("sgd"), (torch.randn(8, 12), torch.zeros(8, dtype=torch.long)), num_stages=stages + 1)
    first, second, *others = plan.stages
    both = dataclasses.replace(
        second,
        first_module=first.first_module,
        fqns=(*first.fqns, *second.fqns),
        num_parameters=first.num_parameters + second.num_parameters,
    )
    parts = [dataclasses.replace(stage, index=index) for index, stage in enumerate((both, *others))]
    return dataclasses.replace(plan, stages=tuple(parts))


PLAIN, ONE, TWO, THREE, FOUR = (Place(stages=count) for count in (0, 1, 2, 3, 4))
TWO_UNEVEN, THREE_UNEVEN = (Place(stages=count, is_uneven=True) for count in (2, 3))
GPIPE = Place(stages=2, options={"num_microbatches": 4, "schedule": "gpipe"})
# Several stages on each rank, which go round or come back in a V; and all on one.
ROUND = Place(stages=2, options={"num_microbatches": 4, "stages_per_rank": 2, "schedule": "gpipe"})
IN_A_V = Place(stages=2, options={"num_microbatches": 4, "schedule": "zbv_zero_bubble"})
INSIDE = Place(stages=1, options={"num_microbatches": 4, "num_stages": 4, "schedule": "1f1b"})


def train(optimizer: str, place: Place, folder: str, ckpt_path: str | None = None) -> dict[str, Any]:
    """Three epochs, with a checkpoint after the first, or two from there on."""
    L.seed_everything(5 if ckpt_path is None else 77, verbose=False)
    module, recorder, looks = Model(optimizer), Recorder(), Looks()
    keep = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    trainer = make_trainer(
        max_epochs=3, callbacks=[looks, recorder, keep], enable_checkpointing=True, **place.trainer_options()
    )
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(8 * STEPS, 12, generator=generator), torch.arange(8 * STEPS) % 5)
    trainer.fit(module, DataLoader(data, batch_size=8), ckpt_path=ckpt_path)
    return {"losses": recorder.losses, "saved": looks.saved, "found": looks.found, "state": snapshot(module)}


def train_all(cases: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [train(*case) for case in cases]


def go(ranks: Ranks, place: Place, cases: Sequence[tuple[Any, ...]]) -> list[list[dict[str, Any]]]:
    """Runs at one place in one job; for each case the results of all ranks."""
    if not place.stages:
        return [[result] for result in train_all(cases)]
    results = ranks(place.stages).run(train_all, cases, timeout_seconds=60 + 20 * len(cases))
    return [[result[index] for result in results] for index in range(len(cases))]


def consolidated(folder: Path) -> str:
    """The single file that Lightning's command makes of a checkpoint folder; a plain Trainer's file as it is."""
    if not folder.is_dir():
        return str(folder)
    file = folder.with_name("consolidated.ckpt")
    if not file.exists():
        with mock.patch.object(sys, "argv", ["consolidate", str(folder), "--output_file", str(file)]):
            runpy.run_module("lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__")
    return str(file)


def merged(results: list[dict[str, Any]], key: str) -> dict[str, Any]:
    return {name: value for result in results for name, value in result[key].items()}


def assert_identical(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(torch.as_tensor(found).cpu(), expected.cpu()), where
    elif isinstance(expected, dict):
        assert set(found) == set(expected), where
        for key, value in expected.items():
            assert_identical(found[key], value, f"{where}: {key}")
    else:
        assert found == expected, where


def check_pairs(ranks: Ranks, folder: Path, pairs: Sequence[tuple[Place, Place]], optimizers: Sequence[str]) -> int:
    """Saves at the first place of each pair, resumes at the second, and compares with the run that goes on at the first."""
    savers = list(dict.fromkeys(repr(saver) for saver, _ in pairs))
    by_name = {repr(place): place for pair in pairs for place in pair}
    whole: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number, saver in enumerate(savers):
        cases = [(name, by_name[saver], str(folder / f"{number}-{name}")) for name in optimizers]
        for name, results in zip(optimizers, go(ranks, by_name[saver], cases), strict=True):
            whole[saver, name] = results
    count = 0
    for resumer in dict.fromkeys(repr(place) for _, place in pairs):
        keys = [(repr(saver), name) for saver, place in pairs if repr(place) == resumer for name in optimizers]
        cases = []
        for saver, name in keys:
            path = folder / f"{savers.index(saver)}-{name}" / "epoch=0.ckpt"
            plain = not by_name[resumer].stages
            cases.append((name, by_name[resumer], str(folder / "again"), consolidated(path) if plain else str(path)))
        for (saver, name), resumed in zip(keys, go(ranks, by_name[resumer], cases), strict=True):
            before = whole[saver, name]
            where = f"{name}, saved by {saver}, resumed by {resumer}"
            assert_identical(merged(resumed, "found"), merged(before, "saved"), where)
            assert len(resumed[0]["losses"]) == 2 * STEPS, where
            tolerance = 0.0 if saver == resumer else 1e-6
            for result in resumed:
                assert result["losses"] == pytest.approx(before[0]["losses"][STEPS:], abs=tolerance, rel=0), where
            expected = merged(before, "state")
            for fqn, value in merged(resumed, "state").items():
                assert (value - expected[fqn]).abs().max() <= tolerance, f"{where}: {fqn}"
            count += 1
    return count


def test_a_checkpoint_goes_on_with_another_number_of_stages_and_other_cuts(ranks: Ranks, tmp_path: Path) -> None:
    check_pairs(
        ranks, tmp_path, [(TWO_UNEVEN, THREE), (TWO_UNEVEN, PLAIN), (PLAIN, TWO_UNEVEN), (TWO_UNEVEN, TWO_UNEVEN)], ["fused"]
    )


def test_a_checkpoint_of_several_stages_on_a_rank_goes_on_anywhere(ranks: Ranks, tmp_path: Path) -> None:
    pairs = [(ROUND, IN_A_V), (IN_A_V, IN_A_V), (IN_A_V, INSIDE), (INSIDE, PLAIN), (INSIDE, ROUND)]
    check_pairs(ranks, tmp_path, pairs, ["adamw"])


@pytest.mark.slow
@pytest.mark.parametrize("saver", [PLAIN, TWO, THREE, FOUR, TWO_UNEVEN, THREE_UNEVEN, GPIPE], ids=repr)
def test_every_checkpoint_goes_on_everywhere(ranks: Ranks, tmp_path: Path, saver: Place) -> None:
    resumers = [PLAIN, ONE, TWO, THREE, FOUR]
    count = check_pairs(ranks, tmp_path, [(saver, resumer) for resumer in resumers], list(OPTIMIZERS))
    assert count == len(resumers) * len(OPTIMIZERS)
