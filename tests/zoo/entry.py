"""What a model of the zoo is: how it is made, what it is called with, what its loss is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Batch = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model and how it is used.

    Attributes:
        name: Its name in tests and in the table.
        make_module: Makes the module; the harness seeds the generators.
        make_batch: Keyword arguments of a call, from the number of samples and a seed.
        loss: The loss, of what the call returns.
        refused: A part of the message, where the model cannot be pipelined.
        retraced: Whether another number of samples needs a graph of its own.
        stages: Numbers of stages that it is cut into.
        tolerance: Greatest difference from the whole model, relative to the largest element; a parameter that several stages
            use gets its gradients summed in another order.
        why: What makes the model worth having here.
    """

    name: str
    make_module: Callable[[], nn.Module]
    make_batch: Callable[[int, int], Batch]
    loss: Callable[[Any], Tensor]
    refused: str | None = None
    retraced: bool = False
    stages: tuple[int, ...] = (2, 4)
    tolerance: float = 1e-5
    why: str = ""

    def __str__(self) -> str:
        return self.name
