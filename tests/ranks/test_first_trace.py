"""The first batch runs with the graph that the plan was made of, unless something that it depends on has come to be since."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.runtime.stage_traces import StageTraces
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go

Ranks = Callable[[int], RankPool]


class Scaled(Net):
    """Its middle is scaled by something that subclasses set."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.register_buffer("shift", torch.zeros(12))

    def factor(self) -> Any:
        return self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x) * self.factor() + self.shift)


class InStep(Scaled):
    """Calls its parts from the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.backbone(batch[0]) * self.factor() + self.shift), batch[1])


class AtStart(Scaled):
    def on_fit_start(self) -> None:
        self.scale = 0.5
        self.shift += 0.1


class OtherBuffer(InStep):
    def on_train_start(self) -> None:
        self.shift = torch.full((12,), 0.2)


class Frozen(Scaled):
    def on_fit_start(self) -> None:
        self.backbone[0].requires_grad_(False)


class ByRate(Scaled):
    """Looks at what there is only once optimizers are there."""

    def factor(self) -> Any:
        return 1.0 + self.trainer.optimizers[0].param_groups[0]["lr"] if self.trainer.training else 1.0


class ByNumberOfBatches(Scaled):
    def factor(self) -> Any:
        return 1.0 + 1.0 / float(self.trainer.num_training_batches)


class MadeInHook(Scaled):
    def on_fit_start(self) -> None:
        self.late = 0.25

    def factor(self) -> Any:
        return self.late


# How often the training step is recorded once the run has begun.
COUNTS = {Scaled: 0, InStep: 0, OtherBuffer: 0, AtStart: 1, Frozen: 1}
# Validation comes first, and finds its own graph again for its smaller last batch.
OPTIONS = {"num_sanity_val_steps": -1}
MODULES = (*COUNTS, ByRate, ByNumberOfBatches, MadeInHook)
RUNS = {module.__name__: Run(module=module, options=OPTIONS) for module in MODULES}


@pytest.mark.parametrize("name", RUNS)
def test_the_first_batch_is_that_of_one_device(ranks: Ranks, tmp_path: Path, name: str) -> None:
    compare(ranks, do, [name], tmp_path, 2)


@pytest.mark.parametrize("module", COUNTS)
def test_the_training_step_is_not_recorded_again_where_nothing_has_changed(ranks: Ranks, tmp_path: Path, module: Any) -> None:
    assert ranks(2).run(count_traces, module.__name__, str(tmp_path)) == [COUNTS[module]] * 2


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    path = Path(folder) / name / str(stages)
    path.mkdir(parents=True, exist_ok=True)
    return go(RUNS[name], path, stages)


def count_traces(name: str, folder: str) -> int:
    """Runs on every rank: how often the training step was recorded once the run had begun, of which nobody is warned."""
    original = StageTraces._cut
    kinds: list[str] = []

    def noting(self: Any, kind: Any, *args: Any) -> Any:
        kinds.append(kind.value)
        return original(self, kind, *args)

    StageTraces._cut = noting  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="The model was traced again")
            do(name, folder, 2)
    finally:
        StageTraces._cut = original  # type: ignore[method-assign]
    return kinds.count("training_step")
