"""Weights of the nodes of a traced region, and the bytes that each cut between them would send.

The graph is seen as a chain of *units*: a call together with the nodes that only take its result apart. A cut may fall between
two units; its cost is the bytes of the tensors alive across it, but for those that each stage computes for itself
(``planner.recompute``), and it is illegal where a stage could not be told apart from the rest without changing the
result.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import storage_key, symbolic_expression
from lightning_fxpipe.planner.recompute import Recomputation, find_recomputed
from lightning_fxpipe.planner.reorder import bring_repeated_calls_together
from lightning_fxpipe.pytree.sizes import size_symbols, tensor_bytes
from lightning_fxpipe.reporting.wording import node_words
from lightning_fxpipe.tracing.recordable import Recordable
from lightning_fxpipe.tracing.repeat import Repeat, has_known_size
from lightning_fxpipe.tracing.trace import TracedRegion


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A call and the nodes that take its result apart.

    Attributes:
        nodes: In graph order; the first is the call.
        path: Path of the module that the call came from.
        tensor_fqns: Canonical FQNs of the parameters and buffers that its stage must have for it: those that it uses, and
            those that the recomputed values follow from which it takes.
        num_parameters: Elements of the parameters that no earlier unit uses.
        is_recomputed: Whether each stage that needs its results computes them, so that it belongs to no stage.
    """

    nodes: tuple[fx.Node, ...]
    path: str
    tensor_fqns: frozenset[str]
    num_parameters: int
    is_recomputed: bool = False

    @property
    def operands(self) -> list[fx.Node]:
        """The nodes of other units that this one uses, each once."""
        operands = (operand for node in self.nodes for operand in node.all_input_nodes)
        return [*dict.fromkeys(operand for operand in operands if operand not in self.nodes)]


@dataclass(frozen=True, kw_only=True)
class CutSite:
    """The place after unit ``position``.

    Attributes:
        position: Index of the last unit before the cut; -1 for the place before all units.
        crossing: Tensors that are sent across it, in the order in which they are produced.
        num_bytes: Their size for the example microbatch.
        obstacle: Why no cut may fall here, or None.
    """

    position: int
    crossing: tuple[fx.Node, ...]
    num_bytes: int
    obstacle: str | None


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A traced region as units and the sites between them; ``sites[i]`` lies after ``units[i]``, one after the last unit
    included: what crosses that one are the region's own outputs.

    Attributes:
        num_samples: Samples of the microbatch that bytes are for; None for the example's.
    """

    traced: TracedRegion
    units: tuple[Unit, ...]
    sites: tuple[CutSite, ...]
    recomputation: Recomputation
    output_fqns: frozenset[str]  # of parameters and buffers that the region returns, or that recomputed results follow from
    changed_fqns: frozenset[str]  # of parameters and buffers that opened code changes in place
    num_samples: int | None = None

    @cached_property
    def repeat(self) -> Repeat:
        """Makes its calls again, for a microbatch of :attr:`num_samples`."""
        return Repeat(self.traced, self.num_samples)

    def of_samples(self, num_samples: int) -> Chain | None:
        """Returns the chain for a microbatch of another size, without another trace; None if the graph does not admit it."""
        sized = replace(self, num_samples=num_samples)
        if not sized.repeat.is_possible:
            return None
        sites = (
            site if site.obstacle else replace(site, num_bytes=sum(map(sized.num_bytes, site.crossing))) for site in self.sites
        )
        return replace(sized, sites=tuple(sites))

    def num_bytes(self, node: fx.Node) -> int:
        """Bytes of the tensor that a node returns."""
        if self.num_samples is None:
            return tensor_bytes(node.meta["val"])
        return math.prod(self.repeat.shape(node)) * int(node.meta["val"].dtype.itemsize)

    def allows_cut(self, position: int) -> bool:
        """True if a cut may fall after unit ``position``; a cut after a recomputed unit is the cut before it."""
        return self.sites[position].obstacle is None and not self.units[position].is_recomputed

    @cached_property
    def unused_fqns(self) -> tuple[str, ...]:
        """Parameters that no unit uses."""
        used = {fqn for unit in self.units for fqn in unit.tensor_fqns}
        return tuple(fqn for fqn, _ in self.traced.root.named_parameters() if fqn not in used)

    def site(self, position: int) -> CutSite:
        """The site after unit ``position``. Nothing crosses at -1: every rank has the region's inputs."""
        return self.sites[position] if position >= 0 else CutSite(position=-1, crossing=(), num_bytes=0, obstacle=None)


