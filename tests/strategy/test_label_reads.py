"""Code that reads values of the batch, as whether a class is in it: a microbatch may have another answer than its batch."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from lightning_fxpipe import FxPipeStrategy, PartitionPlan, UnsupportedError
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


class CountsPositives(InsideTheRegion):
    """A mean over the positives of the batch, of which a microbatch may have none."""

    def loss(self, batch: Any) -> Tensor:
        positive = batch[1] == 1
        losses = nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1], reduction="none")
        return (losses * positive).sum() / max(1, int(positive.sum()))


class HalvesTheLoss(InsideTheRegion):
    """A branch after the model; the first batch and all of its microbatches have the first class, later microbatches do not."""

    def loss(self, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])
        return loss if (batch[1] == 1).any() else loss * 0.5


class ReadsInAnotherWay(InsideTheRegion):
    """Names of classes, known by a set of them; each class once."""

    def loss(self, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])
        scale = sum(batch[1].unique().tolist())
        assert len(batch[1].tolist()) == len(batch[0])  # what has an entry for each sample is a microbatch's own
        return loss * scale


class OtherLayersForSome(InsideTheRegion):
    """A branch that only some batches take leads through layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(12, 12)

    def loss(self, batch: Any) -> Tensor:
        h = self.backbone(batch[0])
        if (batch[1] == LAST_CLASS).any():
            h = self.extra(h)
        return nn.functional.cross_entropy(self.head(h), batch[1])


class ReadsWhatTheModelGives(InsideTheRegion):
    """The microbatches of the first batch have the answer of the batch."""

    def loss(self, batch: Any) -> Tensor:
        logits = self.head(self.backbone(batch[0]))
        loss = nn.functional.cross_entropy(logits, batch[1])
        return loss * 2 if (logits.argmax(dim=1) == batch[1]).any() else loss


class CannotBeSplit(InsideTheRegion):
    """Classes as numbers of Python's."""

    def loss(self, batch: Any) -> Tensor:
        logits = self.head(self.backbone(batch[0]))
        if {0, 1, 2, 3} - set(batch[1].tolist()):
            raise ValueError("a class is not in this batch")
        return nn.functional.cross_entropy(logits, batch[1])


def fit(module: Net, **strategy: Any) -> dict[str, Any]:
    module.shuffle = False
    recorder = Recorder()
    place = {"strategy": FxPipeStrategy(num_stages=2, **strategy)} if strategy else {}
    make_trainer(callbacks=[recorder], max_steps=5, limit_val_batches=0, **place).fit(module)
    return {"losses": recorder.losses, "state": snapshot(module)}


KINDS = [InsideTheRegion, BetweenTheCalls, ChecksClasses, CountsPositives, HalvesTheLoss, ReadsInAnotherWay, OtherLayersForSome]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_that_of_the_batch(kind: type[Net]) -> None:
    """With 1F1B the step runs for each microbatch, and reads what its batch has."""
    expected = fit(kind())
    assert_same(fit(kind(), num_microbatches=4), expected, kind.__name__)
    assert_same(fit(kind(), num_microbatches=2, schedule="1f1b"), expected, kind.__name__)


def planned(module: Net) -> PartitionPlan:
    module.shuffle = False
    strategy = FxPipeStrategy(num_stages=2, num_microbatches=4)
    make_trainer(max_steps=5, limit_val_batches=0, strategy=strategy).fit(module)
    assert strategy.plan is not None
    return strategy.plan


def test_calls_after_a_branch_on_labels_are_pipelined() -> None:
    """Every rank has the batch; they lay whole on the last stage. So they do where the other branch has layers of its own."""
    assert not planned(BetweenTheCalls()).outside_fqns
    assert {"head.0.weight", "extra.weight"} <= {*planned(OtherLayersForSome()).outside_fqns}


def test_a_module_that_branches_on_labels_is_cut_into_microbatches(caplog: pytest.LogCaptureFixture) -> None:
    """It is opened, so that each graph has one of its branches; as a whole it had to see the whole batch."""
    planned(InsideTheRegion())
    assert "as a single microbatch" not in caplog.text


def test_reads_of_what_the_model_gives_are_compared_on_every_batch_with_one_f_one_b() -> None:
    """A value that only the stages compute is a microbatch's own: that of a later batch would train another loss."""
    with pytest.raises(UnsupportedError, match="The loss of this batch does not decompose into the losses of its microbatches"):
        fit(ReadsWhatTheModelGives(), num_microbatches=2, schedule="1f1b")


def test_a_loss_that_fails_for_a_microbatch_is_none_for_one_f_one_b() -> None:
    with pytest.raises(UnsupportedError, match="1F1B does not support this loss") as caught:
        fit(CannotBeSplit(), num_microbatches=4, schedule="1f1b")
    assert "the step fails for a microbatch in " in str(caught.value.observed)
    assert "test_label_reads.py" in str(caught.value.observed)
