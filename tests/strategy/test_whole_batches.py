"""Models that need the whole batch: layers of its size, which part of it cannot be traced with, and sizes that follow from its
values.
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fxpipe import FxPipeStrategy, make_plan
from tests.lit import Recorder, make_trainer

WIDTH, NUM_SAMPLES = 8, 4


class AcrossSamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(NUM_SAMPLES, NUM_SAMPLES), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.mix(x.T).T)


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.mixes = nn.ModuleList(AcrossSamples() for _ in range(2))

    def forward(self, batch: Any) -> Tensor:
        x = self.first(batch["x"])
        for layer in self.mixes:
            x = layer(x)
        return self.last(x).squeeze(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch) - batch["y"]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MixesItself(Model):
    """The forward that is cut has the layer: it cannot be traced with fewer samples."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(NUM_SAMPLES, NUM_SAMPLES)

    def forward(self, batch: Any) -> Tensor:
        return self.last(self.mix(self.first(batch["x"]).T).T.tanh()).squeeze(-1)


class AddsItsState(Model):
    """The step adds what the last batch has left: that is as long as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(NUM_SAMPLES, WIDTH)

    def forward(self, batch: Any) -> Tensor:
        hidden = self.first(batch["x"] + self.state).tanh()
        return self.last(hidden).squeeze(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"][torch.from_numpy(np.argsort(torch.nonzero(batch["x"][:, 0] > -9).squeeze(-1).numpy()))]
        self.state = x.detach() / 2
        return super().training_step(batch | {"x": x + self.state}, batch_idx)


class Pools(nn.Module):
    """Writes a result into the dict that it gets, as long as the last of the groups says."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        num_groups = int(batch["group"][-1]) + 1
        batch["pooled"] = torch.zeros(num_groups, 1).index_add(0, batch["group"], self.out(batch["hidden"])).squeeze(-1)
        return batch


class PoolsGroups(Model):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.pool = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), Pools()

    def forward(self, batch: Any) -> Tensor:
        batch["hidden"] = self.body(batch["x"])
        return self.pool(batch)["pooled"]


def _batches(kind: type[Model], num_batches: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def batch(number: int) -> dict[str, Tensor]:
        num_rows = 6 + 2 * number if kind is PoolsGroups else NUM_SAMPLES
        x, y = torch.randn(num_rows, WIDTH, generator=generator), torch.randn(num_rows, generator=generator)
        return {"x": x, "y": y[::2], "group": torch.arange(num_rows) // 2} if kind is PoolsGroups else {"x": x, "y": y}

    return [batch(number) for number in range(num_batches)]


def _fit(kind: type[Model], **options: Any) -> tuple[Model, Recorder]:
    module, recorder = kind(), Recorder()
    loader = DataLoader(_batches(kind), batch_size=None)  # type: ignore[arg-type]
    make_trainer(max_epochs=2, callbacks=[recorder], **options).fit(module, loader)
    return module, recorder


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Model, {"num_microbatches": 2}),
        (Model, {"num_microbatches": 2, "schedule": "1f1b"}),
        (MixesItself, {"num_microbatches": 2}),
        (AddsItsState, {"num_microbatches": 2}),
        (PoolsGroups, {"num_microbatches": 1}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*single microbatch")
def test_steps_equal_one_device(kind: type[Model], options: dict[str, Any]) -> None:
    """Layers of the size of the batch were refused, as the plan was made with a microbatch."""
    module, recorder = _fit(kind, strategy=FxPipeStrategy(num_stages=2, **options))
    alone, of_one = _fit(kind)
    torch.testing.assert_close(recorder.losses, of_one.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(recorder.gradients, of_one.gradients, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(module.state_dict(), alone.state_dict(), rtol=1e-4, atol=1e-6)


def test_what_is_said_is_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(record=True) as caught, caplog.at_level("INFO", "lightning_fxpipe"):
        warnings.simplefilter("always")
        _fit(Model, strategy=FxPipeStrategy(num_stages=2, num_microbatches=2))
    said = [str(warning.message) for warning in caught]
    assert any("The training_step runs each batch as a single microbatch" in text for text in said)
    assert not any("BatchNorm" in text for text in said)  # they see the whole batch
    assert "1 microbatch of 4 samples" in caplog.text


def test_a_plan_is_made_of_the_whole_batch_where_part_of_it_cannot_be_traced() -> None:
    (batch, *_) = _batches(Model)
    plan = make_plan(Model(), batch, num_stages=2, num_microbatches=2)
    assert plan.microbatch_size == NUM_SAMPLES
    assert not plan.joint_reason


def test_an_error_that_the_whole_batch_has_too_is_told_of_that() -> None:
    class Fails(Model):
        def forward(self, batch: Any) -> Tensor:
            raise KeyError(f"{len(batch['x'])} samples")

    (batch, *_) = _batches(Model)
    with pytest.raises(Exception, match="4 samples"):
        make_plan(Fails(), batch, num_stages=2, num_microbatches=2)
