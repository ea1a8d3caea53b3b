"""Which values each stage computes for itself, so that they cross no cut: attention masks, rotary tables, position ids.

Such a value follows from the region's inputs, from sizes, constants and buffers alone, through operations that give the same
again wherever they run and cost little more than the memory that they touch. What trains, draws random numbers, changes
foreign memory, depends on data in its size, or may have an effect that the graph does not show is computed once and sent.

To know, each call in question runs once more on fake tensors, under a mode that sees the operators inside of it. All ranks
have the same graph, so all decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import FakeTensor, TorchDispatchMode, has_hooks, storage_key, tree_leaves, tree_map
from lightning_fxpipe.pytree.sizes import size_symbols, tensor_bytes
from lightning_fxpipe.reporting.messages import logger
from lightning_fxpipe.reporting.wording import node_words
from lightning_fxpipe.rng import isolated_rng, python_rng
from lightning_fxpipe.tracing.repeat import Repeat, has_known_size, is_of_torch, modes_of
from lightning_fxpipe.tracing.trace import TracedRegion
from lightning_fxpipe.user_code.snapshot import Snapshot

# Bytes of memory that may be read or written to save sending one byte. A core of the CPUs that this was measured on moves 9
# (comparisons) to 30 (sums) GB/s, gloo between two of its processes 3.9 GB/s, so there 2 to 8; between machines or GPUs it is
# 10 (NVLink) to 250 (a 100 Gbit network). A receiver also waits for a message, and not for what it computes beforehand.
TRAFFIC_PER_SENT_BYTE = 20
# Nodes with tensors that are no results.
_TAKING = ("placeholder", "get_attr", "call_module")
# A message takes time however short it is: 56 us for 4 KiB in the same measurement, in which a core moves 1 MB.
TRAFFIC_PER_MESSAGE = 512 * 1024


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """Values that stages compute for themselves.

    Attributes:
        nodes: Values that cross no cut; they have no effect, so a stage that needs none of them runs none.
        needs: The calls that have to run before each value that may be computed again, in ``nodes`` or not.
        unread: Operands whose values a call does not look at, as ``zeros_like`` or a rotary table that only takes over a dtype;
            where a stage does not have them, any tensor of the same shape and kind will do.
    """

    nodes: frozenset[fx.Node]
    needs: Mapping[fx.Node, frozenset[fx.Node]] = field(repr=False)
    unread: Mapping[fx.Node, frozenset[fx.Node]] = field(repr=False)

    def calls_for(self, used: Iterable[fx.Node], present: Collection[fx.Node] = ()) -> set[fx.Node]:
        """The calls that a stage has to run for those of the ``used`` values that it gets from nowhere.

        Args:
            used: Operands and results of the stage's own calls.
            present: Values that the stage has: received ones, and results of its own calls.
        """
        return _closure((node for node in used if node in self.nodes), self.needs, present)


def _closure(
    nodes: Iterable[fx.Node], needs: Mapping[fx.Node, Iterable[fx.Node]], present: Collection[fx.Node] = ()
) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and node not in present:
            found.add(node)
            waiting.extend(needs[node])
    return found


def find_recomputed(traced: TracedRegion, is_kept_apart: Callable[[fx.Node], bool]) -> Recomputation:
    """Decides which values of a graph each stage computes for itself.

    The decision is made for each value without regard to where the cuts fall: it is computed again if that is cheaper for a
    stage than to receive it across one cut. A value that must be passed on by further stages is sent more often, and at most
    computed as often, so what holds for one cut holds for all.

    Args:
        traced: The graph.
        is_kept_apart: Whether a ``get_attr`` or ``call_module`` node uses a tensor that only some stages may have.
    """
    apart = frozenset(node for node in traced.graph.nodes if node.op in _TAKING and is_kept_apart(node))
    hooked = frozenset(node for node in traced.graph.find_nodes(op="call_module") if _has_hooks(traced.root, node))
    key = find_recomputed, apart, hooked
    if key not in traced.known:
        traced.known[key] = _find_recomputed(traced, apart, hooked)
    found: Recomputation = traced.known[key]
    return found


def _find_recomputed(traced: TracedRegion, apart: Collection[fx.Node], hooked: Collection[fx.Node]) -> Recomputation:
    with isolated_rng():
        trial = _Trial(traced, apart, hooked)
        trial.run()
    work, operands = trial.work, trial.operands
    groups = _groups(traced, operands)
    needs = {node: frozenset().union(group, *(operands[member] for member in group)) - {node} for node, group in groups.items()}
    calls = groups.keys()
    chosen = {node for node in calls if _is_cheaper(groups[node], needs, work)}
    changed = _changed_storages(traced)
    while True:
        # A stage receives memory as it was at the cut, so what reads such memory is not computed again from its beginning.
        spoiled = {node for node in calls - chosen if _storages(node) & changed}
        kept = {node for node in chosen if not _closure([node], needs) & spoiled}
        if kept == chosen:
            break
        chosen = {node for node in kept if groups[node] <= kept}
    for node in reversed(traced.graph.nodes):
        users = {user for member in groups.get(node, ()) for user in member.users} - groups.get(node, frozenset())
        if users and users <= chosen:
            chosen |= groups[node]  # nothing else uses it, so it runs where they run
    return Recomputation(nodes=frozenset(chosen), needs=needs, unread=trial.unread)


def _has_hooks(root: nn.Module, node: fx.Node) -> bool:
    return any(map(has_hooks, root.get_submodule(str(node.target)).modules()))


def _is_cheaper(group: frozenset[fx.Node], needs: Mapping[fx.Node, Iterable[fx.Node]], work: Mapping[fx.Node, int]) -> bool:
    outward = [node for node in group if any(user not in group for user in node.users) and isinstance(_value(node), Tensor)]
    num_bytes = sum(tensor_bytes(node.meta["val"]) for node in outward)
    saved = TRAFFIC_PER_SENT_BYTE * num_bytes + TRAFFIC_PER_MESSAGE * len(outward)
    return sum(work[node] for node in _closure(group, needs)) <= saved


def _groups(traced: TracedRegion, operands: Mapping[fx.Node, set[fx.Node]]) -> dict[fx.Node, frozenset[fx.Node]]:
    """Groups nodes that are recomputed together: the parts of one result, and memory with everything that changes it.

    Leaves out calls whose operands, or whose memory, other calls have a part in that do not run again.
    """
    together: dict[Any, set[fx.Node]] = {}
    changed = _changed_storages(traced)
    for node in traced.graph.nodes:
        for key in _storages(node) & changed:
            together.setdefault(key, set()).add(node)
        owner = node.meta.get("part_of")
        if owner is not None:
            together.setdefault(owner, {owner}).add(node)
    calls = set(operands)
    while True:
        torn = {node for members in together.values() if not members <= calls for node in members}
        left = {node for node in calls - torn if operands[node] <= calls}
        if left == calls:
            break
        calls = left
    group_of = {node: {node} for node in calls}
    for members in together.values():
        if members <= calls:
            merged = set[fx.Node]().union(*(group_of[node] for node in members))
            group_of.update(dict.fromkeys(merged, merged))
    return {node: frozenset(group) for node, group in group_of.items()}


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _storages(node: fx.Node) -> set[int]:
    """Memory that a node changes or gives a name to."""
    value = _value(node)
    changed: set[int] = node.meta.get("mutated_storages", set())
    return changed | {storage_key(value)} if isinstance(value, Tensor) else changed


def _changed_storages(traced: TracedRegion) -> set[int]:
    return {key for node in traced.graph.nodes for key in node.meta.get("mutated_storages", ())}


# ------------------------------------------------------------------------------------------------------- the trial


class _Unsuitable(Exception):
    """A call may not run again."""


class _Trial:
    """Runs, on fake tensors of the example's sizes, every call that depends on no parameter.

    Attributes:
        work: Bytes of memory that each suitable call touches.
        operands: The calls that it takes values from.
        unread: Other operands, at whose values it does not look.
    """

    def __init__(self, traced: TracedRegion, apart: Collection[fx.Node], hooked: Collection[fx.Node]) -> None:
        self.work: dict[fx.Node, int] = {}
        self.operands: dict[fx.Node, set[fx.Node]] = {}
        self.unread: dict[fx.Node, frozenset[fx.Node]] = {}
        self._traced = traced
        self._apart, self._hooked = apart, hooked
        self._changed = _changed_storages(traced)
        self._repeat = Repeat(traced)
        self._results: dict[fx.Node, Any] = {}

    def run(self) -> None:
        """Fills the attributes."""
        with self._repeat.active():
            for node in self._traced.graph.nodes:
                if node.op in ("placeholder", "get_attr"):
                    if self._is_source(node):
                        self._results[node] = self._repeat.blank(node)
                elif node.op != "output" and self._may_run(node):
                    try:
                        self._run_node(node)
                    except Exception as error:  # whatever it is that it cannot do without data, it stays where it is
                        logger.debug("Not recomputed in each stage that uses it: %s (%s)", node_words(node), error)

    def _is_source(self, node: fx.Node) -> bool:
        """Returns True if every stage can have the same tensor: nothing changes it, and nothing trains it."""
        value: Tensor = _value(node)
        return not value.requires_grad and storage_key(value) not in self._changed and node not in self._apart

    def _may_run(self, node: fx.Node) -> bool:
        """Returns False if a node is known, without running it, to be unfit."""
        if not all(operand in self._results or self._can_be_blank(operand) for operand in node.all_input_nodes):
            return False
        value = _value(node)
        if isinstance(value, Tensor) and (value.requires_grad or not has_known_size(value)):
            return False
        if not all(self._repeat.is_known(symbol) for symbol in size_symbols((node.args, node.kwargs))):
            return False
        if node.op == "call_module":
            own = node.meta.get("module_storages", frozenset())
            return not (node in self._apart or own & self._changed or node in self._hooked)
        return is_of_torch(node)

    def _can_be_blank(self, node: fx.Node) -> bool:
        value = _value(node)
        if not node.op.startswith("call") or not isinstance(value, Tensor) or not has_known_size(value):
            return False
        return self._traced.world.is_contiguous(value)

    def _run_node(self, node: fx.Node) -> None:
        blanks = {operand: self._repeat.blank(operand) for operand in node.all_input_nodes if operand not in self._results}
        with modes_of(node), _OperatorWatch(blanks.values()) as watch:
            result = self._repeat.call(node, self._results | blanks, partial(self._call_module, watch))
        blank = {storage_key(tensor) for tensor in blanks.values()}
        if any(not isinstance(tensor, FakeTensor) or storage_key(tensor) in blank for tensor in tensors_in(result)):
            raise _Unsuitable("it returns a tensor that it did not compute")
        self._results[node] = result
        self.work[node] = watch.num_bytes
        self.unread[node] = frozenset(blanks)
        self.operands[node] = {
            operand
            for operand in node.all_input_nodes
            if operand not in blanks and operand.op not in ("placeholder", "get_attr")
        }

    def _call_module(self, watch: _OperatorWatch, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a module as in training and as in evaluation: it must do the same, and keep nothing of it."""
        runs = []
        for training in (False, True):
            watch.reset()
            with self._repeat.module_on_fakes(module):
                for child in module.modules():
                    child.training = training
                result = call_without_effect(module, args, kwargs)
            runs.append(watch.seen)
        if runs[0] != runs[1]:
            raise _Unsuitable("it behaves differently in training and evaluation")
        return result


