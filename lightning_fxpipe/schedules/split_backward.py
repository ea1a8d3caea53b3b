"""Whether the backward pass of a microbatch may be split: first the gradients of its inputs, and those of weights later.

That is what takes the bubble out of a zero-bubble schedule (arXiv 2401.10241, section 2). torch runs autograd twice for it, and
begins the second time inside the graph, where the way to a weight leaves that to the inputs
(``torch.distributed.pipelining._backward``). Some graphs do not bear that. Their backward pass runs at once, where its first
half should: the result is the same, and the bubble is what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from lightning_fxpipe._compat.autograd import has_gradient_hooks, unused_inputs_may_be_split_off
from lightning_fxpipe._compat.torch import patched_attributes


class HookWatch:
    """Notes hooks on gradients that are set in a block: where a graph is begun inside, they could run twice."""

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


def may_split(received: Iterable[Tensor], outputs: Collection[Tensor], parameters: Collection[nn.Parameter]) -> bool:
    """Whether the backward pass of what a stage has computed may be split.

    Not where

    - no input trains: torch finds the ways to weights by walking from the inputs;
    - an input that trains has no part in what is computed: before 2.13 torch raises at it;
    - a weight is reached that is none of the stage's own: its gradient would be lost;
    - an output hangs on weights alone, as a second tower that begins in the stage: its gradient would reach none of them;
    - the ways to a weight leave that to the inputs at several places: what lies between them would run for each;
    - an operation is one of Python (``torch.autograd.Function``, activation checkpointing that calls ``backward``, hooks of
      modules), which could run twice;
    - a weight has hooks on its gradient, which would run for none, or twice.

    Args:
        received: The stage's inputs.
        outputs: What it has computed of them.
        parameters: Its parameters.
    """
    inputs = {id(tensor) for tensor in received if tensor.requires_grad}
    if not inputs or any(has_gradient_hooks(parameter) for parameter in parameters):
        return False
    users = _users(outputs)
    leaves = {node: id(leaf) for node in users if (leaf := getattr(node, "variable", None)) is not None}
    known = inputs | {id(parameter) for parameter in parameters}
    if any(isinstance(node, BackwardCFunction) for node in users) or not known.issuperset(leaves.values()):
        return False
    if not (unused_inputs_may_be_split_off() or inputs <= {*leaves.values(), *map(id, outputs)}):
        return False
    on_way = _reaching([node for node, leaf in leaves.items() if leaf in inputs], users)
    if any(output.grad_fn not in on_way for output in outputs if output.grad_fn is not None):
        return False
    return _leave_once(on_way)


def _users(outputs: Iterable[Tensor]) -> dict[Any, list[Any]]:
    """The graph of some tensors: of each node those that come to it in a backward pass."""
    waiting = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    users: dict[Any, list[Any]] = {node: [] for node in waiting}
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions:
            if following is not None:
                if following not in users:
                    users[following] = []
                    waiting.append(following)
                users[following].append(node)
    return users


def _reaching(nodes: list[Any], users: Mapping[Any, list[Any]]) -> set[Any]:
    """The nodes from which a backward pass comes to some of these."""
    found, waiting = set(nodes), [*nodes]
    while waiting:
        new = [user for user in users[waiting.pop()] if user not in found]
        found.update(new)
        waiting.extend(new)
    return found


def _leave_once(on_way: Collection[Any]) -> bool:
    """Whether what is off the way to the inputs is reached from one node on it."""
    left_at: dict[Any, Any] = {}
    for place in on_way:
        waiting = [following for following, _ in place.next_functions if following is not None and following not in on_way]
        while waiting:
            node = waiting.pop()
            if node in left_at and left_at[node] is not place:
                return False
            if node not in left_at:
                left_at[node] = place
                waiting.extend(following for following, _ in node.next_functions if following is not None)
    return True
