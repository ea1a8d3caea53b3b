"""Calls of a step that stand between those of a region, and are no part of it.

``self.counts += torch.bincount(codes)`` between the encoder and the decoder changes a tensor that the step has from elsewhere.
In the graph, a stage would do that, with what it has of the batch. So the last stage makes such a call itself when the region
has run, with results of the region; the other ranks then get what it has changed, as all that is changed after the model's last
call. The same goes for calls that use what such a call has changed or made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import storage_key, tree_leaves
from lightning_fxpipe.tracing.signals import RecordError


class CallsAside:
    """Calls of one recorded run of a step that are no part of the region."""

    def __init__(self) -> None:
        self._memory: set[int] = set()  # that they have changed or made
        self._nodes: list[fx.Node] = []

    def takes(
        self,
        nodes: Sequence[fx.Node],
        arguments: Sequence[object],
        held: Sequence[Tensor],
        written: Collection[int],
        result: object,
    ) -> bool:
        """Returns True if a call is such a one, which the step has just made.

        Args:
            nodes: Those that have recorded it.
            arguments: What it was called with, flattened.
            held: The tensors among them that no call of the step has made.
            written: The memory that it writes into by its name: a tensor that is no fake does not change in a recording.
            result: What it gave.
        """
        changed = {*written, *(key for node in nodes for key in node.meta.get("mutated_storages", ()))}
        if changed.isdisjoint(_memory_of(held)) and self._memory.isdisjoint(_memory_of(arguments)):
            return False
        self._memory |= changed | _memory_of(tree_leaves(result))
        self._nodes += nodes
        return True

    def check_module(self, path: str, module: nn.Module) -> None:
        """Called before a module is called that may become part of the graph.

        Raises:
            RecordError: It holds a tensor that a call aside has changed.
        """
        held = (tensor for child in module.modules() for tensor in attribute_tensors(child))
        if self._memory and not self._memory.isdisjoint(_memory_of(held)):
            raise RecordError(f"the step changes a tensor of {path or 'the module'} before calling it")

    def erase(self, graph: fx.Graph) -> None:
        """Takes them out of the graph.

        Raises:
            RecordError: What stays uses their results.
        """
        for node in reversed(self._nodes):
            if node.users:
                source = node.meta.get("source") or "some code"
                raise RecordError(f"{source} changes a tensor between two calls of the model, and the later call uses it")
            graph.erase_node(node)


def _memory_of(leaves: Iterable[object]) -> set[int]:
    return {storage_key(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided}


def attribute_tensors(module: nn.Module) -> list[Tensor]:
    """The tensors that a module has itself: parameters, buffers, plain attributes, and those in lists, tuples and dicts."""
    values = [value for value in vars(module).values() if isinstance(value, (Tensor, list, dict, tuple))]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
