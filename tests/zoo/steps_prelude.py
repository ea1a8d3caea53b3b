"""Steps whose own code decides, from more than the batch's shapes, what the model is called with."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from tests.zoo.steps_case import WIDTH, Case, Sgd, cross_entropy, generator, mlp

LENGTH, VOCAB = 9, 11


def sequences(*sizes: int) -> list[Any]:
    """Batches of (tokens, number of tokens that count, class)."""
    g = generator()
    return [
        (
            torch.randint(VOCAB, (n, LENGTH), generator=g),
            torch.randint(2, LENGTH + 1, (n,), generator=g),
            torch.randint(3, (n,), generator=g),
        )
        for n in sizes or (8, 8, 8, 8)
    ]


class Reader(nn.Module):
    """Reads tokens of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.body, self.head = nn.Embedding(VOCAB, WIDTH), mlp(WIDTH, WIDTH, WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor, scale: float = 1.0, name: str | None = None) -> Tensor:
        x = self.body(self.token(ids)) * scale
        return self.head(x.mean(dim=1) if name is None else x.amax(dim=1))


class Reads(Sgd):
    def __init__(self) -> None:
        super().__init__()
        self.model = Reader()

    def inputs(self, batch: Any, batch_idx: int) -> tuple[Any, ...]:
        """What the model is called with."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.model(*self.inputs(batch, batch_idx)), batch[2])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", cross_entropy(self.model(*self.inputs(batch, batch_idx)), batch[2]))


class Curriculum(Reads):
    """A callback lets sequences grow."""

    length = 3

    def inputs(self, batch: Any, batch_idx: int) -> tuple[Any, ...]:
        return (batch[0][:, : self.length],)


class Growing(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.length += 2


class ByStep(Reads):
    """The Trainer's counter gives the length."""

    def inputs(self, batch: Any, batch_idx: int) -> tuple[Any, ...]:
        return (batch[0][:, : 2 + self.global_step],)


class CounterAsArgument(Reads):
    def inputs(self, batch: Any, batch_idx: int) -> tuple[Any, ...]:
        return batch[0], 1.0 + 0.5 * self.global_step


class BatchIdxAsArgument(Reads):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.model(batch[0], 1.0, "max" if batch_idx % 2 else None), batch[2])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", cross_entropy(self.model(batch[0], 1.0 + batch_idx), batch[2]))


class RandomCrop(Reads):
    """Python's, numpy's and torch's numbers give a place and a length."""

    def inputs(self, batch: Any, batch_idx: int) -> tuple[Any, ...]:
        start = random.randrange(3)
        end = start + int(np.random.randint(1, 4)) + int(torch.randint(1, 3, ()))
        return (batch[0][:, start:end],)


class Padding(Reads):
    """Cut to the longest of the batch: microbatches get different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MaskedReader()

    def inputs(self, batch: Any, batch_idx: int) -> tuple[Any, ...]:
        longest = batch[1].max().item()
        return batch[0][:, :longest], torch.arange(longest) < batch[1][:, None]


class MaskedReader(Reader):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        x = self.body(self.token(ids)).masked_fill(~mask[..., None], 0.0)
        return self.head(x.sum(dim=1) / mask.sum(dim=1, keepdim=True))


class TwoCalls(Sgd):
    """An encoder and a decoder, on a length that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Embedding(VOCAB, WIDTH), mlp(WIDTH, WIDTH, 4)), mlp(4, WIDTH, VOCAB)
        self.length = 3

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch[0][:, : self.length]
        return cross_entropy(self.decoder(self.encoder(ids)).flatten(0, 1), ids.flatten())


class TwoCallsWithCounters(TwoCalls):
    """A coefficient from counters, computed before the calls and used between them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        share = 0.5 * self.global_step + 0.1 * batch_idx
        ids = batch[0]
        return cross_entropy(self.decoder(share * self.encoder(ids)).flatten(0, 1), ids.flatten())


class TwoCallsCropped(TwoCalls):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch[0][:, : random.randrange(2, LENGTH)]
        return cross_entropy(self.decoder(self.encoder(ids)).flatten(0, 1), ids.flatten())


VAL = ("validate",)

CASES: dict[str, Case] = {
    "curriculum": Case(make=Curriculum, batches=sequences, microbatches=(1, 4), callbacks=(Growing,), evaluations=VAL),
    "length_by_step": Case(make=ByStep, batches=sequences, microbatches=(2,)),
    "counter_to_a_model": Case(make=CounterAsArgument, batches=sequences, microbatches=(2,), evaluations=VAL),
    "batch_idx_as_argument": Case(make=BatchIdxAsArgument, batches=sequences, microbatches=(2,), evaluations=VAL),
    "random_crop": Case(make=RandomCrop, batches=sequences, microbatches=(1, 4)),
    "padding_cut_off": Case(make=Padding, batches=lambda: sequences(8, 8, 5), microbatches=(1, 4), evaluations=VAL),
    "padding_cut_off_three_stages": Case(make=Padding, batches=sequences, microbatches=(4,), stages=3),
    "curriculum_of_two_calls": Case(make=TwoCalls, batches=sequences, microbatches=(2,), callbacks=(Growing,)),
    "counters_between_two_calls": Case(make=TwoCallsWithCounters, batches=sequences, microbatches=(1, 4)),
    "crop_of_two_calls": Case(make=TwoCallsCropped, batches=sequences, microbatches=(1, 2)),
}