def call_without_effect(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns a module's result. Raises an exception if it changes its own state or draws random numbers of Python's."""
    before, generators = Snapshot({"self": module}), python_rng()
    result = module(*args, **kwargs)
    if before.changed_names() or python_rng() != generators:
        raise _Unsuitable("it changes its own state or draws random numbers")
    return result


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a call's arguments or result."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class _OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators that a call consists of, and refuses all but those known to be cheap and to repeat themselves.

    Args:
        blanks: Tensors whose values may not be looked at.
    """

    def __init__(self, blanks: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blanks = tuple(blanks)
        self.reset()

    def reset(self) -> None:
        """Forgets what was seen."""
        self.num_bytes = 0
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = str(func).split(".")[1]
        if func.namespace == "prim" or name == "lift_fresh":  # asks about a tensor; takes one that is written out in the code
            return result
        plain = tree_map(lambda leaf: (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        self.seen.append(f"{func} {plain}")
        operands, results = tensors_in((args, kwargs)), tensors_in(result)
        if not all(isinstance(operand, FakeTensor) for operand in operands):
            raise _Unsuitable(f"{func} reads a tensor that is not an input")
        if name in READ_NOTHING:
            operands = []
        if any(operand is blank for operand in operands for blank in self._blanks):
            raise _Unsuitable(f"{func} reads the values of inputs or parameters")
        if func.is_view:
            return result
        if not _repeats_itself(func, results):
            raise _Unsuitable(f"{func} is not known to be cheap and deterministic")
        self.num_bytes += sum(map(tensor_bytes, (*operands, *results)))
        if name in _PRODUCTS:
            self.num_bytes += tensor_bytes(results[0]) * int(operands[-1].shape[-2])
        return result


def _repeats_itself(func: Any, results: list[Tensor]) -> bool:
    namespace, name, overload = str(func).split(".")
    name = name if name.startswith("_") else name.rstrip("_")  # in place it is the same operator
    if namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if name == "cumsum":  # on GPUs in an order that varies, which matters to fractions only
        return not any(result.is_floating_point() for result in results)
    out_of_place = getattr(getattr(torch.ops.aten, name, None), overload, func)
    return name in READ_NOTHING or name in _CHEAP or name in _PRODUCTS or torch.Tag.pointwise in out_of_place.tags


# A product is counted as if it read its second operand anew for each element, so only a narrow one, such as that of positions
# with frequencies, is cheap.
_PRODUCTS = frozenset(["mm", "bmm"])
# They take nothing from a tensor but its shape and kind.
READ_NOTHING = frozenset(
    "full_like zeros_like ones_like empty_like new_full new_zeros new_ones new_empty new_empty_strided".split()  # noqa: SIM905
)
# Besides those that work on each element by itself: all take time in proportion to their operands and results.
_CHEAP = frozenset(
    """arange full zeros ones empty empty_strided scalar_tensor eye linspace tril_indices triu_indices fill zero copy clone
    _to_copy _unsafe_view cat stack repeat flip roll constant_pad_nd tril triu index index_select gather embedding masked_fill
    sum mean any all amax amin max min argmax argmin _assert_async""".split()  # noqa: SIM905
)
