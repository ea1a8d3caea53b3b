"""What a step assigns to attributes of the LightningModule: the value for the batch, not the last microbatch's.

``self.last_loss = loss`` in a step and ``self.log("loss", self.last_loss)`` in a hook must give the batch's loss: what the
microbatches assign is put together like what they return. An attribute that the step also reads (``self.seen += len(x)``) goes
on from microbatch to microbatch, which is right for sums over samples. The check of the loss, which runs the step on the whole
batch, tells which are none: a counter of steps is then counted once a batch, and for anything else there is a warning.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from lightning_fxpipe.batchvalues import BatchValue
from lightning_fxpipe.joining import BatchLoss, joined
from lightning_fxpipe.microbatch import merge_outputs
from lightning_fxpipe.stepcode import AttributeNames, attributes_of_step, code_of

_ABSENT = object()
_TOLERANCE = 1e-4


@dataclass
class AssignedKinds:
    """What is known of attributes from earlier batches.

    Attributes:
        counts: Those that have been seen to be counts of something in a microbatch.
        once_a_batch: Those that the step changes once for each batch on one device.
        differing: Those that are others than on one device.
    """

    counts: set[str] = field(default_factory=set)
    once_a_batch: set[str] = field(default_factory=set)
    differing: set[str] = field(default_factory=set)


class AssignedValues:
    """The attributes that a step assigns, and what each microbatch has assigned.

    Args:
        module: The LightningModule.
        step: The step.
        kinds: What is known of them; grows.
        batch_dim: Dimension of the batch in its tensors.
    """

    def __init__(self, module: nn.Module, step: Callable[..., Any], kinds: AssignedKinds, *, batch_dim: int) -> None:
        self._module = module
        self._batch_dim = batch_dim
        self._kinds = kinds
        kind: Any = type(module)
        self._names = _names(kind, code_of(step))
        self._start = self._now()
        self._before = self._start
        self._values: dict[str, list[Any]] = {name: [] for name in self._start}

    def begin_microbatch(self) -> None:
        """Called before each microbatch."""
        self._before = self._now()

    def end_microbatch(self) -> None:
        """Called after each microbatch."""
        for name, value in self._now().items():
            # An equal number may be the same object.
            if value is not _ABSENT and (value is not self._before[name] or isinstance(value, numbers.Number)):
                self._values[name].append(value)

    def rewind(self) -> None:
        """Sets the attributes to what they were before the batch."""
        for name, value in self._start.items():
            if value is not _ABSENT:
                setattr(self._module, name, value)
            else:
                vars(self._module).pop(name, None)

    def restart(self) -> None:
        """Forgets the microbatches."""
        self.rewind()
        self._before = self._now()
        for values in self._values.values():
            values.clear()

    def learn(self) -> list[str]:
        """Compares the attributes, as they are after a step on the whole batch, with those after its microbatches.

        Returns:
            A line for each that is another, and was not known to be.
        """
        lines = []
        for name, whole in self._now().items():
            values = self._values[name]
            if name in self._names.stored_only or len(values) < 2 or not (_is_number(whole) and _is_number(values[-1])):
                continue
            if _near(values[-1], whole):
                continue
            if _near(values[0], whole):
                self._kinds.once_a_batch.add(name)
            elif name not in self._kinds.differing:
                self._kinds.differing.add(name)
                lines.append(
                    f"self.{name} is {float(values[-1]):.6g} with {len(values)} microbatches, {float(whole):.6g} without"
                )
        return lines

    def join(self, sizes: Sequence[int], loss: BatchLoss, taken: Container[float]) -> None:
        """Sets each attribute to its value for the batch, where it is known how to make it.

        Args:
            sizes: Samples in each microbatch.
            loss: The losses of the microbatches.
            taken: Numbers that were taken out of what metrics gave. These, too, know the batch's value themselves.
        """
        for name, values in self._values.items():
            if len(values) != len(sizes) or len(sizes) < 2:
                continue
            if name in self._kinds.once_a_batch:
                setattr(self._module, name, values[0])
            knows = any(isinstance(v, BatchValue) or (isinstance(v, float) and v in taken) for v in values)
            if name in self._names.stored_only and not knows:
                setattr(self._module, name, self._of_batch(name, values, sizes, loss))

    def _of_batch(self, name: str, values: Sequence[Any], sizes: Sequence[int], loss: BatchLoss) -> Any:
        if all(map(_is_count, values)):
            # What differs, or is the number of samples, is a count and adds up; the number of a batch or epoch does not.
            if len(set(values)) > 1 or [*values] == [*sizes]:
                self._kinds.counts.add(name)
            return type(values[0])(sum(values)) if name in self._kinds.counts else values[-1]
        if isinstance(values[0], float) or (isinstance(values[0], Tensor) and values[0].dim() == 0):
            ((args, _), *rest) = joined([((value,), {}) for value in values], sizes, loss)
            return values[-1] if rest else args[0]
        return merge_outputs(values, sizes, self._batch_dim)

    def _now(self) -> dict[str, Any]:
        return {name: vars(self._module).get(name, _ABSENT) for name in self._names.stored}


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, Tensor) and value.dim() == 0 and not value.is_meta
    return is_scalar or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def _near(one: Any, other: Any) -> bool:
    return math.isclose(float(one), float(other), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * _TOLERANCE)


@lru_cache(maxsize=16)
def _names(kind: Any, code: Any) -> AttributeNames:
    """Attributes that the step's code assigns; no property, nor what torch keeps elsewhere."""
    names = attributes_of_step(kind, code)
    return AttributeNames(stored=_plain(kind, names.stored), stored_only=_plain(kind, names.stored_only))


def _plain(kind: Any, names: Collection[str]) -> frozenset[str]:
    return frozenset(name for name in names if not hasattr(getattr(kind, name, None), "__set__"))
