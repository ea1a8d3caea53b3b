"""Ordinary steps whose batches come in other shapes each time: padded text, images of all sizes, small and single batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.steps_case import CLASSES, DIM, WIDTH, Case, Sgd, cross_entropy, generator, labelled, mlp
from tests.zoo.steps_models import Classifies

VOCABULARY, LONGEST = 11, 16


def texts(*shapes: tuple[int, int]) -> list[Any]:
    """Batches of (token numbers, classes)."""
    g = generator()
    return [(torch.randint(1, VOCABULARY, s, generator=g), torch.randint(CLASSES, s[:1], generator=g)) for s in shapes]


def padded_texts(*shapes: tuple[int, int]) -> list[Any]:
    """As a tokenizer makes them: token numbers with a mask of what is no padding, and names of the samples."""
    batches = []
    for number, (ids, labels) in enumerate(texts(*shapes)):
        lengths = torch.randint(2, ids.shape[1] + 1, ids.shape[:1], generator=generator())
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        names = [f"sample {number}-{index}" for index in range(len(ids))]
        batches.append({"ids": ids * mask, "mask": mask, "labels": labels, "names": names})
    return batches


def images(*shapes: tuple[int, int, int]) -> list[Any]:
    """Batches of (images of two channels, classes)."""
    g = generator()
    return [(torch.randn(n, 2, h, w, generator=g), torch.randint(CLASSES, (n,), generator=g)) for n, h, w in shapes]


def pairs(*shapes: tuple[int, int, int]) -> list[Any]:
    """Batches of (token numbers, token numbers of another length)."""
    g = generator()
    return [
        (torch.randint(VOCABULARY, (n, s), generator=g), torch.randint(VOCABULARY, (n, t), generator=g)) for n, s, t in shapes
    ]


class Reads(nn.Module):
    """A recurrent text classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = mlp(WIDTH, WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(ids))
        return self.head(hidden.mean(dim=1))


class Attends(nn.Module):
    """A text classifier with attention, positions that are a slice of a table, and a mask of the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(LONGEST, 8))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.embedding(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            h = block(h, src_key_padding_mask=~mask)
        h = h * mask.unsqueeze(-1)
        return self.head(h.sum(dim=1) / mask.sum(dim=1, keepdim=True))


class AttendsToTexts(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.model = Attends()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.model(batch["ids"], batch["mask"]), batch["labels"])


class NextToken(Sgd):
    """A language model: the step shifts the tokens, so that the model gets one less than the batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), mlp(WIDTH, WIDTH, WIDTH, VOCABULARY))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, _ = batch
        return cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


