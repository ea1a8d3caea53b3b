"""Tells when a step is traced again: what is new about it, how long it took, and what keeps changing."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from lightning_fxpipe.pytree.containers import leaves_with_path
from lightning_fxpipe.pytree.shapes import Shapes
from lightning_fxpipe.tracing.recordable import Recordable, Signature

_logger = logging.getLogger("lightning_fxpipe")

MANY_TRACES = 8
_KEPT = 64

_MANY_VALUES = (
    "reduce the number of different values, for example by padding to a multiple of 64, or pass a tensor instead of a number."
)
_NEEDS_VALUE = (
    "use the number in arithmetic, comparisons and functions of math, numpy and torch only, or compute with a tensor: float(), "
    "int(), f-strings and indices need its value."
)
_OTHER = {
    "label": "the called module or function",
    "path": "the called module or function",
    "structure": "the structure of the inputs",
    "training": "train or eval mode of a module",
    "trainable": "the set of parameters that require gradients",
    "context": "grad mode or autocast",
}


@dataclass(frozen=True, kw_only=True)
class Traced:
    """One trace of a step that was made, and the seconds that it took."""

    step: str
    seconds: float
    signature: Signature
    shapes: Shapes
    names: tuple[str, ...]  # of the input tensors
    constants: Mapping[str, Any]  # plain values among the inputs, by name
    changed: tuple[str, ...] = ()  # names of what recorded code reads, and what had changed


class TraceLog:
    """Gets every trace that is made.

    One trace more is nothing to speak of: every epoch's last batch is smaller. What comes again and again costs time.

    Args:
        detail: Writes a line that only who looks for it sees.
        told: ``told(what)`` is a context that says what is going on where it takes long.
    """

    def __init__(
        self,
        info: Callable[[str], None],
        warn: Callable[[str], None],
        detail: Callable[[str], None] = _logger.debug,
        told: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._detail = detail
        self.inform, self.warn = info, warn
        self.told = told
        self._changes: dict[str, Counter[str]] = {}
        self._num_retraces: Counter[str] = Counter()
        self.traces: deque[Traced] = deque(maxlen=_KEPT)

    def add(self, made: Traced, varying: frozenset[tuple[int, int]]) -> None:
        """Takes note of a trace; ``varying`` are the dimensions besides the batch that may have any size in it."""
        before = [traced for traced in self.traces if traced.step == made.step]
        self.traces.append(made)
        counter = self._changes.setdefault(made.step, Counter())
        before = [traced for traced in before if _call_of(traced) == _call_of(made)]  # a step may make several calls
        if not before:
            return
        self._num_retraces[made.step] += 1
        alike = [traced for traced in before if traced.signature == made.signature]
        changes = _changes((alike or before)[-1], made, varying)
        repeats = any(counter[what] for what in changes)
        message = f"{made.step} was retraced in {made.seconds:.1f} s: {'; '.join(changes.values())}."
        (self.inform if repeats else self._detail)(message)
        counter.update(changes.keys())
        if self._num_retraces[made.step] == MANY_TRACES - 1:
            (what, times), *_ = counter.most_common(1)
            todo = _NEEDS_VALUE if what in made.changed else _MANY_VALUES
            self.warn(
                f"{made.step} has been retraced {MANY_TRACES - 1} times, {times} times because of {what}. The last one took "
                f"{made.seconds:.1f} s. To avoid a trace for every new value, {todo}"
            )


def _call_of(made: Traced) -> tuple[str, str | None]:
    return made.signature.label, made.signature.path


def input_names(call: Recordable) -> tuple[str, ...]:
    """Names of the tensors that the call gets, in the order of its signature, as far as containers name them."""
    return tuple(name for name, leaf in _named_leaves(call) if isinstance(leaf, Tensor))


def input_constants(call: Recordable) -> dict[str, Any]:
    """The plain values that the call gets, by name."""
    return {name: leaf for name, leaf in _named_leaves(call) if isinstance(leaf, (bool, int, float, str, type(None)))}


def _named_leaves(call: Recordable) -> Iterator[tuple[str, Any]]:
    for name, part in zip(call.example_names, call.example(), strict=True):
        yield from leaves_with_path(part, name)


def _changes(before: Traced, made: Traced, varying: frozenset[tuple[int, int]]) -> dict[str, str]:
    """Describes the differences between two traces, each with a sentence."""
    found: dict[str, str] = {}
    for field in fields(Signature):
        if field.name in _OTHER and getattr(before.signature, field.name) != getattr(made.signature, field.name):
            found[_OTHER[field.name]] = f"{_OTHER[field.name]} changed"
    found |= {name: f"{name}, which the traced code reads, changed" for name in made.changed}
    others = {name: value for name, value in made.constants.items() if before.constants.get(name, value) != value}
    if others:
        found.pop(_OTHER["structure"], None)
        found |= {name: f"{name} is {value!r} after {before.constants[name]!r}" for name, value in others.items()}
    if len(before.shapes) != len(made.shapes):
        return found or {"the inputs": "the inputs changed"}
    names = made.names if len(made.names) == len(made.shapes) else [f"tensor {index}" for index in range(len(made.shapes))]
    for name, old, new in zip(names, before.signature.tensors, made.signature.tensors, strict=True):
        if old != new:
            found[name] = f"{name} has a different dtype, device or layout"
    for tensor, (old_shape, new_shape) in enumerate(zip(before.shapes, made.shapes, strict=True)):
        for dim, (old_size, new_size) in enumerate(zip(old_shape, new_shape, strict=False)):
            if old_size != new_size:
                what = f"dimension {dim} of {names[tensor]}"
                scope = "any size from here on" if (tensor, dim) in varying else "for this size only"
                found[what] = f"{what} is {new_size} after {old_size}" + (f", {scope}" if dim else "")
    other = "relations between sizes, or numbers that its code reads, for example with .item()"
    return found or {other: "sizes that were equal differ, or a number that its code reads (.item()) changed"}
