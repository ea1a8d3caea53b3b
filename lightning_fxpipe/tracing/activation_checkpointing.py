"""Activation checkpointing inside a graph: what the model runs under ``torch.utils.checkpoint`` a stage runs under it too,
and so modules of which the user wants that.

While recording, a call of ``checkpoint`` only marks the nodes made inside it; a cut may fall between them as anywhere. When a
stage is built, its nodes with the same mark become one node that runs them under a checkpoint of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from lightning_fxpipe._compat.torch import storage_key


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One call of ``checkpoint`` by the model.

    Attributes:
        options: What it was called with, but for the function and its arguments.
    """

    options: Mapping[str, Any] = field(default_factory=dict)


def marks_of_modules(nodes: Iterable[fx.Node], paths: Collection[str]) -> dict[fx.Node, Checkpoint]:
    """Marks for the calls of some modules, each call by itself, as if the model had made them under a checkpoint.

    What the model itself recomputes inside of one is left to it. A part of a call that changes in place what another stage has
    made gets none: the next time it would change it once more.

    Args:
        nodes: Of a traced region, those of one stage, in order.
        paths: Of the modules.
    """
    runs: list[tuple[str, list[fx.Node]]] = []
    last: str | None = None
    for node in nodes if paths else ():
        owner = None if node.meta.get("checkpoints") else _owner(str(node.meta["module_path"]), paths)
        if owner is not None and owner == last:
            runs[-1][1].append(node)
        elif owner is not None:
            runs.append((owner, [node]))
        last = owner
    marks: dict[fx.Node, Checkpoint] = {}
    for _, run in runs:
        made = {storage_key(value) for node in run if isinstance(value := node.meta.get("val"), Tensor)}
        if all(set(node.meta.get("mutated_storages", ())) <= made for node in run):
            marks |= dict.fromkeys(run, Checkpoint())
    return marks


def _owner(path: str, paths: Collection[str]) -> str | None:
    """The outermost of some modules that another is, or lies in."""
    parts = path.split(".")
    return next((prefix for end in range(1, len(parts) + 1) if (prefix := ".".join(parts[:end])) in paths), None)


def run_checkpoints(graph: fx.Graph, owners: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Makes one node of each run of nodes that were recorded under a checkpoint.

    Args:
        graph: A stage's graph; changed in place.
        owners: What its ``call_module`` and ``get_attr`` nodes refer to.

    Returns:
        The modules that are called inside the new nodes, by their names in the stage.
    """
    inside: dict[str, nn.Module] = {}
    marks = {node: node.meta.get("checkpoints") or () for node in graph.nodes}
    for mark in dict.fromkeys(mark[0] for mark in marks.values() if mark):
        nodes = _between(graph, mark, marks)
        inside.update({str(node.target): owners[str(node.target)] for node in nodes if node.op == "call_module"})
        _collapse(graph, owners, nodes, mark)
    return inside


def _between(graph: fx.Graph, mark: Checkpoint, marks: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """The nodes from the first to the last with a mark, in order, sizes and the like between them included."""
    order = list(graph.nodes)
    places = [place for place, node in enumerate(order) if marks.get(node, ())[:1] == (mark,)]
    span = order[places[0] : places[-1] + 1]
    return [node for node in span if node.op not in ("get_attr", "placeholder", "output")]


def _collapse(graph: fx.Graph, owners: Mapping[str, Any], nodes: list[fx.Node], mark: Checkpoint) -> None:
    chosen = set(nodes)
    taken = list(dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in chosen))
    given = [node for node in nodes if any(user not in chosen for user in node.users)]
    body = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: body.placeholder(f"taken_{index}") for index, node in enumerate(taken)}
    for node in nodes:
        copies[node] = body.node_copy(node, copies.__getitem__)
        copies[node].meta["checkpoints"] = (node.meta.get("checkpoints") or ())[1:]
    body.output(tuple(copies[node] for node in given))
    nested = run_checkpoints(body, owners)
    module = fx.GraphModule(dict(owners), body, class_name="Checkpointed")
    for name, submodule in nested.items():
        module.add_submodule(name, submodule)
    _move_up(graph, taken, nodes[0])
    with graph.inserting_before(nodes[0]):
        call = graph.call_function(_under_checkpoint(module, mark), tuple(taken))
        call.meta.update(module_path=nodes[0].meta.get("module_path"), source=nodes[0].meta.get("source"))
        results = [graph.call_function(operator.getitem, (call, index)) for index in range(len(given))]
    for node, result in zip(given, results, strict=True):
        result.meta.update(node.meta, checkpoints=())
        node.replace_all_uses_with(result)
    for node in reversed(nodes):
        graph.erase_node(node)


def _move_up(graph: fx.Graph, nodes: Iterable[fx.Node], place: fx.Node) -> None:
    """Tensors of the model that are looked up between the nodes are looked up before them."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in nodes:
        if order[node] > order[place]:
            place.prepend(node)


def _under_checkpoint(module: fx.GraphModule, mark: Checkpoint) -> Callable[..., Any]:
    def checkpointed(*values: Any) -> Any:
        return checkpoint(module.forward, *values, use_reentrant=False, **mark.options)

    return checkpointed
