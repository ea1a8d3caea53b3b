"""What a batch has needed is given back when its step is over; Python's search for cycles may be long in coming."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from torch import Tensor, nn

from lightning_fxpipe import FxPipeStrategy
from tests.lit import make_trainer
from tests.livebytes import LiveBytes, without_garbage
from tests.ranks.pool import RankPool
from tests.ranks.runs import Net

Ranks = Callable[[int], RankPool]
WIDTH = 64  # of weights that nothing else is as large as
NUM_CLASSES = 23  # nor has results as large


class Wide(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, NUM_CLASSES))


class Counts(L.Callback):
    """Counts the tensors that are as wide as the model after each batch: weights, gradients, activations."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and not each.is_meta]
        self.found.append(len({each.untyped_storage().data_ptr() for each in tensors if WIDTH in each.shape}))


class Results(L.Callback):
    """Counts the samples of which there are results of the model when the backward pass begins."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_before_backward(self, *args: Any) -> None:
        results = [
            each for each in gc.get_objects() if type(each) is Tensor and each.dim() == 2 and each.shape[1] == NUM_CLASSES
        ]
        self.found.append(sum({each.untyped_storage().data_ptr(): len(each) for each in results}.values()))


def count(counts: Any, schedule: Any) -> list[int]:
    """Runs on every rank."""
    torch.manual_seed(1)
    strategy = FxPipeStrategy(num_microbatches=4, schedule=schedule)
    trainer = make_trainer(max_epochs=2, limit_val_batches=0, strategy=strategy, devices=2, callbacks=[counts])
    with without_garbage():
        trainer.fit(Wide())
    return counts.found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_no_batch_is_kept(ranks: Ranks, schedule: str) -> None:
    """An exception that ends a stage's step keeps the frames that it came through while somebody has it, and these their
    tensors; a hook that gives autograd the very result of an operation keeps both for ever."""
    for found in ranks(2).run(count, Counts(), schedule):
        assert len(found) == 12
        assert max(found[:5]) <= found[0], found
        assert max(found[6:]) <= found[6], found  # the first epoch's last batch is smaller, and has buffers of its own


def test_results_of_microbatches_are_not_kept(ranks: Ranks) -> None:
    """A microbatch's results are copied to their place in the batch's as they come; its backward pass needs their graph only.
    The batch's are the step's own, and gone when it has made a loss of them."""
    found, _ = ranks(2).run(count, Results(), "gpipe")  # rank 0 has the last stage
    assert found[1:5] == [0] * 4, found  # after the first batch, which is looked at more closely


# ------------------------------------------------------------------ the peak of a step


@contextmanager
def measured_batches() -> Iterator[list[tuple[int, int]]]:
    """For each training batch in the block, the bytes of tensors when it begins, and the most while it runs."""
    found: list[tuple[int, int]] = []
    run = _AutomaticOptimization.run

    def measured(self: Any, *args: Any) -> Any:
        live = LiveBytes()
        start = live.now
        with live:
            result = run(self, *args)
        found.append((start, live.peak))
        return result

    _AutomaticOptimization.run = measured  # type: ignore[method-assign]
    try:
        yield found
    finally:
        _AutomaticOptimization.run = run  # type: ignore[method-assign]


class Square(Wide):
    """Weights that take much more than what is computed with them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 128), *(nn.Linear(128, 128) for _ in range(6)))
        self.head = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)), nn.Linear(128, NUM_CLASSES))


def peaks(kind: type[L.LightningModule], schedule: Any, **options: Any) -> tuple[list[tuple[int, int]], int]:
    """Runs on every rank: the bytes for each batch, and those of the rank's parameters."""
    torch.manual_seed(1)
    strategy = FxPipeStrategy(num_microbatches=4, schedule=schedule, gather_after_run=False)
    trainer = make_trainer(max_epochs=1, limit_val_batches=0, strategy=strategy, devices=2, **options)
    with without_garbage(), measured_batches() as found:
        module = kind()
        trainer.fit(module)
    return found, sum(p.numel() * p.element_size() for p in module.parameters() if not p.is_meta)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gradients_are_there_once(ranks: Ranks, schedule: str) -> None:
    """Lightning sets those of the batch before to zero when the step has run; with 1F1B the new ones were there by then."""
    for found, num_bytes in ranks(2).run(peaks, Square, schedule):
        assert len(found) == 6
        for start, peak in found[1:]:
            assert peak - start < num_bytes / 2, (start, peak, num_bytes)  # a microbatch's own, of one layer after the other
