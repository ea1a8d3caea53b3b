"""A logger that keeps all that it gets."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor


class Experiment:
    """What a logger's ``experiment`` may be."""

    def __init__(self) -> None:
        self.written: list[tuple[Any, ...]] = []

    def add_scalar(self, tag: str, value: Any, global_step: int = 0) -> None:
        self.written.append((tag, float(value), global_step))

    def add_histogram(self, tag: str, values: Tensor) -> None:
        self.written.append((tag, values.flatten().tolist()))


class InMemory(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[tuple[int | None, dict[str, float]]] = []
        self.writer = Experiment()

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self.writer

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        return None

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.history.append((step, {name: float(value) for name, value in metrics.items()}))
