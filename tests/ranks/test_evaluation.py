"""Validation, test and prediction run the step's own code on whole batches: whatever it does is what one device does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAUROC
from torchmetrics.functional.classification import multiclass_f1_score

from lightning_fxpipe import FxPipeStrategy
from tests.lit import LitModel, make_loader, make_trainer
from tests.ranks.pool import RankPool
from tests.ranks.runs import assert_same

Ranks = Callable[[int], RankPool]
CLASSES = 3


class Rows(torch.utils.data.Dataset[Any]):
    """22 samples in batches of 6 are three full batches and one of 4."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(5, 8, generator=generator)
        length = 2 + index % 4
        x[length:] = 0
        return x, torch.tensor(index % CLASSES), torch.tensor(length)


class Trunk(nn.Module):
    def __init__(self, loss_inside: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(8, CLASSES)
        self.loss_inside = loss_inside

    def forward(self, x: Tensor, y: Tensor | None = None, lengths: Tensor | None = None) -> Any:
        logits = self.head(self.layers(x)).mean(1)
        if not self.loss_inside or y is None or lengths is None:
            return logits
        return (F.cross_entropy(logits, y, reduction="none") * lengths).sum() / lengths.sum(), logits


class Base(L.LightningModule):
    loss_inside = False

    def __init__(self) -> None:
        super().__init__()
        self.model = Trunk(self.loss_inside)
        self.auroc = MulticlassAUROC(CLASSES)
        self.correct, self.count, self.batches = 0.0, 0, 0
        self.sums: list[float] = []
        self.seen: list[Any] = []
        self.register_buffer("ran", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Everything(Base):
    """What means over microbatches would get wrong."""

    def _step(self, batch: Any) -> Tensor:
        self.batches += 1
        self.ran += 1  # type: ignore[misc]
        x, y, lengths = batch
        logits = self.model(x + 0.1 * torch.randn_like(x))
        probabilities = logits.softmax(1)
        self.correct += float((logits.argmax(1) == y).sum())
        self.count += len(y)
        self.sums.append(float(logits.abs().sum()))
        self.seen.append(tuple(logits.shape))
        f1 = multiclass_f1_score(probabilities, y, CLASSES, average="macro")
        self.log("f1", f1)
        self.log("error", 1 - f1.item())
        self.log("largest", logits.max(), reduce_fx="max")
        self.log("std", logits.std())
        self.log("jitter", torch.rand(()) + random.random())
        self.auroc(probabilities, y)
        self.log("auroc", self.auroc)
        self.log("tokens", (F.cross_entropy(logits, y, reduction="none") * lengths).sum() / lengths.sum())
        return logits

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"norm": self._step(batch).norm()}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(float(outputs["norm"]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._step(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        order = self.model(batch[0]).flatten().argsort(descending=True)
        return {"best": int(order[0]), "order": order, "names": [f"row {i}" for i in range(len(batch[1]))]}

    def on_validation_epoch_end(self) -> None:
        self.log("accuracy", self.correct / self.count)
        self.log("sum", sum(self.sums) + self.batches)


class LossInside(Everything):
    """The model computes a loss that is a mean over tokens."""

    loss_inside = True

    def _step(self, batch: Any) -> Tensor:
        self.batches += 1
        loss, logits = self.model(*batch)
        self.count += len(batch[1])
        self.sums.append(loss.item())
        self.log("loss", loss)
        return logits


class CutsPadding(Everything):
    """The model gets other lengths in some microbatches: only the step of each can go on with them."""

    def _step(self, batch: Any) -> Tensor:
        self.batches += len(batch[1])
        x, y, lengths = batch
        logits = self.model(x[:, : int(lengths.max())])
        self.count += len(y)
        self.log("loss", F.cross_entropy(logits * 0, y))
        return logits * 0 + y[:, None]


class SkipsSome(Everything):
    """Calls the model for some batches only."""

    def _step(self, batch: Any) -> Tensor:
        self.batches += 1
        self.count += len(batch[1])
        if len(batch[1]) == 4 or self.trainer.sanity_checking:
            self.log("skipped", 1.0, reduce_fx="sum")
            return batch[0].sum(1)
        return self.model(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.sums.append(float(batch[0].sum()))
            return {"norm": batch[0].norm()}
        return {"norm": self._step(batch).norm()}

    test_step = validation_step


class TwoModels(Everything):
    """A region of several calls."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(CLASSES, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.second(self.model(batch[0]).relu()), batch[1])

    def _step(self, batch: Any) -> Tensor:
        self.batches += 1
        self.count += len(batch[1])
        hidden = self.model(batch[0])
        scale = hidden.detach().abs().mean()
        logits = self.second(hidden.relu())
        self.log("f1", multiclass_f1_score(logits, batch[1], CLASSES, average="macro"))
        self.log("scale", scale)
        return logits


MODULES: dict[str, type[Everything]] = {
    kind.__name__: kind for kind in (Everything, LossInside, CutsPadding, SkipsSome, TwoModels)
}
# With six, each microbatch is one sample.
FOR_EVERY_CHANGE = [("Everything", 2), ("LossInside", 6), ("CutsPadding", 2)]
OTHERS = [("Everything", 6), ("LossInside", 2), ("SkipsSome", 2), ("TwoModels", 2)]


def evaluate(name: str, num_microbatches: int, devices: int) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    module = MODULES[name]()
    strategy: Any = FxPipeStrategy(num_microbatches=num_microbatches) if devices > 1 else "auto"
    trainer = make_trainer(strategy=strategy, devices=devices, max_epochs=1, num_sanity_val_steps=1)
    loader = DataLoader(Rows(), 6)
    results: dict[str, Any] = {"validated": trainer.validate(module, loader, verbose=False)}
    results["tested"] = trainer.test(module, loader, verbose=False)
    predicted = trainer.predict(module, loader)
    trainer.fit(module, loader, loader)
    results["fitted"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    results["kept"] = (module.correct, module.count, module.batches, float(module.ran), module.sums, module.seen)
    results["draws"] = [float(torch.rand(())), random.random()]
    results["predicted"] = predicted
    return results


def evaluate_all(runs: list[tuple[str, int]], devices: int) -> list[dict[str, Any]]:
    return [evaluate(name, count, devices) for name, count in runs]


@pytest.mark.parametrize(
    "runs", [pytest.param(FOR_EVERY_CHANGE, id="some"), pytest.param(OTHERS, id="others", marks=pytest.mark.slow)]
)
def test_evaluation_is_that_of_one_device(runs: list[tuple[str, int]], ranks: Ranks) -> None:
    alone = evaluate_all(runs, 1)
    by_rank = ranks(2).run(evaluate_all, runs, 2)
    for index, (name, _) in enumerate(runs):
        expected = alone[index]
        for results in by_rank:
            found = results[index]
            for key in ("validated", "tested"):
                assert [pytest.approx(one, rel=1e-5, abs=1e-5) for one in found[key]] == expected[key], f"{name} {key}"
            assert found["fitted"] == pytest.approx(expected["fitted"], rel=1e-5, abs=1e-5), name
            assert found["draws"] == expected["draws"], name
            *numbers, sums, seen = found["kept"]
            *expected_numbers, expected_sums, expected_seen = expected["kept"]
            assert numbers == expected_numbers, name
            assert sums == pytest.approx(expected_sums, rel=1e-5, abs=1e-5), name
            assert_same(seen, expected_seen, name)
            for mine, theirs in zip(found["predicted"], expected["predicted"], strict=True):
                assert mine["names"] == theirs["names"]
                assert torch.equal(mine["order"], theirs["order"])
                assert mine["best"] == theirs["best"]


class PredictsClosures(LitModel):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        order = self.model(batch[0]).argsort(1)
        return lambda: order


def predict_closures(returns: bool) -> Any:
    """Runs on every rank."""
    trainer = make_trainer(strategy=FxPipeStrategy(num_microbatches=2), devices=2)
    predicted = trainer.predict(PredictsClosures("mlp"), make_loader("mlp"), return_predictions=returns)
    return predicted and [one is not None for one in predicted]


def test_predictions_that_cannot_be_sent_are_those_of_rank_0(ranks: Ranks) -> None:
    first, other = ranks(2).run(predict_closures, True)
    assert first
    assert all(first)
    assert len(other) == len(first)
    assert not any(other)
    assert ranks(2).run(predict_closures, False) == [None, None]
