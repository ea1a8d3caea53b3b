"""Models whose own Python looks at values: lengths of sequences, masks, what a part of the model has computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo.steps_case import CLASSES, DIM, WIDTH, Case, Sgd, cross_entropy, generator, labelled, mlp


def sequences(*longest: int) -> list[Any]:
    """Batches of padded sequences, with their lengths; the longest is as long as told, and a class for each."""
    g = generator()
    batches = []
    for most in longest or (7, 7, 5):
        lengths = torch.randint(2, most + 1, (4,), generator=g)
        lengths[int(torch.randint(4, (), generator=g))] = most
        batches.append((torch.randn(4, 7, DIM, generator=g), lengths, torch.randint(CLASSES, (4,), generator=g)))
    return batches


class Sequences(Sgd):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, lengths, y = batch
        return cross_entropy(self(x, lengths), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, lengths, y = batch
        self.log("val_loss", cross_entropy(self(x, lengths), y))


class CutToTheLongest(Sequences):
    """The LightningModule's own forward cuts the padding off and makes the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(DIM, 8), nn.Linear(8, CLASSES)
        layer = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)]
        self.layers = nn.ModuleList(layer)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        longest = int(lengths.max())
        mask = torch.arange(longest, device=x.device)[None] >= lengths[:, None]
        hidden = self.embed(x[:, :longest])
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=mask)
        return self.head(hidden.masked_fill(mask[..., None], 0).sum(1) / lengths[:, None])


class CutByTensor(CutToTheLongest):
    """As before, with tensors for sizes, and with ``if tensor:``."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(lengths.max())[None] >= lengths[:, None]
        hidden = self.embed(x[:, : lengths.max()])
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=mask if mask.any() else None)
        return self.head(hidden.masked_fill(mask[..., None], 0).sum(1) / lengths[:, None])


class CutInside(Sequences):
    """The same in a module of its own, which is all that the LightningModule has."""

    def __init__(self) -> None:
        super().__init__()
        self.model = CutToTheLongest()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.model(x, lengths)


class Packed(Sequences):
    """Packed sequences, whose sizes are those of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = mlp(DIM, WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = mlp(WIDTH, WIDTH, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(hidden.sum(1))


class PackedInside(Sequences):
    def __init__(self) -> None:
        super().__init__()
        self.model = Packed()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.model(x, lengths)


class MeansOfRows(Sequences):
    """A loop over the samples, each with its own length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(DIM, WIDTH, WIDTH), mlp(WIDTH, WIDTH, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(torch.stack([row[:length].mean(0) for row, length in zip(hidden, lengths.tolist(), strict=True)]))


class ChecksItself(Sgd):
    """Looks at what its first part has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(DIM, WIDTH, WIDTH), mlp(WIDTH, WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if torch.isnan(hidden).any():
            raise ValueError("not a number")
        return self.second(hidden * 2 if hidden.mean().item() > 0 else hidden)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", functional.cross_entropy(self(batch[0]), batch[1]))


VALIDATE = ("validate",)

CASES: dict[str, Case] = {
    "cut_to_the_longest": Case(make=CutToTheLongest, batches=sequences, microbatches=(1, 2), evaluations=VALIDATE),
    "cut_to_the_longest_in_three": Case(make=CutToTheLongest, batches=sequences, microbatches=(2,), stages=3),
    "cut_by_tensor": Case(make=CutByTensor, batches=sequences, microbatches=(1, 2), evaluations=VALIDATE),
    "cut_inside": Case(make=CutInside, batches=sequences, microbatches=(1, 2), evaluations=VALIDATE),
    "packed": Case(make=Packed, batches=sequences, microbatches=(1, 2), evaluations=VALIDATE),
    "packed_inside": Case(make=PackedInside, batches=sequences, microbatches=(1, 2), evaluations=VALIDATE),
    "means_of_rows": Case(make=MeansOfRows, batches=sequences, microbatches=(1,), evaluations=VALIDATE),
    "checks_itself": Case(make=ChecksItself, batches=labelled, microbatches=(1, 2), evaluations=VALIDATE),
}
