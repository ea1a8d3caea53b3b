"""Result of a step's run on a batch, and the part of it that the other ranks must know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.metrics.step_log import LogEntry
from lightning_fxpipe.rng import rng_state, same_rng
from lightning_fxpipe.runtime.attributes import Change
from lightning_fxpipe.user_code.paths import Difference


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """Result of a step, on the last stage; the other stages have nothing.

    Attributes:
        output: What the step returned.
        loss: In training, the value of its loss; None where the step returned none, to skip the batch.
        entries: What it logged.
        rng: State of the generators, where the step drew numbers that the other ranks did not.
        buffers: What a step without stages has made of buffers of other stages, by FQN.
        failure: Why the step cannot run in stages.
    """

    output: Any = None
    loss: float | None = None
    entries: list[LogEntry] = field(default_factory=list)
    rng: dict[str, Any] | None = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    failure: FxPipeError | None = None


@dataclass(frozen=True, kw_only=True)
class StepNews:
    """One message with the part of the last stage's step that other ranks must know, except the logged values.

    Attributes:
        rng: State of the generators, where the step drew numbers that the other ranks did not.
        attributes: What it changed of what its code reaches.
        metric_states: What it changed of metrics.
        output: What hooks are to see of its output, in a tuple; empty where no hook looks.
        should_stop: Whether the run is to end.
        buffers: What a step without stages has made of buffers of other stages, by FQN.
        failure: Why the step cannot run in stages.
    """

    rng: dict[str, Any] | None = None
    attributes: tuple[Change, ...] = ()
    metric_states: tuple[Difference, ...] = ()
    output: tuple[Any, ...] = ()
    should_stop: bool = False
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    failure: FxPipeError | None = None


def rng_since(before: dict[str, Any] | None) -> dict[str, Any] | None:
    """State of the generators, where they have drawn since they had the state ``before``; else None."""
    now = rng_state()
    return None if before is None or same_rng(before, now) else now
