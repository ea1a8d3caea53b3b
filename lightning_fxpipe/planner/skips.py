"""Tensors that go past stages which do not use them, from the stage that has them to the one that does.

A skip connection of a U-Net, or an encoder's result that each block of a decoder uses, crosses several cuts. Sent from stage to
stage, it takes one message more for each stage in between, and memory there, until that stage's backward pass. Sent directly
it is one message, and its gradient comes back as one. torchgpipe calls such a way a *portal* (arXiv 2004.09910).

A stage that uses the tensor sends it on to the next that does: so it leaves each stage once, and each adds its part of the
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx


@dataclass(frozen=True)
class Skip:
    """A tensor on its way past stages.

    Attributes:
        number: Of the skip, among those of all stages.
        node: The graph node that produces it.
        source: Stage that sends it: the last before the destination that has computed or used it.
        destination: Stage that receives it, behind the one after the source.
    """

    number: int
    node: fx.Node
    source: int
    destination: int

    def passes(self, boundary: int) -> bool:
        """Returns True if it goes past the boundary after a stage."""
        return self.source <= boundary < self.destination


def find_skips(
    crossing: Sequence[Sequence[fx.Node]], uses: Sequence[Collection[fx.Node]], trains: Callable[[fx.Node], bool]
) -> tuple[Skip, ...]:
    """The tensors that need not go from stage to stage.

    Stages know by what arrives from their neighbour that it is their turn. So each boundary keeps a tensor, and one that
    trains where one that trains goes past it.

    Args:
        crossing: For each stage but the last, the tensors that cross the boundary after it.
        uses: For each stage, what it uses.
        trains: Whether a gradient comes back for a tensor.

    Returns:
        The skips, in the order in which the graph produces the tensors, then by stage.
    """
    staying = [[*nodes] for nodes in crossing]
    found: list[Skip] = []
    for node in dict.fromkeys(node for nodes in crossing for node in nodes):
        for source, destination in _hops(node, crossing, uses):
            if destination == source + 1:
                continue
            past = staying[source:destination]
            if all(any(other is not node and trains(other) >= trains(node) for other in nodes) for nodes in past):
                found.append(Skip(len(found), node, source, destination))
                for nodes in past:
                    nodes.remove(node)
    return tuple(found)


def _hops(node: fx.Node, crossing: Sequence[Sequence[fx.Node]], uses: Sequence[Collection[fx.Node]]) -> list[tuple[int, int]]:
    """From the stage that produces a tensor to the first that uses it, from there to the next, and so on."""
    crossed = [boundary for boundary, nodes in enumerate(crossing) if node in nodes]
    first, end = crossed[0], crossed[-1] + 1
    stops = [stage for stage in range(first + 1, end) if node in uses[stage]]
    return [*pairwise([first, *stops, end])]
