"""Autocast makes its copies of weights once for all microbatches, as many as on one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy
from lightning_fxpipe.stages.shared_casts import sharing_casts
from tests.lit import make_trainer

CPU = torch.device("cpu")
WIDTH = 13  # of nothing but weights


class Casts(TorchDispatchMode):
    """Counts copies of weights in the lower precision."""

    def __init__(self) -> None:
        super().__init__()
        self.num_casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16:
            self.num_casts += tuple(args[0].shape) == (WIDTH, WIDTH) and type(args[0]) in (Tensor, nn.Parameter)
        return func(*args, **kwargs)


@contextmanager
def as_lightning_does() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        yield


def test_calls_under_contexts_of_their_own_share_a_copy() -> None:
    layer, x = nn.Linear(WIDTH, WIDTH), torch.ones(2, WIDTH)
    with Casts() as casts, sharing_casts(CPU):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                layer(x)
    assert casts.num_casts == 1


def test_autocast_is_as_it_was_in_the_block_and_after_it() -> None:
    with sharing_casts(CPU):
        assert not torch.is_autocast_enabled("cpu")
    with as_lightning_does():
        with sharing_casts(CPU):
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()


def test_nothing_is_kept_behind_the_block() -> None:
    layer, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.ones(2, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        with sharing_casts(CPU):
            layer(x)
        with torch.no_grad():
            layer.weight.zero_()
        assert not layer(x).any()


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).float().pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Noting(L.Callback):
    """Notes how many copies there have been, when a batch begins."""

    def __init__(self, casts: Casts, noted: list[int]) -> None:
        self._read = lambda: casts.num_casts
        self._note = noted.append

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self._note(self._read())


def copies_in_a_batch(**place: Any) -> list[int]:
    noted: list[int] = []
    loader = DataLoader(TensorDataset(torch.randn(48, WIDTH)), batch_size=8)
    with Casts() as casts:
        make_trainer(max_epochs=1, precision="bf16-mixed", callbacks=[Noting(casts, noted)], **place).fit(Lit(), loader)
    # In the first two batches stages are tried.
    return [later - earlier for earlier, later in zip(noted[2:], noted[3:], strict=False)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "v_half"])
def test_a_batch_makes_as_many_copies_as_on_one_device(schedule: str) -> None:
    pipeline = FxPipeStrategy(num_stages=2, num_microbatches=4, schedule=schedule)
    assert copies_in_a_batch(strategy=pipeline) == copies_in_a_batch() == [4, 4, 4]
