"""Steps with a block, a generator or a batch that few have: equal to one device, or refused by name before the first step."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeStrategy, UnsupportedError
from tests.lit import make_trainer

WIDTH = 6


class Odd(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.generator = torch.Generator().manual_seed(4)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnGenerator(Odd):
    """Draws between its layers from a generator of its own, numbers that no argument of the call tells."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[:2](x))
        return self.layers[2:](x + torch.randn(WIDTH, generator=self.generator))  # type: ignore[no-any-return]


class Cached(Odd):
    """Computes parametrized weights once for a block, which a stage's microbatches would share."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            nn.utils.parametrizations.orthogonal(layer)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with parametrize.cached():
            return super().training_step(batch, batch_idx)


class Pairs(Odd):
    """Has labelled and unlabelled samples, of which the last batch of an epoch has different numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(torch.cat([batch["labelled"][0], batch["unlabelled"][0]])).square().mean()  # type: ignore[no-any-return]


def samples(count: int, batch_size: int = 4) -> Any:
    data = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))
    return DataLoader(TensorDataset(data), batch_size)


def fit(module: Odd, data: Any, **options: Any) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(max_epochs=2, **options).fit(module, data)
    return {fqn: value.clone() for fqn, value in module.state_dict().items()}


def staged() -> FxPipeStrategy:
    return FxPipeStrategy(num_stages=2, num_microbatches=2)


def test_a_forward_may_draw_from_a_generator_of_its_own() -> None:
    """The code of a stage had the generator's name in words, which is no Python."""
    expected = fit(OwnGenerator(), samples(16))
    torch.testing.assert_close(fit(OwnGenerator(), samples(16), strategy=staged()), expected)


def test_weights_that_are_cached_around_the_call_are_refused() -> None:
    """The losses were others, with several microbatches."""
    with pytest.raises(UnsupportedError, match=r"A block of torch\.nn\.utils\.parametrize\.cached\(\) is around a call"):
        fit(Cached(), samples(16), strategy=FxPipeStrategy(num_stages=2, num_microbatches=2, balance="flops"))


def test_a_later_batch_that_cannot_be_split_runs_whole() -> None:
    """It ended the run, where the number of microbatches was given."""

    def data() -> Any:
        return CombinedLoader({"labelled": samples(14), "unlabelled": samples(16)}, "max_size_cycle")

    expected = fit(Pairs(), data())
    torch.testing.assert_close(fit(Pairs(), data(), strategy=staged()), expected)
