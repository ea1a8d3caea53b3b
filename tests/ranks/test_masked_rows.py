"""A head on some of the rows only: how many there are depends on values of the batch, so they cross no cut.

The choice of rows, and what follows from it, runs on the last stage's rank after the stages.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_fxpipe import FxPipeStrategy, UnsupportedError
from tests.lit import make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import NetWithLoss, Run, compare, go


class Masked(NetWithLoss):
    def chosen(self, labels: Tensor) -> Tensor:
        return labels > 1

    def loss(self, batch: Any) -> Tensor:
        hidden = self.backbone(batch[0])
        rows = self.chosen(batch[1])
        scores = self.head(hidden[rows])
        self.log("num_rows", float(scores.shape[0]))
        return nn.functional.cross_entropy(scores, batch[1][rows])


class LastOfOne(Masked):
    """The last batch is a single sample, of whose size nothing is symbolic."""

    def train_dataloader(self) -> Any:
        return self._loader(33)


class ByNumber(Masked):
    def chosen(self, labels: Tensor) -> Tensor:
        return (labels > 1).nonzero().squeeze(1)


class ChosenBefore(ByNumber):
    def loss(self, batch: Any) -> Tensor:
        rows = self.chosen(batch[1])
        return nn.functional.cross_entropy(self.head(self.backbone(batch[0])[rows]), batch[1][rows])


class InForward(NetWithLoss):
    """The size is known inside the model only, which returns a loss."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        rows = labels > 1
        return nn.functional.cross_entropy(self.head(self.backbone(x)[rows]), labels[rows])

    def loss(self, batch: Any) -> Tensor:
        return self(*batch)


RUNS = {
    f"{kind.__name__}{count}": Run(module=kind, strategy={"num_microbatches": count}, options={"max_epochs": 1})
    for count in (1, 2)
    for kind in (Masked, LastOfOne, ByNumber, InForward)
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    return go(RUNS[name], Path(folder) / f"{name}{stages}", stages)


@pytest.mark.parametrize(("stages", "names"), [(2, list(RUNS)), (3, ["Masked1", "InForward2"])])
def test_a_head_on_some_rows_is_that_of_one_device(
    ranks: Callable[[int], RankPool], tmp_path: Path, stages: int, names: list[str]
) -> None:
    compare(ranks, do, names, tmp_path, stages)


def refused(folder: str) -> str:
    """The message that ends a run."""
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, "default_root_dir": folder}
    try:
        make_trainer(devices=2, strategy=FxPipeStrategy(num_microbatches=2), **options).fit(ChosenBefore())
    except UnsupportedError as error:
        return str(error)
    return ""


def test_rows_whose_number_is_unknown_when_the_model_is_called_are_refused(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pool = ranks(2)
    try:
        for message in pool.run(refused, str(tmp_path)):
            assert "The model is called with a tensor whose size depends on values of the batch." in message
    finally:
        pool.kill()
