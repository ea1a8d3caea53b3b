"""With 1F1B, a step that only logs its loss does not run on the whole batch; any other does, and nothing of it is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torchmetrics import MeanMetric

import lightning_fxpipe.runtime.schedule_choice
from lightning_fxpipe import FxPipeStrategy, UnsupportedError
from lightning_fxpipe.runtime.batch_passes import BatchPasses
from lightning_fxpipe.runtime.region_pass import RegionPass
from tests.lit import LitModel, Recorder, make_loader, make_trainer
from tests.ranks.pool import RankFailed, RankPool

Ranks = Callable[[int], RankPool]
TOLERANCE = 1e-5
NUM_BATCHES = 5


class OnlyLoss(LitModel):
    """What most language models do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss


class InDict(LitModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        self.log_dict({"one": loss, "other": loss}, on_epoch=True, batch_size=len(batch[0]))
        return {"loss": loss}


class LogsNothing(LitModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._loss(batch)


class Perplexity(LitModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        self.log("perplexity", loss.exp())
        return loss


class GivesMore(LitModel):
    seen = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        return {"loss": loss, "twice": 2 * loss.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += float(outputs["twice"])


class Counts(LitModel):
    seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        self.seen += len(batch[0])
        return loss


class InBuffer(LitModel):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        self.seen.mul_(0.9).add_(loss.detach())
        return loss


class InMetric(LitModel):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        self.mean(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen = float(self.mean.compute())


class Draws(LitModel):
    seen = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        return loss * (1 + torch.rand(()))

    def on_train_epoch_end(self) -> None:
        self.seen = float(torch.rand(()))


class UsesLogger(LitModel):
    seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        self.logger.experiment.add_scalar("loss", float(loss), self.seen)
        return loss


class Prints(LitModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        print(f"{len(batch[0])} samples")
        return loss


class SometimesWithBatch(LitModel):
    seen = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        if batch_idx == 3:
            self.seen = float(loss)
        return loss


class SometimesWithData(LitModel):
    """The last batch, and there the third microbatch first, shows what the batches before it did not."""

    seen = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        if batch[0][-1, 0] in self.last:
            self.seen += float(loss)
            self.log("last", loss)
        return loss

    @property
    def last(self) -> Tensor:
        return make_loader(self.name).dataset[68:][0][:, 0]


class CountsWithData(SometimesWithData):
    """Nothing but what is counted shows it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        if batch[0][-1, 0] in self.last:
            self.seen += 1
        return loss


class LogsMoreAndCountsWithData(SometimesWithData):
    """It runs on the whole batch, too, and changes nothing at first."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        self.log_dict({"loss": loss, "perplexity": loss.exp()}, on_epoch=True)
        if batch[0][-1, 0] in self.last:
            self.seen += 1
        return loss


class CountingLogger(DummyLogger):
    """Counts what it is asked for."""

    num_scalars = 0

    @property
    def experiment(self) -> Any:
        return self

    def add_scalar(self, *_: Any) -> None:
        self.num_scalars += 1


def fit(kind: type[LitModel], **options: Any) -> dict[str, Any]:
    """Runs on one device, or on every rank."""
    spared, again = 0, 0
    originals: Any = BatchPasses.logged_loss, RegionPass.__init__

    def counted(one: Any) -> Any:
        nonlocal spared
        spared += 1
        return originals[0](one)

    def counted_pass(one: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal again
        again += not kwargs["training"] and not kwargs.get("measures", False)
        originals[1](one, *args, **kwargs)

    torch.manual_seed(5)
    module, recorder, logger = kind("mlp"), Recorder(), CountingLogger()
    trainer = make_trainer(max_epochs=1, limit_val_batches=0, callbacks=[recorder], **options)
    trainer.loggers = [logger]
    BatchPasses.logged_loss, RegionPass.__init__ = counted, counted_pass  # type: ignore[method-assign]
    try:
        trainer.fit(module, make_loader("mlp"))
    finally:
        BatchPasses.logged_loss, RegionPass.__init__ = originals  # type: ignore[method-assign]
    return {
        "losses": recorder.losses,
        "state": module.state_dict(),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "seen": float(getattr(module, "seen", 0)),
        "scalars": logger.num_scalars,
        "spared": spared,
        "again": again,
    }


def fit_in_turns(kind: type[LitModel]) -> dict[str, Any]:
    """Runs on every rank."""
    strategy = FxPipeStrategy(schedule="1f1b", num_microbatches=4)
    return fit(kind, strategy=strategy, devices=2)


def fit_forward_first(kind: type[LitModel]) -> dict[str, Any]:
    """Runs on every rank."""
    return fit(kind, strategy=FxPipeStrategy(schedule="gpipe", num_microbatches=4), devices=2)


@pytest.mark.parametrize(
    ("kind", "num_spared", "num_again"),
    [
        *((kind, NUM_BATCHES, 0) for kind in (OnlyLoss, InDict, LogsNothing)),
        *((kind, 0, 0) for kind in (Perplexity, GivesMore, Counts, InBuffer, InMetric, Draws, UsesLogger, Prints)),
        (SometimesWithBatch, 0, 1),
        (SometimesWithData, NUM_BATCHES - 1, 1),
        (CountsWithData, NUM_BATCHES - 1, 1),
        (LogsMoreAndCountsWithData, 0, 1),
    ],
)
def test_only_a_step_that_logs_its_loss_is_left_out(
    ranks: Ranks, kind: type[LitModel], num_spared: int, num_again: int
) -> None:
    expected = fit(kind)
    found = ranks(2).run(fit_in_turns, kind)
    assert [each["spared"] for each in found] == [num_spared, 0]  # rank 0 has the last stage
    assert [each["again"] for each in found] == [num_again, num_again]
    assert [each["scalars"] for each in found] == [expected["scalars"] if each is found[0] else 0 for each in found]
    for each in found:
        assert each["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
        assert each["metrics"] == pytest.approx(expected["metrics"], abs=TOLERANCE)
        assert each["seen"] == pytest.approx(expected["seen"], abs=TOLERANCE)
        torch.testing.assert_close(each["state"], expected["state"], rtol=0, atol=TOLERANCE)


class CountsBackward(LitModel):
    """A hook that runs between the microbatches' losses changes what is no tensor."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.seen = 0

    def on_fit_start(self) -> None:
        for parameter in self.parameters():
            if not parameter.is_meta:
                parameter.register_hook(self.count)

    def count(self, gradient: Tensor) -> None:
        self.seen += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._loss(batch)


def test_what_runs_between_the_losses_is_not_undone(ranks: Ranks) -> None:
    """One look at the end of a batch cannot tell it from what the step changes: there each microbatch's step is undone."""
    found, expected = ranks(2).run(fit_in_turns, CountsBackward)[0], ranks(2).run(fit_forward_first, CountsBackward)[0]
    assert found["seen"] == expected["seen"] > 0
    assert found["spared"] == NUM_BATCHES


class NotesLate(SometimesWithData):
    """A hook of the model's changes what is no module's, and begins with that late."""

    notes: list[float]

    def on_fit_start(self) -> None:
        self.notes = []
        modules = [module for module in self.model.modules() if isinstance(module, torch.nn.Linear)]
        modules[-1].register_forward_hook(self.note)

    def note(self, module: Any, args: Any, result: Tensor) -> None:
        if self.num_batches == NUM_BATCHES - 1:
            self.notes.append(float(result.mean()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.num_batches = batch_idx

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._loss(batch)


class LogsMoreAndNotesLate(NotesLate):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        self.log("perplexity", loss.exp())
        return loss


@pytest.mark.parametrize("kind", [NotesLate, LogsMoreAndNotesLate])
def test_what_the_model_changes_late_is_refused(ranks: Ranks, kind: type[LitModel]) -> None:
    """It would be lost: the batch's one look takes it for the step's, and undoes it."""
    with pytest.raises(RankFailed, match="The model's forward changes a value in this batch"):
        ranks(2).run(fit_in_turns, kind)


class BecomesMaximum(LitModel):
    """A loss that is a mean over samples for four batches only."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.is_maximum = batch_idx == 4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        error = (self.model(batch[0]).flatten(1)[:, :1] - 1) ** 2
        return error.max() if self.is_maximum else error.mean()


def fit_with_looks(kind: type[LitModel], between: int) -> dict[str, Any] | str:
    """Runs on every rank."""
    lightning_fxpipe.runtime.schedule_choice._BATCHES_BETWEEN_LOOKS = between
    try:
        return fit_in_turns(kind)
    except UnsupportedError as error:
        return error.what
    finally:
        lightning_fxpipe.runtime.schedule_choice._BATCHES_BETWEEN_LOOKS = 64


def test_the_losses_are_compared_now_and_then(ranks: Ranks) -> None:
    expected = "1F1B does not support this loss: it does not decompose into microbatch losses."
    assert ranks(2).run(fit_with_looks, BecomesMaximum, 1) == [expected] * 2


class RemembersLate(LitModel):
    """From the last batch on, which is looked at, a run of the step finds what another run has left, were that not undone."""

    seen = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.is_late = batch_idx == NUM_BATCHES - 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        self.seen += int(self.is_late)
        return loss * (1 + self.seen)


class RemembersInListLate(RemembersLate):
    def on_fit_start(self) -> None:
        self.counts = [0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self._loss(batch)
        self.counts[0] += int(self.is_late)
        return loss * (1 + self.counts[0])


@pytest.mark.parametrize("kind", [RemembersLate, RemembersInListLate])
def test_a_look_that_finds_a_change_looks_again_at_each_run_by_itself(ranks: Ranks, kind: type[LitModel]) -> None:
    """It undoes all runs together first: one must not meet what another has changed."""
    expected = fit(kind)
    for each in ranks(2).run(fit_with_looks, kind, NUM_BATCHES - 2):
        assert each["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
        assert each["seen"] == expected["seen"]
        torch.testing.assert_close(each["state"], expected["state"], rtol=0, atol=TOLERANCE)
