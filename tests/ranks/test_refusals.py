"""What a pipeline cannot run is refused before the first step, on every rank, with the reason and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe import FxPipeError, FxPipeStrategy, PartitionError, TraceError, UnsupportedError
from lightning_fxpipe.tracing.region import NoModelCall
from tests.lit import LitModel, make_loader, make_trainer
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]


class TwoLayers(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LooksAtValues(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.sum() > 0:
            h = -h
        return self.second(h)


class NeverCalls(TwoLayers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.linear(batch[0], self.first.weight).sum()


class TwoOptimizers(TwoLayers):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.first, self.second)]


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], int | str, type[FxPipeError], list[str]]] = {
    "more stages than legal cuts": (
        TwoLayers,
        lambda: make_loader("mlp"),
        "auto",
        PartitionError,
        ["3 stages", "1 place for a cut"],
    ),
    "more devices than stages": (
        lambda: LitModel("mlp"),
        lambda: make_loader("mlp"),
        2,
        UnsupportedError,
        ["2 stages", "3 dev"],
    ),
    "untraceable root": (LooksAtValues, lambda: make_loader("mlp"), "auto", TraceError, ["test_refusals.py:"]),
    "never calls a model": (NeverCalls, lambda: make_loader("mlp"), "auto", NoModelCall, ["NeverCalls.training_step"]),
}

PAIR_CASES: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "two optimizers": (TwoOptimizers, RuntimeError, ["multiple optimizers"]),  # Lightning's own refusal
}


def refused(case: str) -> tuple[str, str]:
    make_module, make_data, num_stages, kind, _ = CASES[case]
    trainer = make_trainer(max_epochs=1, strategy=FxPipeStrategy(num_stages=num_stages), devices=3)  # type: ignore[arg-type]
    with pytest.raises(FxPipeError) as caught:
        trainer.fit(make_module(), make_data())
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_refused_on_every_rank_before_the_first_step(ranks: Ranks, case: str) -> None:
    *_, kind, words = CASES[case]
    for name, message in ranks(3).run(refused, case):
        assert name == kind.__name__
        for word in words:
            assert word in message


def refused_pair(case: str) -> tuple[str, str]:
    trainer = make_trainer(max_epochs=1, strategy=FxPipeStrategy(num_microbatches=2), devices=2)
    with pytest.raises((FxPipeError, RuntimeError)) as caught:
        trainer.fit(PAIR_CASES[case][0](), make_loader("mlp"))
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("case", PAIR_CASES)
def test_optimizers_that_a_pipeline_cannot_run(ranks: Ranks, case: str) -> None:
    _, kind, words = PAIR_CASES[case]
    for name, message in ranks(2).run(refused_pair, case):
        assert name == kind.__name__
        for word in words:
            assert word in message
