"""Values that a step gets for a microbatch, and that are other ones for the batch: the results of its metrics.

A microbatch's F1 is what the step sees while it runs; what it logs, returns or keeps must be that of the batch. So such a value
knows where it came from, and what is computed from it, ``1 - f1`` or ``f1 * 100``, knows that, too: once the batch's value is
there, the same is computed from that. A Python number taken out of one, as by ``item()``, cannot know; it is remembered by its
value, and numbers computed from it are the microbatch's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fxpipe._compat import tree_leaves, tree_map, unwatched_torch

Source = Callable[[], Tensor]

# Ways to take one Python number out of a tensor.
_TAKING = frozenset({Tensor.item, Tensor.tolist, Tensor.__float__})


class BatchValue(Tensor):
    """A microbatch's value, with the way to the batch's."""

    source: Source
    taken: dict[float, Source]

    @classmethod
    def of(cls, value: Tensor, source: Source, taken: dict[float, Source]) -> BatchValue:
        """The tensor, marked.

        Args:
            value: The value for the microbatch.
            source: Gives the value for the batch when that is known.
            taken: Gets the Python numbers that are taken out of it.
        """
        with unwatched_torch():
            marked = value.as_subclass(cls)
        marked.source, marked.taken = source, taken
        return marked

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*unmarked(args), **unmarked(kwargs))
        taken = next((leaf.taken for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, BatchValue)), {})
        if isinstance(result, Tensor):
            return cls.of(result, lambda: _again(func, args, kwargs), taken)
        if isinstance(result, (tuple, list)) and any(isinstance(entry, Tensor) for entry in result):
            entries = [
                cls.of(entry, partial(_entry_again, func, args, kwargs, i), taken) if isinstance(entry, Tensor) else entry
                for i, entry in enumerate(result)
            ]
            # Named results, as of `max`, keep their type.
            return type(result)(entries)
        if func in _TAKING and isinstance(args[0], BatchValue) and isinstance(result, (int, float)):
            taken[result] = args[0].source
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unmarked(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return BatchValue.of(unmarked(self).detach().clone(), self.source, self.taken)


def unmarked(value: Any) -> Any:
    """The microbatch's values as plain tensors, in any containers."""

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, BatchValue):
            return leaf
        with unwatched_torch():
            return leaf.as_subclass(Tensor)

    return tree_map(plain, value)


def of_batch(value: Any) -> Any:
    """The batch's values in place of the microbatch's, in any containers; called when they are known."""
    if not any(isinstance(leaf, BatchValue) for leaf in tree_leaves(value)):
        return value
    # A copy: what is computed again may be computed in place.
    return tree_map(lambda leaf: leaf.source().clone() if isinstance(leaf, BatchValue) else leaf, value)


def _again(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch.no_grad():
        return func(*of_batch(args), **of_batch(kwargs))


def _entry_again(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], index: int) -> Tensor:
    entry: Tensor = _again(func, args, kwargs)[index]
    return entry


def keep_batch_values(module: nn.Module) -> None:
    """Puts the batch's values into the attributes of a module in which the step has kept a microbatch's."""
    attributes = vars(module)
    for name, value in list(attributes.items()):
        if isinstance(value, (BatchValue, list, dict)):
            attributes[name] = _settled(value)


def _settled(value: Any) -> Any:
    if isinstance(value, BatchValue):
        return of_batch(value)
    for key, entry in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if isinstance(entry, (BatchValue, list, dict)):
            value[key] = _settled(entry)
    return value
