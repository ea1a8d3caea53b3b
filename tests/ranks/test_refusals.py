"""What a pipeline cannot run is refused on every rank, with what failed, where, what was found, and what to do.

Most is refused before the first step; what a later batch brings is refused there, before it trains anything.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe import (
    FxPipeError,
    FxPipeStrategy,
    PartitionError,
    PeerError,
    TraceError,
    UnsupportedError,
    make_plan,
)
from lightning_fxpipe.tracing.region import NoModelCall
from tests.lit import LitModel, make_loader, make_trainer
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]
SECOND = "rank 1"


class TwoLayers(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 5)
        self.batch = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch = batch_idx

    def training_step(self, batch: Any, batch_idx: int) -> Any:
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


class ReturnsLogits(TwoLayers):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class NoModelLater(TwoLayers):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.tensor(0.5) if batch_idx == 2 else super().training_step(batch, batch_idx)


class Fickle(TwoLayers):
    """Goes another way when its third batch really runs than in the look at it before: as by a clock, or a file of others."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.looks = os.memfd_create("looks") if batch_idx == 2 else None

    looks: int | None = None

    def goes_another_way(self) -> bool:
        if self.looks is None:
            return False
        os.write(self.looks, b".")
        return os.fstat(self.looks).st_size > 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.goes_another_way():
            return self.other_way(x, y)
        return nn.functional.cross_entropy(self.second(self.first(x)), y)

    def other_way(self, x: Tensor, y: Tensor) -> Any:
        raise NotImplementedError


class EndsEarly(Fickle):
    def other_way(self, x: Tensor, y: Tensor) -> Any:
        self.first(x)


class DoublesBetween(Fickle):
    def other_way(self, x: Tensor, y: Tensor) -> Any:
        return nn.functional.cross_entropy(self.second(self.first(x) * 2), y)


class UsesMore(Fickle):
    def other_way(self, x: Tensor, y: Tensor) -> Any:
        h = self.first(x)
        return nn.functional.cross_entropy(self.second(h), y) + h.pow(2).mean()


