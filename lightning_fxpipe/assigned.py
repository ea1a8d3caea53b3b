"""What a step assigns to attributes of the LightningModule and never reads: the value for the batch, not the last microbatch's.

``self.last_loss = loss`` in a step and ``self.log("loss", self.last_loss)`` in a hook must give the batch's loss. An attribute
that the step also reads (``self.seen += len(x)``) goes on from microbatch to microbatch as it does from batch to batch.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Container, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from lightning_fxpipe.batchvalues import BatchValue
from lightning_fxpipe.joining import BatchLoss, joined
from lightning_fxpipe.microbatch import merge_outputs
from lightning_fxpipe.stepcode import attributes_stored_only, code_of

_ABSENT = object()


class AssignedValues:
    """The attributes that a step only assigns, and what each microbatch has assigned.

    Args:
        module: The LightningModule.
        step: The step.
        batch_dim: Dimension of the batch in its tensors.
        counts: Attributes that have been seen to be counts of something in a microbatch; grows.
    """

    def __init__(self, module: nn.Module, step: Callable[..., Any], *, batch_dim: int, counts: set[str]) -> None:
        self._module = module
        self._batch_dim = batch_dim
        self._counts = counts
        kind: Any = type(module)
        self._names = _names(kind, code_of(step))
        self._values: dict[str, list[Any]] = {name: [] for name in self._names}

    def begin_microbatch(self) -> None:
        """Called before each microbatch."""
        self._before = {name: vars(self._module).get(name, _ABSENT) for name in self._names}

    def end_microbatch(self) -> None:
        """Called after each microbatch."""
        for name, before in self._before.items():
            value = vars(self._module).get(name, _ABSENT)
            # An equal number may be the same object.
            if value is not _ABSENT and (value is not before or isinstance(value, numbers.Number)):
                self._values[name].append(value)

    def join(self, sizes: Sequence[int], loss: BatchLoss, taken: Container[float]) -> None:
        """Sets each attribute to its value for the batch, where it is known how to make it.

        Args:
            sizes: Samples in each microbatch.
            loss: The losses of the microbatches.
            taken: Numbers that were taken out of what metrics gave. These, too, know the batch's value themselves.
        """
        for name, values in self._values.items():
            knows = any(isinstance(v, BatchValue) or (isinstance(v, float) and v in taken) for v in values)
            if len(values) == len(sizes) > 1 and not knows:
                setattr(self._module, name, self._of_batch(name, values, sizes, loss))

    def _of_batch(self, name: str, values: Sequence[Any], sizes: Sequence[int], loss: BatchLoss) -> Any:
        if all(map(_is_count, values)):
            # What differs, or is the number of samples, is a count and adds up; the number of a batch or epoch does not.
            if len(set(values)) > 1 or [*values] == [*sizes]:
                self._counts.add(name)
            return type(values[0])(sum(values)) if name in self._counts else values[-1]
        if isinstance(values[0], float) or (isinstance(values[0], Tensor) and values[0].dim() == 0):
            ((args, _), *rest) = joined([((value,), {}) for value in values], sizes, loss)
            return values[-1] if rest else args[0]
        return merge_outputs(values, sizes, self._batch_dim)


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


@lru_cache(maxsize=16)
def _names(kind: Any, code: Any) -> Collection[str]:
    """Attributes that the step's code only assigns; no property, nor what torch keeps elsewhere."""
    return tuple(name for name in attributes_stored_only(kind, code) if not hasattr(kind, name) or not _is_data(kind, name))


def _is_data(kind: Any, name: str) -> bool:
    return hasattr(getattr(kind, name), "__set__")
