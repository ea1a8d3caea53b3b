"""Tables and masks that a block makes in its first call, and perhaps again for a longer sequence, on itself."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fxpipe import FxPipeStrategy
from tests.lit import make_trainer

WIDTH = 6


class Turned(nn.Module):
    """Attention with a table of positions that it makes when it first needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table: Any = None

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x) * self.positions(x.shape[1])
        return x + torch.softmax(q @ q.transpose(1, 2), -1) @ self.v(x)  # type: ignore[no-any-return]

    def positions(self, length: int) -> Tensor:
        """The table's part for a sequence."""
        if self.table is None or len(self.table) < length:
            self.table = torch.cos(torch.arange(length)[:, None] * torch.arange(WIDTH))
        return self.table[:length]  # type: ignore[no-any-return]


class InABuffer(Turned):
    def __init__(self) -> None:
        super().__init__()
        del self.table
        self.register_buffer("table", None, persistent=False)


class Tabled(L.LightningModule):
    def __init__(self, block: type[Turned]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(block(), block())
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.layers(batch) - 1).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append((float(self.trainer.callback_metrics["loss"]), len(self.layers[0].table)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class UsedByTheStep(Tabled):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.layers(batch) * self.layers[0].positions(batch.shape[1]) - 1).square().mean()
        self.log("loss", loss)
        return loss


def fit(module: Tabled, lengths: tuple[int, ...], **options: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    data = DataLoader([torch.randn(4, length, WIDTH, generator=generator) for length in lengths], batch_size=None)
    make_trainer(max_epochs=2, num_sanity_val_steps=0, **options).fit(module, data)
    return {"seen": module.seen, **module.state_dict()}


@pytest.mark.parametrize("lengths", [(4, 4, 4, 4), (3, 3, 5, 5, 4)], ids=["once", "grows"])
@pytest.mark.parametrize("block", [Turned, InABuffer])
@pytest.mark.parametrize("kind", [Tabled, UsedByTheStep])
def test_a_table_that_a_block_fills_once_is_that_of_one_device(
    kind: type[Tabled], block: type[Turned], lengths: tuple[int, ...]
) -> None:
    """It was a result of the block's call while it was new: the trace, looked at again, had calls that were not made any more.

    The last block's was also set on the module that was recorded, which has none.
    """
    here, there = kind(block), kind(block)
    strategy = FxPipeStrategy(num_stages=2, num_microbatches=2)
    torch.testing.assert_close(fit(there, lengths, strategy=strategy), fit(here, lengths), rtol=1e-5, atol=1e-6)
    assert "table" not in vars(there)
    assert "table" not in vars(there.layers)
