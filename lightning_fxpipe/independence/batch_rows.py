"""The batch's dimension in the tensors of a trace, and calls that depend on the numbers of its rows.

Code that numbers the rows of a batch is right for microbatches only where the numbers say "each its own": in
``mask[torch.arange(len(mask))[:, None], columns]`` row *i* of the result is made of row *i* of the mask, whichever rows a
microbatch has, and each microbatch numbers its own. Used otherwise (an embedding of the row's number, a roll), or on a tensor
whose rows are others, they depend on the place of each sample in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from lightning_fxpipe._compat.torch import symbolic_expression
from lightning_fxpipe.planner.recompute import READ_NOTHING
from lightning_fxpipe.pytree.sizes import size_symbols
from lightning_fxpipe.tracing.repeat import example_sizes
from lightning_fxpipe.tracing.trace import TracedRegion

# Their result depends on the place of each entry, though on no tensor.
_NUMBERING = frozenset({"arange", "linspace", "logspace", "range", "tril_indices", "triu_indices", "randperm"})
# They make numbers of equal entries.
_ACCUMULATING = frozenset({"cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"})
# Where the first argument's entries are the numbers of their places along a dimension, so are the result's.
_KEEPING = frozenset(
    """to long int clone contiguous detach unsqueeze squeeze expand expand_as movedim moveaxis transpose swapaxes swapdims
    permute t""".split()  # noqa: SIM905
)
# So do these, where that dimension has all entries.
_RESHAPING = frozenset({"view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel"})
_SPREADING = frozenset({"meshgrid", "broadcast_tensors"})  # each result belongs to the argument at its place
_GETTING = frozenset({"__getitem__", "getitem"})
_SETTING = frozenset({"__setitem__", "setitem"})
_PUTTING = frozenset({"index_put", "index_put_"})
_SELECTING = frozenset({"index_select"})
# They take from or put into places along a dimension, by numbers that stand in another tensor.
_ALONG = frozenset(
    """gather take_along_dim index_select scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_add
    index_add_ index_copy index_copy_ index_fill index_fill_ index_reduce index_reduce_""".split()  # noqa: SIM905
)
_FLAT = frozenset({"take", "put", "put_"})  # so do these, along all dimensions
# They give each sample the same, made of a tensor that does not have the batch.
_REPEATING = READ_NOTHING | {"expand", "expand_as", "broadcast_to", "broadcast_tensors", "repeat", "tile", "full"}
# They take numbers, which are no sizes.
_CALCULATING = frozenset(
    "add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power".split()  # noqa: SIM905
)
_TRIED_NUMBERS = (*range(2, 12), 64, 97, 1000)


class Rows:
    """Which dimensions have the batch.

    Args:
        traced: The region.
        symbol: Stands for the number of samples in the graph's sizes.
    """

    def __init__(self, traced: TracedRegion, symbol: Any) -> None:
        self._traced = traced
        self.symbol = symbol
        self._replacements = traced.world.replacements()

    def sizes(self, value: Tensor) -> list[Any]:
        """A tensor's sizes, with what the trace found out about their symbols."""
        return [settle(symbolic_expression(size), self._replacements) for size in value.shape]

    def carrying(self, value: Tensor) -> list[int]:
        """The dimensions of a tensor whose sizes follow from the number of samples."""
        return [dim for dim, size in enumerate(self.sizes(value)) if self.symbol in getattr(size, "free_symbols", ())]

    def only_dim(self, node: fx.Node) -> int | None:
        """The dimension of a node's tensor that has the batch, where just one has."""
        value = _tensor(node)
        dims = [] if value is None else self.carrying(value)
        return dims[0] if len(dims) == 1 else None

    def has_parts_of_samples(self, value: Tensor) -> bool:
        """Returns True if a dimension has some of the samples, or some more: no fixed number of entries for each, as half of
        a batch, or all of it but the first.
        """
        return any(not self.is_multiple(self.sizes(value)[dim]) for dim in self.carrying(value))

    def is_multiple(self, size: Any) -> bool:
        """Returns True if a size is so many for each sample, whatever their number."""
        if self.symbol not in (size / self.symbol).free_symbols:
            return True
        size = size.xreplace(self._hints)
        one = size.subs({self.symbol: 1})
        return all(size.subs({self.symbol: samples}) == samples * one for samples in _TRIED_NUMBERS)

    @cached_property
    def _hints(self) -> dict[Any, int]:
        """The example's values of the other symbols."""
        return {symbol: size for symbol, size in example_sizes(self._traced).items() if symbol != self.symbol}

    # ------------------------------------------------------------------ numbers of rows

    @cached_property
    def own_numbers(self) -> frozenset[fx.Node]:
        """The numberings of rows, and views of them, that nothing is done with but to take from or put into each row what
        belongs to it. They are right for a microbatch as the code makes them, and not as a part of those for the batch.
        """
        found: dict[fx.Node, Any] = {}  # their lengths
        for node in self._traced.graph.nodes:
            length = self._length(node, found)
            if length is not None:
                found[node] = length
        own: set[fx.Node] = set()
        for node in reversed(found):
            if all(self._keeps_to_own(user, node, found[node], own) for user in node.users):
                own.add(node)
        return frozenset(own)

    def is_numbering(self, node: fx.Node) -> bool:
        """Returns True if a call that takes nothing from the batch's tensors gives each row something of its own."""
        name = _name(node)
        if name in _ACCUMULATING:
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis"))
            value = _tensor(node)
            return value is None or not isinstance(dim, int) or dim % max(value.dim(), 1) in self.carrying(value)
        if name in _NUMBERING:
            return node not in self.own_numbers
        return self._is_of_what_has_no_rows(node.meta.get("part_of", node))

    def _is_of_what_has_no_rows(self, node: fx.Node) -> bool:
        """Returns True if a call makes rows of what has none, and not all alike as far as can be seen: the first of a table,
        say. No trial shows it where the table holds zeros for a start.
        """
        operands = [value for operand in node.all_input_nodes if (value := _tensor(operand)) is not None]
        if any(map(self.carrying, operands)):
            return False
        if node.op == "call_module":
            return True
        name, result = _name(node), _tensor(node)
        if name == "repeat_interleave" and result is not None:  # gives each entry so often, one after the other
            (dim,) = self.carrying(result)
            return not all(value.dim() == result.dim() and self.sizes(value)[dim] == 1 for value in operands)
        return bool(operands and name) and name not in _REPEATING

    def calculates_with_number(self, node: fx.Node) -> bool:
        """Returns True if a call calculates with the number of samples, and does not just make or take so many rows."""
        value = _tensor(node)
        if _name(node).strip("_") not in _CALCULATING and (value is None or self.carrying(value)):
            return False
        sizes = (settle(symbol, self._replacements) for symbol in size_symbols((node.args, node.kwargs)))
        return any(self.symbol in size.free_symbols for size in sizes)

    def picks_rows(self, node: fx.Node, unit: Any) -> bool:
        """Returns True if a call takes from or puts into rows by their numbers, in another way than each its own.

        Args:
            node: The call.
            unit: How many rows a batch has, as an expression of the symbol.
        """
        taken = _taken_apart(node)
        if taken is None:
            return self._goes_along_rows(node)
        x, entries = taken
        value, dim = x.meta["val"], self.only_dim(x)
        if dim is None or self.sizes(value)[dim] != unit:
            return False
        for entry, first, consumed in _place_entries(entries, value.dim()):
            if not first <= dim < first + consumed:
                continue
            if isinstance(entry, fx.Node):
                return entry not in self.own_numbers and not _is_mask(entry)
            # Where rows are taken, the shape of the result shows which; where they are set there is none.
            return _name(node) in _SETTING and entry != slice(None)
        return False

    def _goes_along_rows(self, node: fx.Node) -> bool:
        """Returns True if a call other than plain indexing depends on the positions of rows, along their dimension."""
        name, args, kwargs = _name(node), node.args, node.kwargs
        if name == "embedding":
            source = args[1] if len(args) > 1 else kwargs.get("weight")
        elif name in _ALONG | _FLAT:
            source = args[0] if args else kwargs.get("input")
        else:
            return False
        value = _tensor(source)
        dims = [] if value is None else self.carrying(value)
        if value is None or name not in _ALONG:
            return bool(dims)
        dim = kwargs.get("dim", next((arg for arg in args[1:] if type(arg) is int), None))
        return bool(dims) and (not isinstance(dim, int) or dim % value.dim() in dims)

    def _length(self, node: fx.Node, found: dict[fx.Node, Any]) -> Any:
        """How many rows a node numbers; None where it does not do just that."""
        dim = self.only_dim(node)
        if dim is None or node.meta["val"].dtype not in (torch.int64, torch.int32):
            return None
        length = self.sizes(node.meta["val"])[dim]
        if _name(node) == "arange" and not node.all_input_nodes:
            start = node.args[0] if len(node.args) > 1 else node.kwargs.get("start", 0)
            step = node.args[2] if len(node.args) > 2 else node.kwargs.get("step", 1)
            return length if type(start) is int and type(step) is int and (start, step) == (0, 1) else None
        source = _kept_from(node, self)
        return length if source in found and found[source] == length else None

    def _keeps_to_own(self, user: fx.Node, node: fx.Node, length: Any, own: set[fx.Node]) -> bool:
        if user in own:
            return True
        if _name(user) in _SPREADING:
            operands = _operands(user)
            items = {child: _item(child) for child in user.users}
            if operands.count(node) != 1 or not all(type(item) is int for item in items.values()):
                return False
            return all(child in own for child, item in items.items() if operands[item] is node)
        taken = _taken_apart(user)
        return taken is not None and self._is_indexed_by(*taken, node, length) and _is_index_only(user, node)

    def _is_indexed_by(self, x: fx.Node, entries: Sequence[Any], node: fx.Node, length: Any) -> bool:
        value = _tensor(x)
        if value is None or x is node:
            return False
        dims = self.carrying(value)
        placed = list(_place_entries(entries, value.dim()))
        if [first for entry, first, _ in placed if entry is node] != dims or self.sizes(value)[dims[0]] != length:
            return False
        index_nodes = [entry for entry, *_ in placed if isinstance(entry, fx.Node)]
        if any(map(_is_mask, index_nodes)):
            return False
        # They are broadcast to one shape, in which the rows must be the same dimension of all.
        tensors = [entry.meta["val"] for entry in index_nodes]
        return len({dim - tensor.dim() for tensor in tensors for dim in self.carrying(tensor)}) == 1


