"""What a run of a step on a batch gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.metrics.step_log import LogEntry


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """What this rank's run of a step gave; all but ``num_microbatches`` is there on the last stage only.

    Attributes:
        num_microbatches: Microbatches of the batch; 0 where no model was called.
        output: What the step returned.
        loss: In training, the value of its loss; None where the step returned none, to skip the batch.
        entries: What it logged.
        rng: State of the generators, where the step drew numbers that the other ranks did not.
        buffers: What a step without stages has made of buffers of other stages, by FQN.
        failure: Why the step cannot run in stages.
    """

    num_microbatches: int
    output: Any = None
    loss: float | None = None
    entries: list[LogEntry] = field(default_factory=list)
    rng: dict[str, Any] | None = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    failure: FxPipeError | None = None
