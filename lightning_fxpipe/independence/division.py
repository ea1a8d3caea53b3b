"""Which part of a region may run on microbatches, and which must see the whole batch.

Most of a model treats samples one by one: its tensors carry the batch as a dimension, and what it gives for a microbatch is a
part of what it gives for the batch. What does not (a loss that the model computes, similarities of all samples with each other,
a mean over the batch) is called *mixing*. Mixing calls that only later code needs form the *tail* of the region: they run once,
on the last stage, on the joined results of the microbatches. A region whose stages need a mixing value cannot be divided; its
batch is then one microbatch.

What a call mixes is read from the symbolic shapes of the trace, in which the size of the batch is a symbol.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from lightning_fxpipe._compat.torch import storage_key, symbolic_expression
from lightning_fxpipe.independence.batch_rows import Rows, settle
from lightning_fxpipe.independence.value_use import made_without_values
from lightning_fxpipe.planner.cost import group_calls, node_fqns
from lightning_fxpipe.pytree.sizes import size_symbols
from lightning_fxpipe.tracing.examples import draws
from lightning_fxpipe.tracing.repeat import Repeat, has_known_size
from lightning_fxpipe.tracing.trace import TracedRegion
from lightning_fxpipe.user_code.objects import makes_objects


class NotDivisible(Exception):
    """The region runs on the whole batch only; the message says why, for the user."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a region runs on microbatches.

    Attributes:
        symbol: Stands for the number of samples in the graph's sizes.
        unit: Size of the dimension that is cut, as an expression of ``symbol``: the symbol, or a multiple of it.
        input_dims: For each of the graph's inputs, draws included, the dimension that is cut; None: every microbatch gets all.
        tail: The calls that run once, on what the microbatches gave.
        batch_rows: Where the tensors have the batch.
    """

    symbol: Any
    unit: Any
    input_dims: tuple[int | None, ...]
    tail: frozenset[fx.Node]
    batch_rows: Rows

    def rows(self, num_samples: int) -> int:
        """Size of the cut dimension for so many samples."""
        return int(self.unit.subs({self.symbol: num_samples}))


def divide(traced: TracedRegion) -> Division:
    """Finds out how a region can be divided; may give nodes of the graph that the tail and the stages both use twins.

    Raises:
        NotDivisible: It cannot.
    """
    rows = Rows(traced, _symbol_of_batch(traced))
    placeholders = (*traced.input_nodes, *traced.draw_nodes)
    unit = _unit(placeholders, rows)
    dims = tuple(_joined_dim(node.meta["val"], unit, rows) for node in placeholders)
    tail = _Tail(traced, unit, rows, placeholders).find()
    return Division(symbol=rows.symbol, unit=unit, input_dims=dims, tail=tail, batch_rows=rows)


def calls_of_unknown_size(traced: TracedRegion) -> frozenset[fx.Node]:
    """Returns the calls whose results have sizes that depend on values, and all that follow from them. The containers that
    these get are made by them, too: nothing but tensors crosses a cut.
    """
    found: set[fx.Node] = set()
    groups, position_of = group_calls(traced.graph)
    num_before = -1
    while len(found) > num_before:
        num_before = len(found)
        for group in groups:
            values = (node.meta.get("val") for node in group)
            follows = any(operand in found for node in group for operand in node.all_input_nodes)
            if follows or not all(has_known_size(value) for value in values if isinstance(value, Tensor)):
                found.update(group)
        operands = {operand for node in found for operand in node.all_input_nodes if operand in position_of}
        containers = {operand for operand in operands if not isinstance(operand.meta.get("val"), Tensor)}
        found.update(node for operand in containers for node in groups[position_of[operand]])
    return frozenset(found)


def joined_dim(node: fx.Node, division: Division) -> int | None:
    """The dimension along which a node's results for microbatches are joined; None: each microbatch has the same.

    It may have several entries for each row that is cut (:func:`has_several_entries`).
    """
    dims = division.batch_rows.carrying(node.meta["val"])
    return dims[0] if dims else None


def has_several_entries(node: fx.Node, division: Division) -> bool:
    """Returns True if a node's results have several entries for each row in the dimension that has the batch, as a flattened
    batch of tokens has. Whether those of a sample stand together, no shape tells: it is to be tried.
    """
    value = node.meta["val"]
    return any(division.batch_rows.sizes(value)[dim] != division.unit for dim in division.batch_rows.carrying(value))


def sample_dims(traced: TracedRegion, division: Division) -> dict[str, int]:
    """Returns for each node whose results have one dimension that is cut, by the node's name, that dimension.

    Numbers of rows are none of them: microbatches have their own.
    """
    found, rows = {}, division.batch_rows
    for node in traced.graph.nodes:
        dim = rows.only_dim(node)
        if dim is not None and node not in rows.own_numbers and rows.sizes(node.meta["val"])[dim] == division.unit:
            found[node.name] = dim
    return found


def fixed_nodes(traced: TracedRegion, division: Division) -> frozenset[str]:
    """Names of the nodes before the tail whose results are the same for all samples."""
    nodes = [node for node in traced.graph.nodes if node not in division.tail and isinstance(node.meta.get("val"), Tensor)]
    values = {node.name: node.meta["val"] for node in nodes}
    return frozenset(
        name for name, value in values.items() if has_known_size(value) and not division.batch_rows.carrying(value)
    )


def _symbol_of_batch(traced: TracedRegion) -> Any:
    found = {settle(symbol, traced.world.replacements()) for symbol in traced.batch_symbols}
    if not found:
        raise NotDivisible("no tensor passed to the model has a batch dimension")
    symbol = found.pop()
    if found or not getattr(symbol, "is_Symbol", False):
        raise NotDivisible("the model's code is specialised to one batch size")
    return symbol


def _unit(placeholders: Iterable[fx.Node], rows: Rows) -> Any:
    values = [node.meta["val"] for node in placeholders]
    units = {rows.sizes(value)[dim] for value in values for dim in rows.carrying(value)}
    if len(units) != 1:
        raise NotDivisible(
            f"its inputs have different numbers of rows per sample: {', '.join(sorted(map(str, units)))}"
            if units
            else "none of its inputs has a batch dimension"
        )
    (unit,) = units
    if unit != rows.symbol and not (unit / rows.symbol).is_Integer:
        raise NotDivisible("the number of rows of an input is not a multiple of the batch size")
    return unit


def _joined_dim(value: Tensor, unit: Any, rows: Rows) -> int | None:
    dims = rows.carrying(value)
    if not dims:
        return None
    if len(dims) > 1 or rows.sizes(value)[dims[0]] != unit:
        raise NotDivisible("the layout of a tensor's batch dimension does not allow its microbatches to be concatenated")
    return dims[0]


class _Tail:
    """Finds the calls that must see the whole batch."""

    def __init__(self, traced: TracedRegion, unit: Any, rows: Rows, placeholders: Collection[fx.Node]) -> None:
        self._traced = traced
        self._unit = unit
        self._rows = rows
        groups, self._position_of = group_calls(traced.graph)
        self._groups = [tuple(group) for group in groups]
        self._parameters = {fqn for fqn, _ in traced.root.named_parameters(remove_duplicate=False)}
        # Values that follow from those of the batch; sizes are no values.
        self._following = {node for node in placeholders if rows.carrying(node.meta["val"])}
        self._repeat = Repeat(traced)
        self._mixing: dict[int, str] = {}  # positions of groups, and why
        self._mixed_sizes: dict[Any, str] = {}  # symbols that results of such groups have as sizes, and why
        self._twins: list[tuple[fx.Node, fx.Node]] = []

    def find(self) -> frozenset[fx.Node]:
        """The calls.

        Raises:
            NotDivisible: A stage would need one of them.
        """
        for position, group in enumerate(self._groups):
            following = self._that_follow(group)
            reason = self._why_mixing(group, following)
            self._following |= following
            if reason is not None:
                self._mixing[position] = reason
                self._mixed_sizes |= dict.fromkeys(self._new_sizes(group), reason)
        try:
            self._take_in_what_cannot_be_joined()
            self._check_effects()
        except NotDivisible:
            for node, copy in reversed(self._twins):  # the graph runs as one microbatch
                copy.replace_all_uses_with(node)
                self._traced.graph.erase_node(copy)
            raise
        return frozenset(node for position in self._mixing for node in self._groups[position])

    # ------------------------------------------------------------------ what mixes

    def _that_follow(self, group: tuple[fx.Node, ...]) -> set[fx.Node]:
        """The nodes of a group whose values follow from those of the batch."""
        if not any(operand in self._following for node in group for operand in node.all_input_nodes):
            return set()
        if any(isinstance(value := node.meta.get("val"), Tensor) and not self._rows.carrying(value) for node in group):
            return set(group) - made_without_values(self._repeat, group, self._following)
        return set(group)

    def _why_mixing(self, group: tuple[fx.Node, ...], following: set[fx.Node]) -> str | None:
        if group[0].meta.get("reads_batch"):  # `if (labels == 1).any()` is true for some microbatches only
            return f"{group[0].target} reads values of the batch"
        for node in group:
            if mixed := size_symbols((node.args, node.kwargs)) & self._mixed_sizes.keys():
                return self._mixed_sizes[min(mixed, key=str)]
            for operand in node.all_input_nodes:
                before = self._position_of.get(operand)
                if before is not None and before in self._mixing and before != self._position_of[node]:
                    return self._mixing[before]
        for node in group:
            # A tuple's entries have nodes of their own, as far as they are used.
            value = node.meta.get("val")
            if isinstance(value, Tensor) and self._mixes_in(node, value, node in following):
                return call_words(node)
            if self._rows.picks_rows(node, self._unit) or self._rows.calculates_with_number(node):
                return call_words(node)
        return None

    def _new_sizes(self, group: tuple[fx.Node, ...]) -> set[Any]:
        """Symbols that sizes of a group's results follow from, and no operand's, such as the length of ``labels.unique()``."""
        values = [value for node in group if isinstance(value := node.meta.get("val"), Tensor)]
        found = {symbol for value in values for size in value.shape for symbol in _symbols(size)}
        return {symbol for symbol in found if not self._repeat.is_known(symbol)} - self._mixed_sizes.keys()

    def _mixes_in(self, node: fx.Node, value: Tensor, follows: bool) -> bool:
        """Returns True if a result shows that it is no part of what the call gives for the batch."""
        dims = self._rows.carrying(value)
        if len(dims) != 1:
            return bool(dims) or follows
        return self._rows.has_parts_of_samples(value) or (not follows and self._rows.is_numbering(node))

    # ------------------------------------------------------------------ what else belongs to the tail

    def _take_in_what_cannot_be_joined(self) -> None:
        """A value that the tail or later code takes from the stages, and that cannot be joined, is computed in the tail."""
        graph = self._traced.graph
        waiting = list(graph.output_node().all_input_nodes)
        waiting += [operand for position in self._mixing for node in self._groups[position] for operand in node.all_input_nodes]
        while waiting:
            node = waiting.pop()
            position = self._position_of.get(node)
            if position is None or position in self._mixing or self._can_be_joined(node):
                continue
            group = self._groups[position]
            if (why := self._why_unmovable(group)) is not None:
                if self._has_whole_samples(node):
                    continue
                raise NotDivisible(why)
            if any(use not in group and self._is_of_stages(use) for member in group for use in member.users):
                group = self._twin(group)
                position = len(self._groups)
                self._groups.append(group)
                self._position_of |= dict.fromkeys(group, position)
            self._mixing[position] = call_words(group[0])
            waiting += [operand for member in group for operand in member.all_input_nodes]

    def _is_of_stages(self, user: fx.Node) -> bool:
        position = self._position_of.get(user)
        return position is not None and position not in self._mixing

    def _can_be_joined(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or node in self._rows.own_numbers:
            return False
        try:
            dim = _joined_dim(value, self._unit, self._rows)
        except NotDivisible:
            return False
        return dim is not None or node not in self._following

    def _has_whole_samples(self, node: fx.Node) -> bool:
        """Returns True if results may be joined in which each row has several entries."""
        dim = self._rows.only_dim(node)
        if dim is None or node in self._rows.own_numbers:
            return False
        return self._rows.is_multiple(self._rows.sizes(node.meta["val"])[dim] / self._unit * self._rows.symbol)

    def _why_unmovable(self, group: tuple[fx.Node, ...]) -> str | None:
        for node in group:
            if draws(node) or not self._parameters.isdisjoint(node_fqns(node, self._traced.root)):
                return f"{call_words(node)} returns values that mix the samples of the batch"
        return None

    def _twin(self, group: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        """A second call for the tail, where the stages need the first."""
        if any(node.meta.get("mutated_storages") for node in group):
            raise NotDivisible(f"{call_words(group[0])} modifies memory that the stages also use")
        if any(makes_objects(node) for node in group):
            raise NotDivisible(f"{call_words(group[0])} is an object that the stages may modify")
        copies: dict[fx.Node, fx.Node] = {}
        graph, place = self._traced.graph, group[-1]
        for node in group:
            with graph.inserting_after(place):
                copy = place = graph.node_copy(node, lambda operand: copies.get(operand, operand))
            copy.meta = dict(node.meta)
            if node.meta.get("part_of") in copies:
                copy.meta["part_of"] = copies[node.meta["part_of"]]
            copies[node] = copy
            self._twins.append((node, copy))
            if node in self._following:
                self._following.add(copy)
        for node, copy in copies.items():
            for user in list(node.users):
                if user not in copies and user not in copies.values() and not self._is_of_stages(user):
                    user.replace_input_with(node, copy)
        return tuple(copies.values())

    # ------------------------------------------------------------------ whether the stages can do without it

    def _check_effects(self) -> None:
        """A call in the tail that changes memory must not be one that the stages read."""
        tail = {node for position in self._mixing for node in self._groups[position]}
        changed = {key for node in tail for key in node.meta.get("mutated_storages", ())}
        for node in self._traced.graph.nodes:
            value = node.meta.get("val")
            if node in tail or node.op in ("output", "placeholder", "get_attr") or not isinstance(value, Tensor):
                continue
            if storage_key(value) in changed:
                raise NotDivisible(f"{call_words(node)} shares memory with a tensor that is modified for the whole batch")


def _symbols(size: Any) -> set[Any]:
    return getattr(symbolic_expression(size), "free_symbols", set())


def call_words(node: fx.Node) -> str:
    """A call, with the module that makes it and the line."""
    name = getattr(node.target, "__name__", str(node.target))
    path, source = node.meta.get("module_path"), node.meta.get("source")
    return name + (f" in {path}" if path and path != name else "") + (f", {source}" if source else "")


def cut(tensor: Tensor, dim: int | None, start: int, rows: int, *, num_rows: int | None = None) -> Tensor:
    """The rows of a microbatch.

    Args:
        tensor: For the whole batch.
        dim: Its dimension that is cut; None: it belongs to every microbatch as it is.
        start: First row.
        rows: How many.
        num_rows: Rows of the batch, where the dimension may have several entries for each.
    """
    if dim is None:
        return tensor
    entries = 1 if num_rows is None else tensor.shape[dim] // num_rows
    # `.data` gives each microbatch a version counter of its own: a call that changes its input in place would otherwise
    # invalidate what the microbatches before it saved for backward.
    return (tensor if tensor.requires_grad else tensor.data).narrow(dim, start * entries, rows * entries)
