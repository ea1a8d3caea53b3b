"""Code that reads values of the batch, as whether a class is in it: a microbatch may have another answer than its batch."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from lightning_fxpipe import FxPipeStrategy, UnsupportedError
from tests.lit import Recorder, make_trainer, snapshot
from tests.ranks.runs import Net, assert_same

LAST_CLASS = 4  # in each batch of eight, and not in each of its microbatches


class Doubles(nn.Module):
    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        return h * 2 if (labels == LAST_CLASS).any() else h


class InsideTheRegion(Net):
    """A module that stays whole reads labels between two calls with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.doubles = Doubles()

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.doubles(self.backbone(batch[0]), batch[1])), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


class BetweenTheCalls(InsideTheRegion):
    """The step reads them; the first class is in the first batch and all of its microbatches."""

    def loss(self, batch: Any) -> Tensor:
        h = self.backbone(batch[0])
        if (batch[1] == 1).any():
            h = h * 2
        return nn.functional.cross_entropy(self.head(h), batch[1])


class ChecksClasses(InsideTheRegion):
    def loss(self, batch: Any) -> Tensor:
        logits = self.head(self.backbone(batch[0]))
        for label in range(LAST_CLASS):
            if not (batch[1] == label).any():
                raise ValueError(f"class {label} is not in this batch")
        return nn.functional.cross_entropy(logits, batch[1])


def fit(module: Net, **strategy: Any) -> dict[str, Any]:
    module.shuffle = False
    recorder = Recorder()
    place = {"strategy": FxPipeStrategy(num_stages=2, **strategy)} if strategy else {}
    make_trainer(callbacks=[recorder], max_steps=5, limit_val_batches=0, **place).fit(module)
    return {"losses": recorder.losses, "state": snapshot(module)}


@pytest.mark.parametrize("kind", [InsideTheRegion, BetweenTheCalls, ChecksClasses])
def test_what_is_read_is_that_of_the_batch(kind: type[Net]) -> None:
    assert_same(fit(kind(), num_microbatches=4), fit(kind()), kind.__name__)


def test_reads_that_decide_are_compared_on_every_batch_with_one_f_one_b() -> None:
    """The microbatches of the first batch have the answer of the batch; a later one's would train another loss."""
    with pytest.raises(UnsupportedError, match="The loss of this batch is not that of its microbatches"):
        fit(BetweenTheCalls(), num_microbatches=2, schedule="1f1b")


def test_a_loss_that_fails_for_a_microbatch_is_none_for_one_f_one_b() -> None:
    with pytest.raises(UnsupportedError, match="1F1B cannot train this loss") as caught:
        fit(ChecksClasses(), num_microbatches=4, schedule="1f1b")
    assert "the step fails for a microbatch in " in str(caught.value.observed)
    assert "test_label_reads.py" in str(caught.value.observed)
