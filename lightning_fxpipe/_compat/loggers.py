"""Private names of Lightning around what a run logs."""

from __future__ import annotations

from typing import Any


def logged_step(trainer: Any) -> int:
    """The number under which loggers get what the running training batch logs.

    ``trainer.global_step`` counts the steps of all optimizers. Lightning 2.6.
    """
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step