class ChoosesAnotherPart(TwoLayers):
    """Takes the loss of one part of the result, and later of the other, which no variable holds."""

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        return self.second(h), h

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])[self.global_step // 2].square().mean()


class FewerSamples(Fickle):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        count = 5 if self.goes_another_way() else len(x)
        return nn.functional.cross_entropy(self(x[:count]), y[:count])


class RaisesStopIteration(TwoLayers):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * next(iter([])) if batch_idx == 2 else loss


class Widening(nn.Linear):
    """Stays whole, and gives another dtype where its bias is large."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.double() if self.bias.abs().max() > 100 else y


class OtherDtype(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.first = Widening(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).float())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            nn.init.constant_(self.first.bias, 200)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class ByRank(TwoLayers):
    """Sends one tensor more on a rank, which it knows from its process."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(h) + (h.mean() if multiprocessing.current_process().name.endswith(SECOND) else 0)


class MeanOfMaxima(TwoLayers):
    """A loss that is a mean over samples until a later batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        error = self(batch[0]).pow(2).mean(1)
        self.log("largest", error.max())
        return error.max() if self.batch == 3 else error.mean()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """A run, and its error.

    Attributes:
        module: Makes the module.
        kind, what: Of the error.
        where, observed, todo: Parts of the error's.
        strategy: Makes the strategy's options.
        stages: Devices.
        late: Whether batches have been trained before; the ranks cannot go on after that.
    """

    module: Callable[[], L.LightningModule]
    kind: type[FxPipeError] = UnsupportedError
    what: str
    where: str = ""
    observed: str
    todo: str
    strategy: Callable[[], dict[str, Any]] = lambda: {"num_microbatches": 2}
    stages: int = 2
    late: bool = False


def plan_of_batches_first() -> Any:
    return make_plan(TwoLayers(), next(iter(make_loader("mlp"))), num_stages=2)


REFUSED: dict[str, Refusal] = {
    "more stages than legal cuts": Refusal(
        module=TwoLayers,
        kind=PartitionError,
        what="Cannot form 3 stages.",
        observed="1 place for a cut",
        todo="Use at most 2 devices",
        stages=3,
    ),
    "more devices than stages": Refusal(
        module=lambda: LitModel("mlp"),
        what="The stages cannot be distributed evenly over the devices.",
        observed="2 stages and 3 devices",
        todo="Trainer(devices=2)",
        strategy=lambda: {"num_stages": 2},
        stages=3,
    ),
    "untraceable root": Refusal(
        module=LooksAtValues,
        kind=TraceError,
        what="The forward of LooksAtValues cannot be traced.",
        where="test_refusals.py:",
        observed="reads a value that is not known in advance",
        todo="If the same error occurs on one device, fix that first.",
        stages=3,
    ),
    "never calls a model": Refusal(
        module=NeverCalls,
        kind=NoModelCall,
        what="The step never calls a model with parameters to train, so there is nothing to pipeline.",
        where="NeverCalls.training_step",
        observed="without such a call",
        todo="Call the module itself",
    ),
    "no loss": Refusal(
        late=True,
        module=ReturnsLogits,
        what="The training_step returned a value that is not a loss.",
        observed="Tensor of shape (16, 5)",
        todo="Return a scalar loss.",
    ),
    "a loss without the model": Refusal(
        late=True,
        module=NoModelLater,
        what="The training_step returned a loss without calling the model.",
        observed="does not depend on any parameter",
        todo="Return None",
    ),
    "fewer calls later": Refusal(
        late=True,
        module=EndsEarly,
        what="The step ended before making all traced calls of the model.",
        observed="1 calls",
        todo="Make the same calls for every batch",
    ),
    "other tensors later": Refusal(
        late=True,
        module=DoublesBetween,
        what="The step takes a different path between its calls of the model than when it was traced.",
        where="test_refusals.py:",
        observed="mul",
        todo="Move the code that varies between batches",
    ),
    "another result later": Refusal(
        late=True,
        module=UsesMore,
        what="The step uses a value of the pipelined calls that it did not use when it was traced.",
        where="test_refusals.py:",
        observed="that only the stages hold",
        todo="Use the value in every step",
    ),
    "another part of the result later": Refusal(
        late=True,
        module=ChoosesAnotherPart,
        what="Tensor 1 in the result of the module is used here, but it is on another stage.",
        where="test_refusals.py:",
        observed="that was not made when the model was traced",
        todo="in a local variable before choosing a part of it",
    ),
    "fewer samples later": Refusal(
        late=True,
        module=FewerSamples,
        what="The training_step calls the module with inputs with different shapes than in the trace.",
        observed="(5, 12)",
        todo="from the batch's shapes",
    ),
    "an end of data": Refusal(
        late=True,
        module=RaisesStopIteration,
        kind=FxPipeError,
        what="User code raised StopIteration, which would end the epoch on this rank alone.",
        where="training_step",
        observed="an uncaught StopIteration",
        todo="Pass a default to next()",
    ),
    "another dtype later": Refusal(
        late=True,
        module=OtherDtype,
        what="Stage 0 computed a tensor with a different shape, dtype or gradient than expected.",
        where="first, ",
        observed="torch.float64",
        todo="Keep the module and its user in one stage",
    ),
    "graphs by rank": Refusal(
        module=ByRank,
        kind=TraceError,
        what="The ranks recorded different graphs of the same step.",
        observed="rank 0",
        todo="depends on the rank",
    ),
    "another loss later": Refusal(
        late=True,
        module=MeanOfMaxima,
        what="The loss of this batch does not decompose into the losses of its microbatches, unlike the first batch.",
        where="MeanOfMaxima.training_step",
        observed="from its 2 microbatches",
        todo='schedule="gpipe"',
        strategy=lambda: {"num_microbatches": 2, "schedule": "1f1b"},
    ),
    "a plan of another dimension": Refusal(
        module=TwoLayers,
        what="The plan was made for a different batch dimension.",
        observed="FxPipeStrategy(batch_dim=1) and a plan with batch_dim=0",
        todo="Make the plan again",
        strategy=lambda: {"batch_dim": 1, "plan": plan_of_batches_first()},
    ),
}


def refused(names: list[str], stages: int) -> list[tuple[str, dict[str, Any]]]:
    """Runs on every rank: how the runs with so many stages end."""
    found = []
    multiprocessing.current_process().name = f"rank {os.environ['RANK']}"
    for name in names:
        case = REFUSED[name]
        L.seed_everything(3, verbose=False)
        trainer = make_trainer(max_epochs=1, strategy=FxPipeStrategy(**case.strategy()), devices=stages)
        try:
            trainer.fit(case.module(), make_loader("mlp"))
        except FxPipeError as error:
            found.append((type(error).__name__, vars(error) | {"cause": "".join(getattr(error, "__notes__", []))}))
        else:
            found.append(("no error", {}))
    return found


def check(names: list[str], by_rank: list[list[tuple[str, dict[str, Any]]]]) -> None:
    for name, *found in zip(names, *by_rank, strict=True):
        case = REFUSED[name]
        own = [parts for kind, parts in found if kind == case.kind.__name__]
        assert own, f"{name}: {found}"
        for kind, parts in found:
            if kind != case.kind.__name__:  # it is told of another rank's
                assert kind == PeerError.__name__, f"{name}: {found}"
                assert case.what in parts["cause"], f"{name}: {found}"
        for parts in own:
            assert parts["what"] == case.what, f"{name}: {found}"
            for part in ("where", "observed", "todo"):
                assert getattr(case, part) in (parts[part] or ""), f"{name}: {part}: {parts}"


@pytest.mark.parametrize("stages", [2, 3])
def test_refused_on_every_rank_before_the_first_step(ranks: Ranks, stages: int) -> None:
    names = [name for name, case in REFUSED.items() if case.stages == stages and not case.late]
    check(names, ranks(stages).run(refused, names, stages))


@pytest.mark.parametrize("name", [name for name, case in REFUSED.items() if case.late])
def test_refused_at_a_later_batch(ranks: Ranks, name: str) -> None:
    pool = ranks(REFUSED[name].stages)
    try:
        check([name], pool.run(refused, [name], REFUSED[name].stages))
    finally:
        pool.kill()


def lightnings_own() -> str:
    trainer = make_trainer(max_epochs=1, strategy=FxPipeStrategy(num_microbatches=2), devices=2)
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(TwoOptimizers(), make_loader("mlp"))
    return str(caught.value)


def test_what_lightning_refuses_itself_has_its_own_error(ranks: Ranks) -> None:
    for message in ranks(2).run(lightnings_own):
        assert "multiple optimizers" in message
