"""Which tensors of a graph get gradients from which results.

A tensor that crosses a cut and requires gradients need not get one: later code may use it detached only, or the loss may use
only some of the region's results. On one device the gradients of what made it are then None, which is not zero: an optimizer
skips such parameters. So a stage has to know of each tensor that it sends whether a gradient comes back.

A recording runs with autograd, on tensors without data. From each tensor of the graph, autograd's own graph is followed back to
the tensors of the graph before it. Where that ends in a tensor that is no parameter, such as the result of a module that ran on
dummy values, gradients are taken to reach all operands of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

_OPERANDS = "gradient_operands"  # of a node: the tensors of the graph that autograd goes back to from it

_Edge = tuple[Any, int]  # an operation of autograd, and which of its results


class GradientFlow:
    """The edges of autograd's graph that belong to the tensors of a graph being recorded.

    Args:
        parameters: Identities of the parameters, where gradients end.
    """

    def __init__(self, parameters: Container[int]) -> None:
        self._parameters = parameters
        self._nodes: dict[_Edge, list[fx.Node]] = {}  # in the order of the recording
        self._edges: dict[fx.Node, list[_Edge]] = {}

    def note(self, node: fx.Node, tensor: Tensor) -> None:
        """Notes the tensor of a node; again where a later call has written into it."""
        if tensor.requires_grad:
            edges, edge = self._edges.setdefault(node, []), _edge_of(tensor)
            if edge is not None and edge not in edges:
                edges.append(edge)
                self._nodes.setdefault(edge, []).append(node)

    def write(self) -> None:
        """Writes down for each node the tensors that autograd goes back to from it. Called when all is recorded."""
        for node, edges in self._edges.items():
            found = [self._before(node, edge) for edge in edges]
            if all(each is not None for each in found):
                node.meta[_OPERANDS] = tuple({operand: None for each in found for operand in each or ()})
        self._nodes, self._edges = {}, {}

    def _before(self, node: fx.Node, edge: _Edge) -> list[fx.Node] | None:
        """The nearest nodes that a gradient of a node's tensor reaches; None if they are unknown."""
        same = self._nodes[edge]  # a call may return its argument
        found = same[: same.index(node)]
        if not found and _is_leaf(edge[0]):
            return None
        for reached in _edges_before([edge[0]], ends=self._nodes):
            if reached in self._nodes:
                found += self._nodes[reached]
            elif _is_leaf(reached[0]) and id(getattr(reached[0], "variable", None)) not in self._parameters:
                return None
        return found


def reached_by_gradients(results: Iterable[Tensor], arguments: Sequence[Tensor]) -> list[int]:
    """Returns the indices of the arguments that gradients of a call's results reach; of all, where that is unknown: another
    tensor than a parameter is where gradients end.
    """
    edges = [edge for result in results if result.requires_grad and (edge := _edge_of(result)) is not None]
    trained = ((_edge_of(tensor), index) for index, tensor in enumerate(arguments) if edges and tensor.requires_grad)
    operands = {edge: index for edge, index in trained if edge is not None}
    reached = {*edges, *_edges_before([operation for operation, _ in edges], ends=operands)}
    ends = (edge[0] for edge in reached if _is_leaf(edge[0]) and edge not in operands)
    if not all(isinstance(getattr(end, "variable", None), nn.Parameter) for end in ends):
        return [*operands.values()]
    return [index for edge, index in operands.items() if edge in reached]


def _edge_of(tensor: Tensor) -> _Edge | None:
    """The operation that gradients of a tensor come to; None for a view of a parameter from under ``no_grad``: it has none."""
    if (operation := tensor.grad_fn) is None:
        with torch.enable_grad():
            operation, _ = tensor.view_as(tensor).grad_fn.next_functions[0]  # type: ignore[union-attr]
    return None if operation is None else (operation, tensor.output_nr)


def _edges_before(operations: Iterable[Any], *, ends: Container[_Edge]) -> Iterator[_Edge]:
    """Walks autograd's graph back from some operations; not beyond edges of ``ends``."""
    pending = [*operations]
    seen = {*pending}
    while pending:
        for edge in pending.pop().next_functions:
            if edge[0] is None:
                continue
            if edge in ends:
                yield edge
            elif edge[0] not in seen:
                seen.add(edge[0])
                pending.append(edge[0])
                yield edge


def _is_leaf(operation: Any) -> bool:
    return not operation.next_functions


class GradientSources:
    """Which of a graph's results have gradients that reach its tensors.

    Args:
        results: Nodes of the graph.
    """

    def __init__(self, results: Sequence[fx.Node]) -> None:
        self._results = results
        self._users: dict[fx.Node, list[fx.Node]] = {}  # of each tensor those that give it a gradient
        self._numbers: dict[fx.Node, int] = {}  # of the results that give a tensor a gradient, as bits
        for number, result in enumerate(results):
            self._numbers[result] = self._numbers.get(result, 0) | 1 << number
        pending, seen = [*results], set[fx.Node]()
        while pending:
            user = pending.pop()
            operands = _operands(user) if _may_train(user) else ()
            for operand in operands:
                if user not in seen:
                    self._users.setdefault(operand, []).append(user)
                before = self._numbers.get(operand, 0)
                self._numbers[operand] = before | self._numbers[user]
                if self._numbers[operand] != before:
                    pending.append(operand)
            seen.add(user)

    def of(self, node: fx.Node, counts: Callable[[fx.Node], bool]) -> frozenset[int]:
        """Numbers of the results that give a tensor a gradient.

        Args:
            node: The tensor.
            counts: True for the calls that may use it, as those behind a cut.
        """
        users = (user for user in self._users.get(node, ()) if counts(_call_of(user)))
        bits = sum({1 << number for number, result in enumerate(self._results) if result is node})
        for user in users:
            bits |= self._numbers[user]
        return frozenset(number for number in range(len(self._results)) if bits >> number & 1)


def _call_of(node: fx.Node) -> fx.Node:
    """The call that has made a tensor, which may be a part of its result."""
    while (call := node.meta.get("part_of")) is not None:
        node = call
    return node


def _operands(node: fx.Node) -> Iterable[fx.Node]:
    found: Iterable[fx.Node] | None = node.meta.get(_OPERANDS)
    return node.all_input_nodes if found is None else found


def _may_train(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.requires_grad  # a container may hold tensors that do