class Looks(nn.Module):
    """A convolutional network for images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.body = nn.Sequential(nn.Conv2d(6, 6, 3, stride=2, padding=1), nn.GroupNorm(2, 6), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(self.stem(x))
        h = F.interpolate(h, scale_factor=2.0) + F.adaptive_max_pool2d(h, 1)
        return self.head(self.pool(h).flatten(1))


class Unrolled(nn.Module):
    """A recurrent cell in a loop over the length: a graph for each length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = mlp(WIDTH, WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        state = h.new_zeros(len(h), WIDTH)
        for position in range(h.shape[1]):
            state = self.cell(h[:, position], state)
        return self.head(state)


class LongestIsSpecial(nn.Module):
    """The longest batches take another path."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LONGEST, WIDTH))
        self.head = mlp(WIDTH, WIDTH, WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        h = h + self.positions if ids.shape[1] == LONGEST else h + self.positions[: ids.shape[1]].tanh()
        return self.head(h.mean(dim=1))


class Translates(Sgd):
    """The step calls an encoder and then a decoder, on two lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), mlp(WIDTH, WIDTH, WIDTH))
        self.decoder = nn.Embedding(VOCABULARY, WIDTH)
        self.head = mlp(WIDTH, WIDTH, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        source, target = batch
        memory, queries = self.encoder(source), self.decoder(target[:, :-1])
        weights = (queries @ memory.transpose(1, 2)).softmax(dim=-1)
        return cross_entropy(self.head(weights @ memory + queries).flatten(0, 1), target[:, 1:].flatten())


class GetsLengths(nn.Module):
    """Gets the lengths as plain numbers, as for packing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = mlp(WIDTH, WIDTH, CLASSES)

    def forward(self, ids: Tensor, longest: int) -> Tensor:
        return self.head(self.embedding(ids)[:, :longest].mean(dim=1))


class PassesLengths(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.model = GetsLengths()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.model(batch["ids"], max(batch["lengths"])), batch["labels"])


def with_lengths(*longest: int) -> list[Any]:
    """The same shape each time, with other lengths; the first of each microbatch of four is the longest."""
    return [
        {"ids": ids, "labels": labels, "lengths": [length, 2, 2, 2] * 2}
        for length, (ids, labels) in zip(longest, texts(*[(8, 9)] * len(longest)), strict=True)
    ]


def classifies(make: Callable[[], nn.Module]) -> Callable[[], Classifies]:
    return lambda: Classifies(make())


LENGTHS = ((8, 7), (8, 12), (8, 5), (8, 9), (8, 16), (8, 3))


# `traces`: the first shape, then all others of which something varies; a microbatch of one sample has a trace of its own.
class TimeFirstBatch(Sgd):
    """The batch has (time, batch, features), a temperature, and labels of shape (batch,); the step draws noise of its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(DIM, WIDTH, num_layers=2), mlp(WIDTH, WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0].mean(dim=0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noisy = batch["x"] + 0.1 * torch.randn_like(batch["x"]) + 0.1 * torch.rand(batch["x"].shape)
        loss = cross_entropy(self(noisy) / batch["temperature"], batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        states = self.gru(batch["x"])[0]
        return {"states": states, "classes": self.head(states.mean(dim=0)).argmax(1)}


def time_first(*shapes: tuple[int, int]) -> list[Any]:
    g = generator()
    return [
        {
            "x": torch.randn(length, n, DIM, generator=g),
            "y": torch.randint(CLASSES, (n,), generator=g),
            "temperature": torch.tensor(0.7),
        }
        for length, n in shapes
    ]


CASES: dict[str, Case] = {
    "text_recurrent": Case(make=classifies(Reads), batches=lambda: texts(*LENGTHS), traces=2),
    "text_attention": Case(make=AttendsToTexts, batches=lambda: padded_texts(*LENGTHS), traces=2),
    "text_shifted": Case(make=NextToken, batches=lambda: texts(*LENGTHS), traces=2),
    "text_length_equals_batch": Case(
        make=AttendsToTexts, batches=lambda: padded_texts((8, 8), (6, 6), (8, 5), (4, 9), (8, 4)), microbatches=(2,), traces=2
    ),
    "text_and_batch_sizes": Case(
        make=classifies(Reads),
        batches=lambda: texts((8, 7), (7, 12), (3, 5), (1, 9), (5, 9), (1, 4)),
        microbatches=(4,),
        traces=3,
    ),
    "images": Case(
        make=classifies(Looks), batches=lambda: images((8, 16, 12), (8, 20, 16), (8, 12, 24), (6, 14, 14), (8, 17, 9)), traces=2
    ),
    "images_square_at_first": Case(
        make=classifies(Looks), batches=lambda: images((8, 16, 16), (8, 20, 20), (8, 12, 24), (8, 14, 18)), traces=3
    ),
    "unrolled": Case(make=classifies(Unrolled), batches=lambda: texts(*LENGTHS), microbatches=(4,), traces=6),
    "longest_is_special": Case(
        make=classifies(LongestIsSpecial), batches=lambda: texts((8, 7), (8, 16), (8, 9), (8, 5), (8, 16)), traces=3
    ),
    "two_lengths_in_two_calls": Case(
        make=Translates,
        batches=lambda: pairs((8, 7, 7), (8, 9, 9), (8, 5, 8), (8, 4, 3), (6, 5, 5)),
        microbatches=(1, 4),
        traces=3,
    ),
    "lengths_as_numbers": Case(make=PassesLengths, batches=lambda: with_lengths(9, 5, 5, 9), microbatches=(1, 2), traces=2),
    "last_batch_smaller": Case(make=Classifies, batches=lambda: labelled(8, 8, 6), microbatches=(1, 2, 4), traces=1),
    "batches_of_one": Case(make=Classifies, batches=lambda: labelled(1, 8, 1), microbatches=(1, 2), traces=2),
    "features_of_one_size": Case(make=Classifies, batches=lambda: labelled(DIM, DIM, 3), microbatches=(1,), traces=1),
    "time_first_batch": Case(
        make=TimeFirstBatch,
        batches=lambda: time_first((5, 8), (7, 8), (8, 8), (4, 6), (5, 3)),
        microbatches=(1, 4),
        strategy={"batch_dim": 1},
        evaluations=("predict",),
    ),
}
