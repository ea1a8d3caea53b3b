"""Which part of a region may run on microbatches; a graph that cannot be divided is left as it was."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from lightning_fxpipe.division import NotDivisible, divide
from tests.tracing import WIDTH, batch, trace


class Cache:
    """What a layer fills."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        h = self.linear(x)
        cache.kept.append(h.sum(0))
        return h


class ReturnsItsCache(nn.Module):
    """What the cache holds is of the whole batch, and later code gets it."""

    def __init__(self) -> None:
        super().__init__()
        self.fills = Fills()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        cache = Cache()
        return self.fills(x, cache), cache.kept[0]


def test_a_graph_that_cannot_be_divided_stays_as_it_was() -> None:
    """The cache that the layer fills had got a copy, which nobody fills, and from which the result was taken."""
    traced = trace(ReturnsItsCache(), batch(), opened=())
    before = [node.name for node in traced.graph.nodes]
    with pytest.raises(NotDivisible):
        divide(traced)
    assert [node.name for node in traced.graph.nodes] == before
    traced.graph.lint()
