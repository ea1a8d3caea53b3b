"""Reads of the batch's values while a step runs for a microbatch: ``if (labels == 1).any():`` takes the batch's path.

With 1F1B and the like the step runs for each microbatch, whose values may give another answer than the batch's. So each tensor
that follows from the batch alone is known for the whole batch, too, and computed for it where code reads it: a branch, or a
number such as ``int((labels == 1).sum())``. A read of anything else has the microbatch's answer; where that matters, the
comparison of the losses shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_fxpipe._compat.modes import unwatched_torch
from lightning_fxpipe._compat.torch import storage_key, tree_map
from lightning_fxpipe.pytree.structure import NotFillable, Template
from lightning_fxpipe.reporting.messages import logger
from lightning_fxpipe.rng import isolated_rng
from lightning_fxpipe.tracing.parameter_use import written_by
from lightning_fxpipe.tracing.torch_calls import LOOKS, tensors_among

_FLAT = frozenset({Tensor, nn.Parameter, int, float, bool, str, slice, type(None), type(...), torch.dtype, torch.device})
_CONSTANTS = frozenset({torch.arange, torch.zeros, torch.ones, torch.full, torch.tensor, torch.eye, torch.linspace})


class _OfBatch:
    """A tensor for the whole batch, computed where it is needed."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute
        self._value: Any = None

    def value(self) -> Any:
        if self._value is None:
            self._value = self._compute()
        return self._value


class BatchReads(TorchFunctionMode):
    """Answers reads of values in the step's run for a microbatch as its run for the batch would.

    Args:
        part: The microbatch.
        batch: The batch.
    """

    def __init__(self, part: Any, batch: Any) -> None:
        super().__init__()
        # With the microbatch's tensors, whose ids are the keys.
        self._known: dict[int, tuple[Tensor, _OfBatch]] = {}
        self._numel = (1, 1)  # of a tensor that is cut, and of the batch's
        try:
            own, whole = Template.of(part).tensors, Template.of(batch).tensors
        except NotFillable:
            return
        if len(own) == len(whole):
            for tensor, of_batch in zip(own, whole, strict=True):
                self._know(tensor, partial(_same, of_batch))
                if tensor.numel() != of_batch.numel():
                    self._numel = (tensor.numel(), of_batch.numel())

    def _know(self, tensor: Tensor, compute: Callable[[], Any]) -> None:
        self._known[id(tensor)] = tensor, _OfBatch(compute)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in LOOKS and id(args[0]) in self._known:
            return self._read(func, args[0])
        result = func(*args, **kwargs)
        made = [*_tensors_made(result)]
        if made:
            self._note(func, args, kwargs, made)
        return result

    def _read(self, func: Callable[..., Any], tensor: Tensor) -> Any:
        with unwatched_torch(), torch.no_grad(), isolated_rng():
            try:
                value = self._known[id(tensor)][1].value()
            except Exception as error:  # a size in its arguments may be the microbatch's
                logger.debug("A value is read per microbatch, because it cannot be computed for the batch: %s", error)
                value = tensor
            own, of_batch = self._numel
            has_each_sample = own != of_batch and tensor.numel() * of_batch == value.numel() * own
            return LOOKS[func](tensor if has_each_sample else value)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: list[Tensor]) -> None:
        """Notes how to compute what a call has made."""
        given = [*tensors_among((args, kwargs))]
        if written := written_by(func, args, kwargs):
            for key in [key for key, (tensor, _) in self._known.items() if storage_key(tensor) in written]:
                del self._known[key]
        elif all(id(tensor) in self._known for tensor in given) if given else func in _CONSTANTS:
            known = {id(tensor): self._known[id(tensor)] for tensor in given}
            # A list may be another when the call is made; most calls have none, and most are not made.
            has_container = any(type(each) not in _FLAT for each in (*args, *kwargs.values()))
            arguments = tree_map(lambda leaf: leaf, (args, dict(kwargs))) if has_container else (args, kwargs)
            call = _OfBatch(partial(_made_of_batch, func, arguments, known))
            for index, tensor in enumerate(made):
                self._know(tensor, partial(_entry, call, index))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _entry(call: _OfBatch, index: int) -> Any:
    return call.value()[index]


def _made_of_batch(func: Callable[..., Any], arguments: Any, known: Mapping[int, tuple[Tensor, _OfBatch]]) -> list[Tensor]:
    """Makes a call with what its tensors are for the whole batch."""
    args, kwargs = tree_map(lambda leaf: known[id(leaf)][1].value() if isinstance(leaf, Tensor) else leaf, arguments)
    return [*_tensors_made(func(*args, **kwargs))]


def _tensors_made(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        yield from (entry for entry in result if isinstance(entry, Tensor))