def canonical_fqns(root: nn.Module) -> dict[str, str]:
    """For every name of a parameter or buffer the first name of the same tensor; tied weights have several names."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for fqn, tensor in (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)):
        names[fqn] = first.setdefault(id(tensor), fqn)
    return names


def prelude_fqns(root: nn.Module, call: Recordable) -> tuple[str, ...]:
    """Parameters of the modules that the step calls before the region."""
    names = canonical_fqns(root)
    prefixes = tuple(f"{path}." if path else "" for path in call.prelude_paths)
    return tuple(fqn for fqn, _ in root.named_parameters() if names[fqn].startswith(prefixes)) if prefixes else ()


def node_fqns(node: fx.Node, root: nn.Module) -> Iterable[str]:
    """All names of parameters and buffers that a ``get_attr`` or ``call_module`` node uses."""
    if node.op == "get_attr":
        yield str(node.target)
    elif node.op == "call_module":
        module = root.get_submodule(str(node.target))
        for name, _ in (*module.named_parameters(), *module.named_buffers()):
            yield f"{node.target}.{name}" if node.target else name


def build_chain(traced: TracedRegion, *, kept_apart: Collection[str] = (), keep_order: bool = False) -> Chain:
    """Units and cut sites of a traced region.

    Args:
        traced: The region.
        kept_apart: FQNs of buffers that no value may be recomputed from.
        keep_order: Whether the graph's calls are in the right order already; else calls of the same module come together.
    """
    names = canonical_fqns(traced.root)
    sizes = {fqn: parameter.numel() for fqn, parameter in traced.root.named_parameters()}

    def fqns_of(nodes: Iterable[fx.Node]) -> frozenset[str]:
        sources = {s for node in nodes for s in (node, *(op for op in node.all_input_nodes if op.op == "get_attr"))}
        # A tensor that is a plain attribute or a constant has no name here: every rank has it.
        return frozenset(names[fqn] for node in sources for fqn in node_fqns(node, traced.root) if fqn in names)

    def has_parameters(unit: Iterable[fx.Node]) -> bool:
        return not sizes.keys().isdisjoint(fqns_of(unit))

    fixed = sizes.keys() | set(kept_apart)
    groups, position_of = group_calls(traced.graph)
    if not keep_order and bring_repeated_calls_together(traced.graph, groups, has_parameters):
        groups, position_of = group_calls(traced.graph)
    recomputation = find_recomputed(traced, lambda node: not fixed.isdisjoint(fqns_of([node])))
    units: list[Unit] = []
    counted: set[str] = set()
    for group in groups:
        is_recomputed = group[0] in recomputation.nodes
        operands = [operand for node in group for operand in node.all_input_nodes]
        fqns = frozenset() if is_recomputed else fqns_of([*group, *recomputation.calls_for(operands)])
        weight = sum(sizes.get(fqn, 0) for fqn in fqns - counted)
        counted |= fqns
        path = str(group[0].meta["module_path"])
        unit = Unit(nodes=tuple(group), path=path, tensor_fqns=fqns, num_parameters=weight, is_recomputed=is_recomputed)
        units.append(unit)
    results = traced.output_node.all_input_nodes
    changed = {key for node in traced.graph.nodes for key in node.meta.get("mutated_storages", ())}
    attributes = [node for node in traced.graph.nodes if node.op == "get_attr"]
    return Chain(
        traced=traced,
        units=tuple(units),
        sites=_cut_sites(traced, position_of, recomputation.nodes, len(units)),
        recomputation=recomputation,
        output_fqns=fqns_of([*(node for node in results if node in attributes), *recomputation.calls_for(results)]),
        changed_fqns=fqns_of(node for node in attributes if storage_key(node.meta["val"]) in changed),
    )


def group_calls(graph: fx.Graph) -> tuple[list[list[fx.Node]], dict[fx.Node, int]]:
    """The calls of a graph, each with the nodes that take its result apart; and in which group each is."""
    groups: list[list[fx.Node]] = []
    position_of: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        owner = node.meta.get("part_of")
        if owner is None:
            groups.append([])
        position_of[node] = len(groups) - 1 if owner is None else position_of[owner]
        groups[position_of[node]].append(node)
    return groups, position_of


def _cut_sites(
    traced: TracedRegion, position_of: Mapping[fx.Node, int], recomputed: Collection[fx.Node], num_units: int
) -> tuple[CutSite, ...]:
    # Recomputed values cross no cut, nor does what they alone are computed from.
    sendable = {node: position for node, position in position_of.items() if node not in recomputed}
    # The output counts as a use after the last unit: with a cut there, what crosses are the outputs.
    last_use = {
        node: max((position_of.get(user, num_units) for user in node.users if user not in recomputed), default=position)
        for node, position in sendable.items()
    }
    crossing: list[list[fx.Node]] = [[] for _ in range(num_units)]
    for node, position in sendable.items():
        for site in range(position, last_use[node]):
            crossing[site].append(node)
    obstacles = _aliasing_obstacles(traced, sendable, last_use, num_units)
    _add_size_obstacles(traced, sendable, obstacles)
    last_change = max((position for node, position in sendable.items() if _changes_values(node)), default=-1)
    sites = []
    for position, nodes in enumerate(crossing):
        obstacle = obstacles[position] or next((why for node in nodes if (why := _cannot_cross(node))), None)
        if obstacle is None:
            # It arrives contiguous: `view` may refuse that, and `contiguous` no longer copies, so in-place calls reach it.
            spread = [node for node in nodes if not traced.world.is_contiguous(node.meta["val"])]
            relied_on = [node for node in spread if position < last_change or _is_viewed(node, traced)]
            obstacle = (
                f"{node_words(relied_on[0])} is not contiguous, and later calls may depend on its strides"
                if relied_on
                else None
            )
        num_bytes = 0 if obstacle else sum(tensor_bytes(node.meta["val"]) for node in nodes)
        sites.append(CutSite(position=position, crossing=tuple(nodes), num_bytes=num_bytes, obstacle=obstacle))
    return tuple(sites)


def _is_viewed(node: fx.Node, traced: TracedRegion) -> bool:
    """Returns True if ``view`` is called on a tensor, or on one that takes over its layout."""
    waiting, seen = [node], {node}
    while waiting:
        source = waiting.pop()
        for user in source.users:
            value = user.meta.get("val")
            if getattr(user.target, "__name__", user.target) in _NEED_A_LAYOUT:
                return True
            if user in seen or not isinstance(value, Tensor):
                continue
            if storage_key(value) == storage_key(source.meta["val"]) or not traced.world.is_contiguous(value):
                seen.add(user)
                waiting.append(user)
    return False


_NEED_A_LAYOUT = ("view", "view_as", "unflatten", "as_strided", "view_as_complex", "view_as_real")


def _changes_values(node: fx.Node) -> bool:
    """Returns True if a call changes tensors in place, other than those that its module owns."""
    return bool(node.meta.get("mutated_storages", set()) - node.meta.get("module_storages", set()))


def _add_size_obstacles(traced: TracedRegion, position_of: Mapping[fx.Node, int], obstacles: list[str | None]) -> None:
    """A size that depends on data is known only in the stage that has the tensor."""
    known = {symbol for shape in traced.input_shapes for size in shape for symbol in getattr(size, "free_symbols", ())}
    known |= traced.numbers.places.keys()
    made_at: dict[Any, int] = {}
    for node, position in position_of.items():
        for symbol in size_symbols((node.args, node.kwargs)) - known:
            for site in range(made_at.get(symbol, position), position):
                obstacles[site] = f"{node_words(node)} uses a size that depends on data"
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, Tensor) else ():
            for symbol in getattr(symbolic_expression(size), "free_symbols", ()):
                made_at.setdefault(symbol, position)


def _cannot_cross(node: fx.Node) -> str | None:
    value: Any = node.meta.get("val")
    if not isinstance(value, Tensor):
        return f"{node_words(node)} is not a tensor"
    if value.layout is not torch.strided:
        return f"{node_words(node)} is a {value.layout} tensor"
    return None if has_known_size(value) else f"the size of {node_words(node)} depends on data"


def _aliasing_obstacles(
    traced: TracedRegion, position_of: Mapping[fx.Node, int], last_use: Mapping[fx.Node, int], num_units: int
) -> list[str | None]:
    """Sites where in-place changes forbid a cut.

    Stages exchange copies. So once memory is changed in place, two names for it must not both cross a cut before the change;
    and memory that every rank has its own copy of (inputs, buffers, parameters) must be used by one stage only.
    """
    by_storage: dict[int, list[fx.Node]] = {}
    fixed: dict[int, list[int]] = {}
    for node in traced.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        key = storage_key(value)
        if node in position_of:
            by_storage.setdefault(key, []).append(node)
        else:
            fixed.setdefault(key, []).extend(position_of.get(user, num_units) for user in node.users)
    for node, position in position_of.items():
        for key in node.meta.get("module_storages", ()):
            fixed.setdefault(key, []).append(position)
    inputs = {storage_key(node.meta["val"]) for node in traced.input_nodes}
    obstacles: list[str | None] = [None] * num_units
    for changer, changed_at in position_of.items():
        for key in changer.meta.get("mutated_storages", ()):
            aliases = by_storage.get(key, [])
            uses = [*fixed.get(key, ()), *(last_use[node] for node in aliases)]
            for site in range(num_units):
                if key in inputs and changed_at <= site:
                    obstacles[site] = f"{node_words(changer)} changes an input in place that the step may use after the call"
                if key in fixed and min(*uses, changed_at) <= site < max(*uses, changed_at):
                    keeps = changer.meta.get("keeps", {}).get(key)
                    obstacles[site] = keeps or f"{node_words(changer)} changes in place a tensor that both sides use"
                alive = [node for node in aliases if position_of[node] <= site < last_use[node]]
                if site < changed_at and len(alive) > 1:
                    obstacles[site] = f"{node_words(changer)} changes two tensors in place that share their memory"
    return obstacles
