"""Batches that go forward and backward by turns: from the first one on, and with schedule="auto" where memory is scarce."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_fxpipe.runtime.batch_passes
import lightning_fxpipe.runtime.schedule_choice
from lightning_fxpipe import FxPipeStrategy
from lightning_fxpipe.runtime.one_f_one_b import InterleavedPass
from lightning_fxpipe.runtime.region_pass import RegionPass
from tests.lit import LitModel, fit_and_record, make_loader, make_trainer
from tests.ranks.pool import RankPool

Ranks = Callable[[int], RankPool]
TOLERANCE = 1e-5


class Passes:
    """Counts what goes through the stages in training."""

    def __init__(self) -> None:
        self.by_turns = self.forward = 0
        self._originals = InterleavedPass.run, RegionPass.forward

    def __enter__(self) -> Passes:
        run, forward = self._originals

        def counted_run(one: Any) -> Any:
            self.by_turns += 1
            return run(one)

        def counted_forward(one: Any) -> Any:
            self.forward += one.training
            return forward(one)

        InterleavedPass.run, RegionPass.forward = counted_run, counted_forward  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        InterleavedPass.run, RegionPass.forward = self._originals  # type: ignore[method-assign]


def fit_counted(model: str, schedule: Any, free_bytes: int | None) -> dict[str, Any]:
    """Runs on every rank."""
    original = lightning_fxpipe.runtime.schedule_choice.memory_for_rank
    lightning_fxpipe.runtime.schedule_choice.memory_for_rank = lambda device, num_ranks: free_bytes
    try:
        with Passes() as passes:
            strategy = FxPipeStrategy(schedule=schedule, num_microbatches=4)
            found = fit_and_record(model, strategy=strategy, devices=2)
    finally:
        lightning_fxpipe.runtime.schedule_choice.memory_for_rank = original
    return found | {"passes": (passes.by_turns, passes.forward)}


@pytest.mark.parametrize(
    ("schedule", "free_bytes", "passes"),
    [("1f1b", None, (10, 0)), ("auto", 10, (10, 0)), ("auto", 2**40, (0, 10)), ("gpipe", 10, (0, 10))],
)
def test_which_batches_go_by_turns(ranks: Ranks, schedule: str, free_bytes: int | None, passes: tuple[int, int]) -> None:
    """Ten batches, the first one too: were it to go as with GPipe, it would take the memory that 1F1B is to spare."""
    expected = fit_and_record("gpt")
    for found in ranks(2).run(fit_counted, "gpt", schedule, free_bytes):
        assert found["passes"] == passes
        assert found["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
        for fqn, value in found["state"].items():
            torch.testing.assert_close(value, expected["state"][fqn], rtol=0, atol=TOLERANCE, msg=fqn)


class InBatch(LitModel):
    """A loss that compares samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = torch.nn.functional.normalize(self.model(batch[0]).flatten(1))
        return torch.nn.functional.cross_entropy(found @ found.T, torch.arange(len(found)))


def fit_in_batch(free_bytes: int) -> dict[str, Any]:
    """Runs on every rank."""
    original = lightning_fxpipe.runtime.schedule_choice.memory_for_rank
    lightning_fxpipe.runtime.schedule_choice.memory_for_rank = lambda device, num_ranks: free_bytes
    module = InBatch("mlp")
    trainer = make_trainer(strategy=FxPipeStrategy(num_microbatches=4), devices=2, max_epochs=1, limit_val_batches=0)
    try:
        with Passes() as passes, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            trainer.fit(module, make_loader("mlp"))
    finally:
        lightning_fxpipe.runtime.schedule_choice.memory_for_rank = original
    return {
        "passes": (passes.by_turns, passes.forward),
        "state": module.state_dict(),
        "warned": [
            str(one.message) for one in warned if ("the loss does not decompose into microbatch losses") in str(one.message)
        ],
    }


def test_auto_trains_a_loss_that_does_not_allow_it_as_gpipe_does(ranks: Ranks) -> None:
    module = InBatch("mlp")
    make_trainer(max_epochs=1, limit_val_batches=0).fit(module, make_loader("mlp"))
    last, first = ranks(2).run(fit_in_batch, 10)
    assert last["passes"] == first["passes"] == (0, 5)
    assert len(last["warned"]) == 1
    for found in (last, first):
        torch.testing.assert_close(found["state"], module.state_dict(), rtol=0, atol=TOLERANCE)


class CountsPositions(torch.nn.Module):
    """Its result has a size in it, which varies."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.token = torch.nn.Embedding(11, 8)
        self.blocks = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)))

    def forward(self, ids: Tensor) -> tuple[Tensor, int]:
        return self.blocks(self.token(ids)), ids.shape[1]


class OfLengths(LitModel):
    def __init__(self) -> None:
        super().__init__("mlp")
        self.model = CountsPositions()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found, num_positions = self.model(batch)
        return (found.sum(dim=(1, 2)) / num_positions).square().mean()


def fit_of_lengths(**options: Any) -> dict[str, Tensor]:
    """Runs on one device, or on every rank."""
    torch.manual_seed(3)
    module = OfLengths()
    loader = DataLoader([torch.randint(0, 11, (8, length)) for length in (5, 7, 6, 5)], batch_size=None)
    make_trainer(max_epochs=1, limit_val_batches=0, **options).fit(module, loader)
    return module.state_dict()


def fit_of_lengths_by_turns() -> dict[str, Tensor]:
    """Runs on every rank."""
    return fit_of_lengths(strategy=FxPipeStrategy(schedule="1f1b", num_microbatches=4), devices=2)


def test_sizes_that_the_model_returns_are_those_of_the_batch(ranks: Ranks) -> None:
    """A size that varies is a symbol in the trace, which gets its value in the runs for single microbatches, too."""
    expected = fit_of_lengths()
    for found in ranks(2).run(fit_of_lengths_by_turns):
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
