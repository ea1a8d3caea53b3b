"""Steps with a block, a generator or a batch that few have: equal to one device, or refused by name before the first step."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeError, FxPipeStrategy, UnsupportedError
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


class Scaled(nn.Module):
    def __init__(self, settings: SimpleNamespace) -> None:
        super().__init__()
        self.linear, self.settings = nn.Linear(WIDTH, WIDTH), settings

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.settings.scale  # type: ignore[no-any-return]


class SetsForAll(Odd):
    """Sets something for all its layers before it calls the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = SimpleNamespace(scale=1.0)
        self.layers = nn.Sequential(*(Scaled(self.settings) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        self.settings.scale = 2.0 if self.training else 0.5
        return self.layers(x)  # type: ignore[no-any-return]


class Compares(Odd):
    """Compares with what it gives without gradients for other inputs."""

    without_gradients: Any = torch.no_grad

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self.without_gradients():
            reference = self(batch[0])
        loss = (self(batch[0] + 0.1) - 0.5 * reference.clone()).square().mean()
        self.log("loss", loss)
        return loss


class Infers(Compares):
    without_gradients = torch.inference_mode


class InfersInside(Odd):
    """Its layers change in place what they have made in an inference mode."""

    class _Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                scale = torch.arange(WIDTH) / WIDTH
                scale.mul_(2)
            return super().forward(x) * scale.clone()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(self._Layer(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))


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


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("kind", [Compares, Infers, InfersInside])
def test_calls_without_gradients_are_those_of_one_device(kind: type[Odd], schedule: Any) -> None:
    """The call that begins the pipeline may lie in an inference mode: its stages ran in it, too. With 1F1B, which looks at what
    the loss does, the step's calls were compared with those under other modes.
    """
    expected = fit(kind(), samples(16))
    found = fit(kind(), samples(16), strategy=FxPipeStrategy(num_stages=2, num_microbatches=2, schedule=schedule))
    torch.testing.assert_close(found, expected)


def test_what_a_forward_sets_before_its_first_layer_is_refused() -> None:
    """The layers' stages do not run that code: they would have what the constructor has left."""
    with pytest.raises(FxPipeError, match="Modules exchange a value through a shared object"):
        fit(SetsForAll(), samples(16), strategy=FxPipeStrategy(num_stages=2, num_microbatches=2, balance="flops"))
