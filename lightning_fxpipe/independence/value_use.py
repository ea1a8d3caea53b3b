"""Dependence of a call's result on the values of a tensor, or only on its shape and kind.

A rotary table takes over a dtype, an embedding of positions a length: the same for every sample, though a tensor of the batch
goes in. To know, the call is made once more on fake tensors, under a mode that sees the operators inside of it and follows
what is computed from the tensor's values. Where that cannot be seen, the values count as used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.operators import written_arguments
from lightning_fxpipe._compat.torch import FakeTensor, TorchDispatchMode, storage_key
from lightning_fxpipe.planner.recompute import READ_NOTHING, call_without_effect, tensors_in
from lightning_fxpipe.pytree.sizes import size_symbols
from lightning_fxpipe.reporting.messages import logger
from lightning_fxpipe.reporting.wording import node_words
from lightning_fxpipe.rng import isolated_rng
from lightning_fxpipe.tracing.repeat import Repeat, has_known_size, is_of_torch, modes_of
from lightning_fxpipe.user_code.objects import makes_objects


def made_without_values(repeat: Repeat, group: Sequence[fx.Node], following: Collection[fx.Node]) -> frozenset[fx.Node]:
    """The tensors that a call gives without looking at the values of some others.

    Args:
        repeat: Makes the calls of the graph again.
        group: The call, and the nodes that take its result apart.
        following: The others.
    """
    values: dict[fx.Node, Any] = {}
    followed = _Followed()

    def call_module(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with repeat.module_on_fakes(module):
            return call_without_effect(module, args, kwargs)

    def make(node: fx.Node) -> None:
        """Makes a call, with tensors without data as its operands; other operands, such as a cache, are made by their calls."""
        for operand in node.all_input_nodes:
            value = operand.meta.get("val")
            if operand in values:
                continue
            if not isinstance(value, Tensor):
                make(operand)
            elif has_known_size(value):
                values[operand] = repeat.blank(operand)
                if operand in following:
                    followed.start_with(values[operand])
            else:
                raise ValueError(f"the size of {node_words(operand)} depends on data")
        if not (node.op == "call_module" or is_of_torch(node) or makes_objects(node) or "part_of" in node.meta):
            raise ValueError(f"{node_words(node)} is a call that cannot be repeated")
        if node.meta.get("mutated_storages") or not all(map(repeat.is_known, size_symbols((node.args, node.kwargs)))):
            raise ValueError(f"{node_words(node)} changes memory, or uses a size that depends on data")
        values[node] = repeat.call(node, values, call_module)

    try:
        with isolated_rng(), repeat.active(), modes_of(group[0]), followed:
            for node in group:
                make(node)
            results = {node: values[node] for node in group if isinstance(values[node], Tensor)}
            return frozenset(node for node, result in results.items() if not followed.reaches(result))
    except Exception as error:  # whatever it is that it cannot do without data
        logger.debug("Cannot determine if %s reads tensor values (%s)", node_words(group[0]), error)
        return frozenset()


class _Followed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what is computed from the values of some tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: list[Tensor] = []  # so that their memory's keys stay their own
        self._reached: set[int] = set()
        self._made: set[int] = set()  # memory of which there is nothing but what this has seen

    def start_with(self, tensor: Tensor) -> None:
        """Follows a tensor's values."""
        self._alive.append(tensor)
        self._reached.add(storage_key(tensor))

    def reaches(self, result: Tensor) -> bool:
        """Returns True if a result may depend on the values, or comes from out of sight."""
        return not isinstance(result, FakeTensor) or storage_key(result) in self._reached

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given, made = tensors_in((args, kwargs)), tensors_in(result)
        self._alive += given + made
        keys = {storage_key(tensor) for tensor in given}
        name = str(func).split(".")[1]
        reads = keys & self._reached and name not in READ_NOTHING and func.namespace != "prim"
        uses = reads or torch.Tag.nondeterministic_seeded in func.tags  # draws are other ones for each microbatch
        changed = {storage_key(tensor) for tensor in written_arguments(func, args, kwargs)}
        if uses and not changed <= self._made:
            raise ValueError(f"{func} may store values beyond the call")
        new = {storage_key(tensor) for tensor in made}
        self._made |= new - keys
        if uses:
            self._reached |= new | changed
        return result
