"""Private names of Lightning's callbacks and of the Trainer's arguments; a part of :mod:`lightning_fxpipe._compat`.

As there, each has its reason and the versions it was seen in, and a canary in ``tests/test_compat_lightning.py``.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ThroughputMonitor, WeightAveraging
from torch import nn


def averaged_modules(trainer: Trainer) -> list[nn.Module]:
    """The copies of the module that ``WeightAveraging`` callbacks keep; they have no public name. Lightning 2.6."""
    averaging = [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]  # type: ignore[attr-defined]
    return [callback._average_model.module for callback in averaging if callback._average_model is not None]


def throughputs(trainer: Trainer) -> list[Any]:
    """What ``ThroughputMonitor`` callbacks count with; it has no public name. Lightning 2.6."""
    monitors = [callback for callback in trainer.callbacks if isinstance(callback, ThroughputMonitor)]  # type: ignore[attr-defined]
    return [throughput for monitor in monitors for throughput in monitor._throughputs.values()]


def validates_by_time(trainer: Trainer) -> bool:
    """Whether ``val_check_interval`` is a time; the Trainer keeps it under a private name. Lightning 2.6."""
    return getattr(trainer, "_val_check_time_interval", None) is not None
