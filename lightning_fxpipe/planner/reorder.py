"""Other orders of a graph's calls that compute the same.

A step that calls the same encoder on two inputs makes all calls of the first before those of the second; cut in that order, the
second would need the first stages' parameters in the last stage. As far as the flow of data allows, calls that use the same
parameters come together instead: layer by layer, both inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, fx

from lightning_fxpipe._compat.torch import storage_key

Unit = Sequence[fx.Node]


def predecessors(graph: fx.Graph, units: Sequence[Unit]) -> list[frozenset[int]]:
    """For each unit those before it that must stay before it: what it takes values from, and, where memory is changed in
    place, all that touch the memory.
    """
    position_of = {node: position for position, unit in enumerate(units) for node in unit}
    changed = {key for node in graph.nodes for key in node.meta.get("mutated_storages", ())}
    last_touch: dict[int, int] = {}
    found = []
    for position, unit in enumerate(units):
        before = {position_of[operand] for node in unit for operand in node.all_input_nodes if operand in position_of}
        for key in _memory_of(unit) & changed:
            if key in last_touch:
                before.add(last_touch[key])
            last_touch[key] = position
        found.append(frozenset(before - {position}))
    return found


def _memory_of(unit: Unit) -> set[int]:
    """Memory that a unit reads, changes or gives a name to."""
    keys: set[int] = set()
    for node in unit:
        keys |= node.meta.get("mutated_storages", set()) | node.meta.get("module_storages", frozenset())
        values = (operand.meta.get("val") for operand in (node, *node.all_input_nodes))
        keys |= {storage_key(value) for value in values if isinstance(value, Tensor)}
    return keys


def reorder(graph: fx.Graph, units: Sequence[Unit], rank_of: Callable[[int, int], int]) -> bool:
    """Puts the units of a graph in the order of their ranks, as far as each can come before those that need it.

    Args:
        graph: The graph; changed in place.
        units: Its calls, in order.
        rank_of: Rank of the unit at a position, given the highest rank of those that must stay before it (-1 without any).
            What it returns must not be lower.

    Returns:
        Whether the order changed.
    """
    if any(node.meta.get("checkpoints") for node in graph.nodes):
        return False  # what runs under one checkpoint must stay together
    ranks: list[int] = []
    for position, before in enumerate(predecessors(graph, units)):
        ranks.append(rank_of(position, max((ranks[other] for other in before), default=-1)))
    order = sorted(range(len(units)), key=ranks.__getitem__)  # stable: equals stay in their order
    if order == list(range(len(units))):
        return False
    output = graph.output_node()
    for node in (*(node for position in order for node in units[position]), output):
        for operand in node.all_input_nodes:
            if operand.op == "get_attr":
                output.prepend(operand)
        if node is not output:
            output.prepend(node)
    return True


def bring_repeated_calls_together(graph: fx.Graph, units: Sequence[Unit], has_parameters: Callable[[Unit], bool]) -> bool:
    """Puts each call of a module that has been called before behind the first one's, if it need not wait for others.

    Args:
        graph: The graph; changed in place.
        units: Its calls, in order.
        has_parameters: Whether a unit uses parameters; only those matter.

    Returns:
        Whether the order changed.
    """
    used = [_used_by(unit) if has_parameters(unit) else () for unit in units]
    first_use: dict[tuple[str, ...], int] = {}
    for position, names in enumerate(used):
        first_use.setdefault(names, position)
    if all(not names or first_use[names] == position for position, names in enumerate(used)):
        return False

    def rank_of(position: int, before: int) -> int:
        names = used[position]
        return max(first_use[names], before) if names else before

    return reorder(graph, units, rank_of)


def _used_by(unit: Unit) -> tuple[str, ...]:
    """The module that a unit calls, or the tensors of the model that it takes."""
    if unit[0].op == "call_module":
        return (str(unit[0].target),)
    return tuple(str(operand.target) for node in unit for operand in node.all_input_nodes if operand.op == "get_attr")
