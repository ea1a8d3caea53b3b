"""Half a backward pass: the gradients of a stage's inputs at once, and those of its weights later.

That takes the bubble out of a zero-bubble schedule (arXiv 2401.10241, section 2). The graph of a stage, from outputs to inputs:

    output
      |
    matmul ----> transpose ----> weight 2
      |
     relu
      |
    matmul ----> transpose ----> weight 1
      |
    input

The first half runs the *trunk*, the operations from which a way leads to an input, and keeps what comes to each *fork*, an
operation of the trunk with a way to weights that leaves it. The second half starts at the forks, from what was kept there.
Autograd computes of each operation only the gradients that are asked for, so that neither half does the work of the other.

Some graphs cannot be run twice: an operation written in Python (``torch.autograd.Function``, reentrant activation
checkpointing, hooks of modules, compiled graphs) computes all its gradients at once. So all of their backward pass is in the
first half. The result is the same; the bubble is what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from lightning_fxpipe._compat.torch import patched_attributes

_Captured = dict[Node, tuple["Tensor | None", ...]]


@dataclass(frozen=True)
class _Part:
    """Weights that get their gradients together: those that can be reached from a fork, with all forks that share one of them.

    Attributes:
        weights: The weights, by their id.
        forks: Where the ways to them leave the trunk.
        roots: Outputs of the stage that depend on weights alone, with their gradients.
    """

    weights: Mapping[int, Tensor]
    forks: tuple[Node, ...]
    roots: tuple[tuple[GradientEdge, Tensor], ...]

    def joined(self, other: _Part) -> _Part:
        """Both parts as one."""
        return _Part({**self.weights, **other.weights}, self.forks + other.forks, self.roots + other.roots)


class WeightGradients:
    """Rest of a backward pass after the gradients of the inputs.

    Args:
        parts: Weights, and where their gradients begin.
        captured: What has come to the forks.
    """

    def __init__(self, parts: Sequence[_Part], captured: _Captured) -> None:
        self._parts = parts
        self._captured = captured

    def compute(self) -> None:
        """Adds the gradients of the weights to their ``grad``. Hooks on weights run once, as in a whole backward pass."""
        # Several forks may have operations in common, which are kept for the last of them.
        for part in sorted(self._parts, key=lambda part: len(part.forks), reverse=True):
            found = [(node, self._captured[node]) for node in part.forks if node in self._captured]
            starts = [*part.roots]
            for node, gradients in found:
                starts += [(GradientEdge(node, i), each) for i, each in enumerate(gradients) if each is not None]
            if not starts:
                continue
            ends, gradients_of_ends = zip(*starts, strict=True)
            with ExitStack() as hooks:
                # What flows from one fork to another on the trunk is already in what has come to the latter.
                for node, gradients in found:
                    hooks.callback(node.register_prehook(partial(_instead, gradients)).remove)
                torch.autograd.backward(
                    ends, gradients_of_ends, retain_graph=len(part.forks) > 1, inputs=[*part.weights.values()]
                )


def input_gradients(
    ends: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Sequence[Tensor | None], WeightGradients] | None:
    """Computes the gradients of a stage's inputs, without those of its weights.

    Args:
        ends: Where the backward pass of the stage begins.
        gradients: Of these.
        inputs: Leaves of the stage's graph.

    Returns:
        The gradients of the inputs, None for one that has no part in the outputs; and what is left to do. None, with nothing
        done, if the graph cannot be run in two halves.
    """
    graph = _Graph(ends)
    if any(isinstance(node, BackwardCFunction) for node in graph.users):
        return None
    trunk = graph.trunk(inputs)
    parts: list[_Part] = []
    for node in trunk:
        leaving = [following for following, _ in node.next_functions if following is not None and following not in trunk]
        if leaving and (weights := graph.leaves_below(leaving)):
            _add(parts, _Part(weights, (node,), ()))
    for end, gradient in zip(ends, gradients, strict=True):
        if end.node not in trunk:
            _add(parts, _Part(graph.leaves_below([end.node]), (), ((end, gradient),)))
    captured: _Captured = {}
    on_trunk = [(end, gradient) for end, gradient in zip(ends, gradients, strict=True) if end.node in trunk]
    if not on_trunk:
        return [None] * len(inputs), WeightGradients(parts, captured)
    with ExitStack() as hooks:
        for part in parts:
            for node in part.forks:
                hooks.callback(node.register_prehook(partial(_keep, captured, node)).remove)
        roots, given = zip(*on_trunk, strict=True)
        found = torch.autograd.grad(roots, inputs, given, retain_graph=True, allow_unused=True)
    return found, WeightGradients(parts, captured)


class HookWatch:
    """Notes hooks on gradients that are set in a block: in a graph that is run in two halves they could run twice."""

    def __init__(self) -> None:
        self.has_seen_any = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In the block, hooks are noted."""
        self.has_seen_any = False
        register: Callable[..., Any] = Tensor.register_hook

        def noted(tensor: Tensor, hook: Any) -> Any:
            self.has_seen_any = True
            return register(tensor, hook)

        with patched_attributes((Tensor, "register_hook", noted)):
            yield


class _Graph:
    """The graph of autograd below some ends.

    Attributes:
        users: Of each node those that a backward pass comes from.
        leaves: Of nodes that accumulate a gradient, the tensor.
    """

    def __init__(self, ends: Sequence[GradientEdge]) -> None:
        self.users: dict[Node, list[Node]] = {end.node: [] for end in ends}
        self.leaves: dict[Node, Tensor] = {}
        waiting = [*self.users]
        while waiting:
            node = waiting.pop()
            if (leaf := getattr(node, "variable", None)) is not None:
                self.leaves[node] = leaf
            for following, _ in node.next_functions:
                if following is not None:
                    if following not in self.users:
                        self.users[following] = []
                        waiting.append(following)
                    self.users[following].append(node)

    def trunk(self, inputs: Sequence[Tensor]) -> set[Node]:
        """The nodes from which a backward pass comes to some of these leaves."""
        wanted = {id(tensor) for tensor in inputs}
        waiting = [node for node, leaf in self.leaves.items() if id(leaf) in wanted]
        found = {*waiting}
        while waiting:
            new = [user for user in self.users[waiting.pop()] if user not in found]
            found.update(new)
            waiting.extend(new)
        return found

    def leaves_below(self, nodes: Sequence[Node]) -> dict[int, Tensor]:
        """The leaves that a backward pass from these nodes comes to, by their id."""
        seen, waiting, found = {*nodes}, [*nodes], {}
        while waiting:
            node = waiting.pop()
            if node in self.leaves:
                found[id(self.leaves[node])] = self.leaves[node]
            new = [following for following, _ in node.next_functions if following is not None and following not in seen]
            seen.update(new)
            waiting.extend(new)
        return found


def _add(parts: list[_Part], new: _Part) -> None:
    """Adds a part, joined with those that share a weight with it."""
    for part in [part for part in parts if part.weights.keys() & new.weights.keys()]:
        parts.remove(part)
        new = part.joined(new)
    parts.append(new)


def _keep(captured: _Captured, node: Node, gradients: tuple[Tensor | None, ...]) -> None:
    captured[node] = gradients


def _instead(gradients: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return gradients
