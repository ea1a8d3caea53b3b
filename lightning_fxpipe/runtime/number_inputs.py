"""Numbers that change while a step trains (annealed weights, temperatures): inputs of its traces from their second value on.

A number that recorded code reads is a constant of the graph. Where it changes, the step is recorded once more, now with the
number as a symbol; it stays one where the same calls follow from it, and remains a constant where the code needs its value.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import nn

from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.tracing.guards import GuardKey
from lightning_fxpipe.tracing.held_numbers import CallArgument, NumberPlace, changed_numbers, failing_numbers
from lightning_fxpipe.tracing.recordable import Recordable
from lightning_fxpipe.tracing.trace import TracedRegion

_logger = logging.getLogger("lightning_fxpipe")

Place = NumberPlace | CallArgument


class Trace(Protocol):
    """Records a region; ``earlier`` is as in ``trace_region`` of ``tracing.trace``."""

    def __call__(self, call: Recordable, *, earlier: TracedRegion | None) -> TracedRegion:
        """Returns the trace."""


class NumberInputs:
    """The numbers that have changed so far in the steps of one module."""

    def __init__(self) -> None:
        self._are_inputs: dict[Place, bool] = {}  # False where a graph needs their values

    def note_changed(self, root: nn.Module, guards: Mapping[GuardKey, Any], failed: Iterable[GuardKey]) -> None:
        """Notes the numbers behind the ``failed`` ones of a trace's ``guards``."""
        for key in failed:
            self.note(changed_numbers(root, key, guards[key]))

    def note(self, places: Iterable[Place]) -> None:
        """Notes numbers that have changed."""
        for place in places:
            self._are_inputs.setdefault(place, True)

    def record(self, trace: Trace, region: Recordable, earlier: TracedRegion | None) -> TracedRegion:
        """Records a region, with the numbers that have changed as inputs where the same calls follow from them."""
        plain = trace(region, earlier=earlier)

        def attempt(numbers: tuple[Place, ...]) -> tuple[TracedRegion, Sequence[Place]]:
            """Records the region with these numbers as inputs; returns also those for which it needs one value."""
            try:
                traced = trace(replace(region, numbers=numbers), earlier=plain)
            except FxPipeError:
                _logger.debug("Numbers of %s cannot be inputs of the trace", region.label, exc_info=True)
                return plain, numbers
            return traced, traced.constant_numbers() if traced.is_like(plain) else numbers

        def constants_among(some: tuple[Place, ...]) -> Sequence[Place]:
            return attempt(some)[1]

        while numbers := tuple(place for place, is_input in self._are_inputs.items() if is_input):
            traced, constant = attempt(numbers)
            if not constant:
                return traced
            self._are_inputs |= dict.fromkeys(failing_numbers(numbers, constant, constants_among), False)
        return plain
