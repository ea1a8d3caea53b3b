"""Steps of evaluation that use the model again with what it gave: on one rank where it has room for the model, else on all."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import lightning_fxpipe.runtime.whole_step
from lightning_fxpipe import FxPipeStrategy
from tests.lit import LitModel, make_trainer
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]
TOLERANCE = 1e-5


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.token = nn.Embedding(9, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(8, 9)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(ids).cumsum(1)))


class Generating(LitModel):
    """Trains as usual; validation and prediction go on with what the model has given, and remember it."""

    def __init__(self) -> None:
        super().__init__("mlp")
        self.model, self.mean, self.texts = Decoder(), MeanMetric(), []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def generate(self, ids: Tensor, num_tokens: int) -> Tensor:
        for _ in range(num_tokens):
            logits = self.model(ids)[:, -1] + 0.1 * torch.rand(len(ids), 9)
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
        return ids

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        made = self.generate(batch[:, :2], 3)
        self.texts.append(made.tolist())
        self.mean(made.float())
        self.log("mean", self.mean)
        self.log("share", (made == 3).float().mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.generate(batch, 2)


def run(**options: Any) -> dict[str, Any]:
    torch.manual_seed(8)
    module = Generating()
    loader = DataLoader(torch.randint(0, 9, (11, 5)), batch_size=4)
    trainer = make_trainer(max_epochs=2, **options)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(module, loader, loader)
        predicted = trainer.predict(module, loader)
    return {
        "texts": module.texts,
        "predicted": predicted,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "state": module.state_dict(),
        "warned": [str(one.message) for one in warned if "cannot be pipelined" in str(one.message)],
        "drawn": float(torch.rand(())),
    }


def run_in_stages(free_bytes: int | None) -> dict[str, Any]:
    """Runs on every rank."""
    original = lightning_fxpipe.runtime.whole_step.memory_for_rank
    lightning_fxpipe.runtime.whole_step.memory_for_rank = lambda device, num_ranks: free_bytes
    try:
        return run(strategy=FxPipeStrategy(num_microbatches=2), devices=2)
    finally:
        lightning_fxpipe.runtime.whole_step.memory_for_rank = original


@pytest.mark.parametrize(("free_bytes", "said"), [(None, "rank only"), (100, "does not have enough memory")])
def test_generated_tokens_are_those_of_one_device(ranks: Ranks, free_bytes: int | None, said: str) -> None:
    expected = run()
    first, other = ranks(2).run(run_in_stages, free_bytes)
    assert len(first["warned"]) == 2  # of validation and prediction
    assert all(said in text for text in first["warned"])
    for found in (first, other):
        assert all(map(torch.equal, found["predicted"], expected["predicted"]))
        assert found["texts"] == expected["texts"]
        assert found["metrics"] == pytest.approx(expected["metrics"], abs=TOLERANCE)
        assert found["drawn"] == expected["drawn"]
        torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=TOLERANCE)
