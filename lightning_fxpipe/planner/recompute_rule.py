"""Which modules' activations are not kept for the backward pass, but computed again in it (Chen et al., arXiv 1604.06174).

What is taken is a *block*: an entry of the outermost ``ModuleList`` or ``Sequential``, such as a layer of a transformer, or
else a module that the graph calls as a whole. A block keeps what it gets, and the rest is there only while it goes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import storage_key
from lightning_fxpipe.errors import PartitionError
from lightning_fxpipe.planner.cost import Chain, Unit
from lightning_fxpipe.planner.load import Load
from lightning_fxpipe.planner.unit_costs import UnitCosts
from lightning_fxpipe.reporting.wording import error_words
from lightning_fxpipe.simulation.by_name import simulate
from lightning_fxpipe.simulation.costs import StageCosts
from lightning_fxpipe.tracing.repeat import Repeat
from lightning_fxpipe.user_code.undo import undo_after

# A module class, or a pattern of module paths.
ModuleChoice = type[nn.Module] | str
ActivationCheckpointing = bool | Literal["auto"] | ModuleChoice | Sequence[ModuleChoice] | Set[ModuleChoice]


@dataclass(frozen=True, kw_only=True)
class RecomputeRule:
    """Modules that the user wants checkpointed.

    Attributes:
        blocks: No blocks, all blocks, or as few as the memory requires.
        patterns: Module paths to checkpoint instead of blocks, with ``*`` and ``?``.
        classes: Module classes to checkpoint instead of blocks.
    """

    blocks: Literal["none", "all", "auto"] = "none"
    patterns: tuple[str, ...] = ()
    classes: tuple[type[nn.Module], ...] = ()

    @property
    def is_plain(self) -> bool:
        """True if no module has to be checkpointed, whatever the memory."""
        return not self.names_modules and self.blocks in ("none", "auto")

    @property
    def is_none(self) -> bool:
        """True if no module is checkpointed."""
        return not self.names_modules and self.blocks == "none"

    @property
    def names_modules(self) -> bool:
        """True if the user names modules rather than blocks."""
        return bool(self.patterns or self.classes)

    @classmethod
    def of(cls, value: ActivationCheckpointing) -> RecomputeRule:
        """Reads the option ``activation_checkpointing``."""
        if isinstance(value, bool):
            return cls(blocks="all" if value else "none")
        if value == "auto":
            return cls(blocks="auto")
        chosen = (value,) if isinstance(value, (str, type)) else tuple(value)
        patterns = tuple(one for one in chosen if isinstance(one, str))
        return cls(patterns=patterns, classes=tuple(one for one in chosen if not isinstance(one, str)))

    def modules(self, costs: UnitCosts, cuts: Sequence[int], load: Load | None) -> tuple[str, ...]:
        """Returns the paths of the modules whose activations are recomputed.

        Args:
            costs: The table of the chain.
            cuts: Position of the last unit of each stage but the last.
            load: How the stages will run, which decides if they are as few as the memory requires.

        Raises:
            PartitionError: There is no such module, or it changes what it would need once more.
        """
        chain = costs.chain
        if self.names_modules:
            return _matching(chain, self)
        if self.blocks == "none" or (self.blocks == "auto" and (load is None or not load.memory_bytes)):
            return ()
        blocks = [block for block in blocks_of(chain) if block.change is None and _trains(chain, block)]
        if self.blocks == "all" or load is None:
            return tuple(block.path for block in blocks)
        return _needed(costs, cuts, blocks, load)


@dataclass(frozen=True)
class Block:
    """A block of a chain.

    Attributes:
        path: Of its module.
        first, last: Positions of its units.
        change: What it changes that it would need once more to run again; None for nothing.
    """

    path: str
    first: int
    last: int
    change: str | None


def blocks_of(chain: Chain) -> list[Block]:
    """The blocks of a chain, in their order; a module that is called again elsewhere counts once, where it is first."""
    found: dict[str, list[int]] = {}
    for position, unit in enumerate(chain.units):
        path = _block_path(chain.traced.root, unit)
        if path and not unit.is_recomputed:
            found.setdefault(path, []).append(position)
    return [Block(path, at[0], at[-1], _change(chain, path)) for path, at in found.items()]


def _block_path(root: nn.Module, unit: Unit) -> str:
    node = unit.nodes[0]
    path = str(node.target) if node.op == "call_module" else str(node.meta.get("module_path") or "")
    parts = path.split(".")
    for end in range(1, len(parts)):
        if isinstance(root.get_submodule(".".join(parts[:end])), (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            return ".".join(parts[: end + 1])
    return path if node.op == "call_module" else ""


def _nodes_in(chain: Chain, path: str) -> Iterator[fx.Node]:
    for node in chain.traced.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            own = str(node.meta.get("module_path") or "")
            if own == path or own.startswith(f"{path}."):
                yield node


def _change(chain: Chain, path: str) -> str | None:
    """Names the line where a module changes in place a tensor that it has not made itself, or others change its input or
    result.
    """
    nodes = dict.fromkeys(_nodes_in(chain, path))
    inside = _memory(node for node in nodes)
    outside = _memory(operand for node in nodes for operand in node.all_input_nodes if operand not in nodes)
    has_begun = False
    for node in chain.traced.graph.nodes:
        has_begun |= node in nodes
        changed = set(node.meta.get("mutated_storages", ()))
        # What comes before has changed what is its own to see, and gives the same again.
        if has_begun and (changed & outside or (changed & inside if node not in nodes else changed - inside)):
            return str(node.meta.get("source") or node.name)
    return next((found for node in nodes if node.op == "call_module" and (found := _change_of_call(chain, node))), None)


def _change_of_call(chain: Chain, node: fx.Node) -> str | None:
    """Describes a change or a failure of the Python of a module that is called as a whole, on tensors without data."""
    if node.meta.get("alike") is not None:
        return None  # known to change nothing
    repeat, module = Repeat(chain.traced), chain.traced.root.get_submodule(str(node.target))
    if any(not isinstance(operand.meta.get("val"), Tensor) for operand in node.all_input_nodes):
        return f"{node.meta.get('source') or node.name}, in an object that is passed to it"
    try:
        with repeat.active(), torch.enable_grad(), repeat.module_on_fakes(module), undo_after(module) as undone:
            values = {operand: repeat.blank(operand) for operand in node.all_input_nodes}
            repeat.call(node, values, lambda module, args, kwargs: module(*args, **kwargs))
    except Exception as error:
        return error_words(error)
    return f"its own attributes, in {type(module).__name__}" if undone.has_changed_any else None


def _memory(nodes: Iterable[fx.Node]) -> set[int]:
    return {storage_key(value) for node in nodes if isinstance(value := node.meta.get("val"), Tensor)}


def _trains(chain: Chain, block: Block) -> bool:
    """Returns True if a block keeps anything: what hangs on nothing that trains keeps nothing."""
    nodes = (node for unit in chain.units[block.first : block.last + 1] for node in unit.nodes)
    return any(isinstance(value := node.meta.get("val"), Tensor) and value.requires_grad for node in nodes)


def _matching(chain: Chain, rule: RecomputeRule) -> tuple[str, ...]:
    modules = {path: module for path, module in chain.traced.root.named_modules() if path}
    found: set[str] = set()
    choices: list[ModuleChoice] = [*rule.patterns, *rule.classes]
    for choice in choices:
        matching = {path for path, module in modules.items() if _is_chosen(path, module, choice)}
        if not matching:
            raise PartitionError(
                "activation_checkpointing matches no module of the model.",
                observed=choice if isinstance(choice, str) else f"{choice.__module__}.{choice.__qualname__}",
                expected="paths as model.named_modules() yields them, with * and ? as wildcards, or classes of these modules",
                todo="Correct the pattern or the class, or set activation_checkpointing=True for all blocks.",
            )
        found |= matching
    chosen = [path for path in modules if path in found]
    outermost = [path for path in chosen if not any(path.startswith(f"{other}.") for other in chosen)]
    for path in outermost:
        change = _change(chain, path)
        if change is not None:
            raise PartitionError(
                "Activations of a module cannot be checkpointed, because recomputation would repeat a change in place.",
                where=path,
                observed=f"an input, a result or another tensor not created by the module is changed in place, at {change}",
                expected="a module that returns the same result when it runs again",
                todo="Exclude it from activation_checkpointing, as is required for modules with BatchNorm.",
            )
    return tuple(outermost)


def _is_chosen(path: str, module: nn.Module, choice: ModuleChoice) -> bool:
    return fnmatchcase(path, choice) if isinstance(choice, str) else isinstance(module, choice)


# ---------------------------------------------------------------------- as few as the memory needs


def _needed(costs: UnitCosts, cuts: Sequence[int], blocks: Sequence[Block], load: Load) -> tuple[str, ...]:
    """Blocks of the ranks that lack memory, those first that save the most bytes for what they compute."""
    stages = [*pairwise((0, *(cut + 1 for cut in cuts), len(costs.chain.units)))]
    price = {block: _flops_per_byte(costs, block) for block in blocks}
    waiting = [
        sorted((block for block in blocks if start <= block.first and block.last < end), key=price.__getitem__)
        for start, end in stages
    ]
    taken: list[list[Block]] = [[] for _ in stages]
    memories, states = load.in_pipeline(load.memory_bytes), costs.states(load.optimizer_bytes_per_byte)
    while True:
        found = simulate(
            [_stage(costs, states.of(*stage), stage, blocks, load.scale) for stage, blocks in zip(stages, taken, strict=True)],
            num_microbatches=load.num_microbatches,
            schedule=load.schedule,
            stages_per_rank=load.stages_per_rank,
        )
        lacking = [rank for rank, peak in enumerate(found.peak_bytes) if peak > memories[rank]]
        more = [stage for rank in lacking for stage in found.table.stages_of(rank) if waiting[stage]]
        if not more:
            return tuple(block.path for blocks in taken for block in blocks)
        stage = min(more, key=lambda stage: price[waiting[stage][0]])
        taken[stage].append(waiting[stage].pop(0))


def _flops_per_byte(costs: UnitCosts, block: Block) -> float:
    saved = sum(costs.kept_bytes[block.first : block.last + 1]) - costs.chain.site(block.first - 1).num_bytes
    units = costs.operators[block.first : block.last + 1]
    flops = sum(operator.flops + operator.num_bytes for unit in units for operator in unit.forward)
    return flops / saved if saved > 0 else float("inf")


def _stage(costs: UnitCosts, state_bytes: int, stage: tuple[int, int], blocks: Sequence[Block], scale: float) -> StageCosts:
    """Bytes of a stage whose blocks are recomputed; each part of its work takes one second."""
    again = [sum(costs.kept_bytes[block.first : block.last + 1]) for block in blocks]
    inputs = sum(costs.chain.site(block.first - 1).num_bytes for block in blocks)
    kept = scale * (sum(costs.kept_bytes[slice(*stage)]) - sum(again) + inputs)
    return StageCosts(
        forward_seconds=1.0,
        input_backward_seconds=1.0,
        weight_backward_seconds=1.0,
        activation_bytes=kept,
        weight_bytes=kept,
        state_bytes=state_bytes + scale * max(again, default=0),  # a block at a time is there as a whole
    )
