"""A canary for each private name of Lightning's loops that the package uses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_fxpipe._compat import loops
from tests.lit import make_trainer


class Counted(L.LightningModule):
    """Keeps the batches that its steps get."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[float] = []
        self.asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return loader()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(float(batch[0][0]))
        return self.layer(batch[0]).sum()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(float(batch[0][0]))

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(10.0).unsqueeze(1)), batch_size=4)


class Peek(L.Callback):
    """Sets up a loop before the run, as the strategy does, and hands it over."""

    def __init__(self) -> None:
        self.item: Any = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        loop = loops.loop_of_run(trainer)
        assert loops.has_loaders(loop)
        self.hook = loops.loader_hook(loop)

        def begin() -> None:
            if self.item is None:
                loops.begin_loader(combined)
                loops.set_epoch(loop, combined)
                self.item = loops.next_of_loader(combined)
            loops.renew_limits(combined)

        def advance() -> Any:
            loops.unwatch_loader(combined)
            return self.item

        def request(own: Callable[[], Any]) -> Any:
            nonlocal combined
            combined = loops.as_combined(loop, own())
            loops.watch_loader(combined, begin, advance)
            return combined

        combined: Any = None
        before = {name: id(value) for name, value in vars(loop).items()}
        made = loops.SetUpLoop(loop, request)
        assert made.combined is combined
        assert {name: id(value) for name, value in vars(loop).items()} == before
        assert loops.loaders_of(trainer) == {}
        with made.shown():
            assert list(loops.loaders_of(trainer).values()) == [combined.iterables]
            assert trainer.state.fn != "fit" or trainer.num_training_batches == 3

        def hand_over() -> None:
            del loop.setup_data
            assert not made.hand_over()
            made.begin()

        loop.setup_data = hand_over


@pytest.mark.parametrize("method", ["fit", "validate", "test", "predict"])
def test_a_loop_gets_the_batch_that_was_taken_before_the_run(method: str) -> None:
    module, peek = Counted(), Peek()
    stream = itertools.chain([loader()])  # of which iterators would be made anew
    getattr(make_trainer(max_epochs=1, num_sanity_val_steps=0, callbacks=[peek]), method)(module, *stream)
    assert module.seen == [0.0, 4.0, 8.0]
    assert peek.item[1:] == (0, 0)
    assert peek.hook is None


def test_a_hook_for_dataloaders_is_asked_once() -> None:
    module, peek = Counted(), Peek()
    make_trainer(max_epochs=1, callbacks=[peek]).fit(module)
    assert peek.hook == (module, "train_dataloader")
    assert (module.asked, module.seen) == (1, [0.0, 4.0, 8.0])


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size", "sequential"])
def test_the_loader_of_several_can_be_watched_in_each_mode(mode: Any) -> None:
    combined, kind = CombinedLoader({"a": [1, 2], "b": [3]}, mode), CombinedLoader
    plain = list(combined)
    loops.watch_loader(combined, lambda: loops.begin_loader(combined), lambda: loops.next_of_loader(combined))
    assert list(combined) == plain
    loops.unwatch_loader(combined)
    assert type(combined) is kind
    assert list(combined) == plain


def test_samplers_hear_of_the_epoch() -> None:
    data = TensorDataset(torch.arange(4.0))
    sampler: Any = DistributedSampler(data, 1, 0)
    trainer = make_trainer()
    trainer.fit_loop.epoch_progress.current.processed = 3
    loops.set_epoch(trainer.fit_loop, CombinedLoader([DataLoader(data, sampler=sampler)]))
    assert sampler.epoch == 3


def test_first_loader_batch_is_what_training_begins_with() -> None:
    batch = loops.first_loader_batch({"a": loader(), "b": [loader()]})
    assert batch["a"][0].tolist() == batch["b"][0][0].tolist() == [[0.0], [1.0], [2.0], [3.0]]