def _name(node: fx.Node) -> str:
    """Name of the torch function that a node calls; empty where it calls something else."""
    if node.op == "call_method":
        return str(node.target)
    home = getattr(node.target, "__module__", None) or "torch"
    is_torch = node.op == "call_function" and home.split(".")[0] in ("torch", "_operator")
    return getattr(node.target, "__name__", "") if is_torch else ""


def settle(expression: Any, replacements: Mapping[Any, Any]) -> Any:
    """An expression with what a trace found out about its symbols."""
    return expression if isinstance(expression, int) else expression.xreplace(replacements)


def _tensor(node: Any) -> Tensor | None:
    """A node's tensor; None where it gives something else, and for what is no node."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _is_mask(node: fx.Node) -> bool:
    value = _tensor(node)
    return value is None or value.dtype in (torch.bool, torch.uint8)


def _kept_from(node: fx.Node, rows: Rows) -> fx.Node | None:
    """The node whose entries a node has, if those that are numbers of places remain that."""
    if _item(node) is not None and isinstance(node.args[0], fx.Node) and _name(node.args[0]) in _SPREADING:
        spread: fx.Node = _operands(node.args[0])[_item(node)]
        return spread
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or (value := _tensor(source)) is None:
        return None
    name = _name(node)
    if name in _RESHAPING:
        dims = rows.carrying(value)
        is_same_kind = node.meta["val"].dtype == value.dtype  # `view` may take memory as another kind of number
        is_line = all(size == 1 for dim, size in enumerate(rows.sizes(value)) if dim not in dims)
        return source if is_line and is_same_kind else None
    if name in _GETTING:
        entries = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        plain = all(entry is None or entry is ... or type(entry) is int or isinstance(entry, slice) for entry in entries)
        return source if plain and len(node.all_input_nodes) == 1 else None
    return source if name in _KEEPING else None


def _operands(node: fx.Node) -> list[Any]:
    first = node.args[0] if node.args else ()
    return list(first) if isinstance(first, (tuple, list)) else list(node.args)


def _item(node: fx.Node) -> Any:
    """Which of a tuple's entries a node takes; None where it does something else."""
    return node.args[1] if "part_of" in node.meta and _name(node) in _GETTING and len(node.args) == 2 else None


