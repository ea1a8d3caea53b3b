"""One recording confirms another: a graph that depends on chance, as with layer drop, would freeze one of the outcomes.

A call is recorded twice, and both graphs must have the same calls. Where a step is traced again, as something that it reads has
changed, its earlier trace does for one of the two; and what that has learned about the code is known from the start.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from lightning_fxpipe.errors import TraceError
from lightning_fxpipe.tracing.signals import Learned
from lightning_fxpipe.user_code.objects import structure_made

_NUMBER = re.compile(r"_\d+$")  # by which fx makes names unique


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """The part of a trace that later recordings are compared with, and begin with.

    Attributes:
        calls: The graph's calls in words.
        drew: True if the code has drawn from Python's or numpy's generators.
        learned: The recorder's knowledge.
        is_confirmed: True if another recording had the same calls.
    """

    calls: tuple[tuple[str, str, str], ...]
    drew: bool
    learned: Learned
    is_confirmed: bool = False

    @classmethod
    def of_graph(cls, graph: fx.Graph, drew: bool, learned: Learned) -> Recording:
        """Returns that of a graph which is just written, in the order in which the calls were made."""
        names = _names(graph)

        def words(node: fx.Node) -> tuple[str, str, str]:
            args, kwargs = (map_arg(given, names.__getitem__) for given in (node.args, node.kwargs))
            return node.op, _name(node), f"{args} {kwargs}"

        return cls(calls=tuple(map(words, compared_calls(graph))), drew=drew, learned=learned)

    def known_again(self, given: set[tuple[Any, ...]]) -> Learned:
        """Returns the knowledge for another recording, which has ``given`` other values, and may learn more."""
        return self.learned.known_again(given, has_same_state=not self.is_confirmed)

    def confirms(self, other: Recording) -> bool:
        """True if another recording need not be made a second time; one of the same call and state decides in any case."""
        return not self.is_confirmed or self.calls == other.calls


def compared_calls(graph: fx.Graph) -> list[fx.Node]:
    """Returns the calls of a graph by which recordings are told apart.

    A table that a block makes in its first call only is a further result of that call: it makes no difference while nothing in
    the graph uses it.
    """
    return [node for node in graph.nodes if not _is_all_that_is_used(node)]


def _is_all_that_is_used(node: fx.Node) -> bool:
    """True for a module's own result, where nothing uses the tensors that it leaves on itself besides."""
    if node.target is not operator.getitem or not isinstance(call := node.args[0], fx.Node):
        return False
    is_only_user = [*call.users] == [node] and node.args[1:] == (0,)
    return is_only_user and bool(call.meta.get("sides")) and not call.meta.get("inner_results")


class _Word(str):  # stands for a node among arguments, which are written by their repr
    __repr__ = str.__str__


def _names(graph: fx.Graph) -> dict[fx.Node, _Word]:
    """The names of a graph's nodes, numbered without those that make no difference."""
    names: dict[fx.Node, _Word] = {}
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        if _is_all_that_is_used(node):
            names[node] = names[node.args[0]]
            continue
        name = _NUMBER.sub("", node.name) if node.op in ("call_function", "call_method") else str(node.target).replace(".", "_")
        names[node] = _Word(f"{name}:{counts[name]}" if counts[name] else name)
        counts[name] += 1
    return names


def _name(node: fx.Node) -> str:
    made = structure_made(node)
    if made is not None:  # the plain values in them, arrays among these, are no arguments
        return f"object {made.digest():x}"
    return str(getattr(node.target, "__qualname__", node.target))


def check_deterministic(first: Recording, second: Recording, name: str, where: str) -> None:
    """Raises :class:`TraceError` if two recordings of one call differ, or if its code draws."""
    differing = [a for a, b in zip_longest(first.calls, second.calls) if a != b]
    if not differing and not (first.drew or second.drew):
        return
    raise TraceError(
        f"The code of {name} may take a different path each time it runs.",
        where=where,
        observed=f"{differing[0]} in one of two runs only" if differing else "its Python draws random numbers during tracing",
        expected="the same operations each time",
        todo="Move the random choice (layer drop, stochastic depth) into the affected submodules.",
    )
