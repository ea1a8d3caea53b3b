"""Recurrent layers train and validate as on one device, on padded sequences and on packed ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go

Ranks = Callable[[int], RankPool]


class Tagger(nn.Module):
    """Four positions of three numbers; the layer is on the first stage, so that rank 0 has only placeholders of its weights."""

    def __init__(self, layer: type[nn.RNNBase], total_length: int | None, by_state: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 6)
        self.layer = layer(6, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(6)), nn.Linear(12, 5))
        self.total_length, self.by_state = total_length, by_state

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        h = self.embed(x.view(len(x), 4, 3)).relu()
        if lengths is None:
            return self.head(self.layer(h)[0].mean(1))
        packed = pack_padded_sequence(h, lengths.cpu(), batch_first=True, enforce_sorted=False)
        output, state = self.layer(packed)
        if self.by_state:
            last = state[0] if isinstance(state, tuple) else state
            return self.head(last[-2:].transpose(0, 1).flatten(1))
        padded, _ = pad_packed_sequence(output, batch_first=True, total_length=self.total_length)
        return self.head(padded.sum(1) / lengths[:, None])


class Padded(Net):
    def __init__(self, layer: type[nn.RNNBase] = nn.LSTM, total_length: int | None = None, by_state: bool = False) -> None:
        super().__init__()
        del self.backbone, self.head
        self.model = Tagger(layer, total_length, by_state)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class Packed(Padded):
    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0], batch[1] % 4 + 1), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


RUNS: dict[str, Run] = {
    "padded": Run(module=Padded),
    "packed": Run(module=Packed, strategy={"num_microbatches": 1}),
    "packed, cut": Run(module=lambda: Packed(nn.GRU)),  # its batches run as one microbatch, with a warning
    "total length": Run(module=lambda: Packed(total_length=4), strategy={"num_microbatches": 1}),
    "by state": Run(module=lambda: Packed(by_state=True), strategy={"num_microbatches": 1}),
    "by state of a GRU": Run(module=lambda: Packed(nn.GRU, by_state=True), strategy={"num_microbatches": 1}),
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    return go(RUNS[name], Path(folder) / f"{name}{stages}", stages)


OFTEN = ["padded", "packed"]
SELDOM = [pytest.param([name], marks=pytest.mark.slow, id=name) for name in sorted(RUNS.keys() - set(OFTEN))]


@pytest.mark.parametrize("names", [pytest.param(OFTEN, id="some"), *SELDOM])
def test_recurrent_layers_are_those_of_one_device(ranks: Ranks, tmp_path: Path, names: list[str]) -> None:
    compare(ranks, do, names, tmp_path, 2)