def _taken_apart(node: fx.Node) -> tuple[fx.Node, Sequence[Any]] | None:
    """The tensor that a call indexes, and the index for each dimension."""
    name, args = _name(node), node.args
    if "part_of" in node.meta or not args or not isinstance(args[0], fx.Node) or _tensor(args[0]) is None:
        return None
    if name in _GETTING | _SETTING and len(args) > 1:
        return args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    if name in _PUTTING and len(args) > 1 and isinstance(args[1], (tuple, list)):
        return args[0], args[1]
    if name in _SELECTING and len(args) == 3 and isinstance(args[1], int):
        dim = args[1] % args[0].meta["val"].dim()
        return args[0], (*(slice(None),) * dim, args[2])
    return None


def _is_index_only(user: fx.Node, node: fx.Node) -> bool:
    """Returns True if a node is nothing but the index: not what is put there."""
    others = (*user.args[2:], *user.kwargs.values()) if _name(user) not in _SELECTING else tuple(user.kwargs.values())
    found: list[fx.Node] = []
    fx.map_arg(others, found.append)
    return node not in found


def _place_entries(entries: Sequence[Any], num_dims: int) -> Iterator[tuple[Any, int, int]]:
    """Each entry of an index with the first dimension that it is for, and for how many it is."""
    consumed = [_num_dims(entry) for entry in entries]
    dim = 0
    for place, (entry, count) in enumerate(zip(entries, consumed, strict=True)):
        if entry is ...:
            dim = num_dims - sum(consumed[place + 1 :])
        else:
            yield entry, dim, count
            dim += count


def _num_dims(entry: Any) -> int:
    if entry is None or entry is ... or isinstance(entry, bool):
        return 0
    value = _tensor(entry)
    return 1 if value is None or not _is_mask(entry) else value.dim()
