"""What a case of the step zoo is, and the data and the small networks that its modules share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

DIM, WIDTH, CLASSES = 6, 10, 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A LightningModule, its data, and how many microbatches leave its loss what it is on the whole batch.

    Attributes:
        make: Makes the module.
        batches: Makes the training batches, already collated.
        microbatches: Numbers of microbatches for which the loss is that of the whole batch. A mean over samples allows any, a
            loss or buffer made of batch statistics only one.
        stages: Ranks of the pipeline.
        evaluations: Which of ``validate``, ``test`` and ``predict`` run after training.
        trainer: Options of the Trainer.
        strategy: Options of the strategy.
        callbacks: Make callbacks.
        always: Whether it runs on every change, and is not slow.
        traces: How often the training step is traced, where that is part of the case.
    """

    make: Callable[[], L.LightningModule]
    batches: Callable[[], list[Any]]
    microbatches: tuple[int, ...] = (1, 4)
    stages: int = 2
    evaluations: tuple[str, ...] = ()
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callable[[], L.Callback], ...] = ()
    always: bool = False
    traces: int | None = None


class Sgd(L.LightningModule):
    """What all modules have in common."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def generator() -> torch.Generator:
    """The data is the same for every run, whatever the run's own seed."""
    return torch.Generator().manual_seed(4)


def labelled(*sizes: int) -> list[Any]:
    """Batches of (features, classes)."""
    g = generator()
    return [(torch.randn(n, DIM, generator=g), torch.randint(CLASSES, (n,), generator=g)) for n in sizes or (8, 8, 8)]


def unlabelled(*sizes: int, dim: int = DIM) -> list[Any]:
    """Batches of features."""
    g = generator()
    return [torch.randn(n, dim, generator=g) for n in sizes or (8, 8, 8)]


def tokens(*shapes: tuple[int, int], vocab: int = 11) -> list[Any]:
    """Batches of token numbers."""
    g = generator()
    return [torch.randint(vocab, shape, generator=g) for shape in shapes]


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with tanh between them."""
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def classifier(depth: int = 3) -> nn.Sequential:
    """Features to classes."""
    return mlp(DIM, *[WIDTH] * depth, CLASSES)


def cross_entropy(logits: Tensor, classes: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, classes)
