"""All cases of the step zoo by name, and how one of them is run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fxpipe import FxPipeError, FxPipeStrategy
from tests.inmemory import InMemory
from tests.lit import make_trainer, snapshot
from tests.zoo import (
    steps_calls,
    steps_distributions,
    steps_evaluation,
    steps_leftovers,
    steps_looks,
    steps_losses,
    steps_models,
    steps_prelude,
    steps_random,
    steps_several,
    steps_shapes,
    steps_skips,
    steps_state,
    steps_wrapped,
)
from tests.zoo.steps_case import Case

CASES: dict[str, Case] = {
    **steps_calls.CASES,
    **steps_several.CASES,
    **steps_random.CASES,
    **steps_prelude.CASES,
    **steps_state.CASES,
    **steps_losses.CASES,
    **steps_evaluation.CASES,
    **steps_models.CASES,
    **steps_shapes.CASES,
    **steps_skips.CASES,
    **steps_wrapped.CASES,
    **steps_distributions.CASES,
    **steps_looks.CASES,
    **steps_leftovers.CASES,
}


class StepRecorder(L.Callback):
    """Keeps losses, gradients and metrics of each step."""

    def __init__(self) -> None:
        self.losses: list[float | None] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.metrics: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.gradients.append(gradients_of(pl_module))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]) if outputs else None)
        self.metrics.append(as_numbers(trainer.callback_metrics))


class MemoryLogger(InMemory):
    """Keeps what is logged, on every rank."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.history.append((step, as_numbers(metrics)))


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {fqn: p.grad.clone() for fqn, p in module.named_parameters() if p.grad is not None and not p.is_meta}


def as_numbers(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def same_batch(batch: Any) -> Any:
    """The data is made of batches already."""
    return batch


def loader_of(case: Case) -> DataLoader[Any]:
    return DataLoader(case.batches(), batch_size=None, collate_fn=same_batch)  # type: ignore[arg-type]


def run_case(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    """Trains and evaluates; returns all that must be equal on one device and in a pipeline."""
    L.seed_everything(11, verbose=False)
    module, recorder, logger = case.make(), StepRecorder(), MemoryLogger()
    trainer = make_trainer(
        **{"max_epochs": 1, "num_sanity_val_steps": 0, "log_every_n_steps": 1} | case.trainer | options,
        callbacks=[*(make() for make in case.callbacks), recorder],
        logger=logger,
    )
    validates = "validate" in case.evaluations
    trainer.fit(module, loader_of(case), loader_of(case) if validates else None)
    results: dict[str, Any] = {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "metrics": recorder.metrics,
        "state": snapshot(module),
        "last metrics": as_numbers(trainer.callback_metrics),
        "rng": torch.rand(1).item(),
    }
    if validates:
        results["validated"] = trainer.validate(module, loader_of(case), verbose=False)
    if "test" in case.evaluations:
        results["tested"] = trainer.test(module, loader_of(case), verbose=False)
    if "predict" in case.evaluations:
        results["predicted"] = trainer.predict(module, loader_of(case))
    return results | {"logged": logger.history}


def run_piped(name: str, microbatches: int) -> dict[str, Any]:
    """Runs on every rank: the case's results, or how it was refused before the first step."""
    case = CASES[name]
    strategy = FxPipeStrategy(num_microbatches=microbatches, **case.strategy)
    try:
        with said_to_the_user() as said:
            results = run_case(case, {"strategy": strategy, "devices": case.stages})
        return results | {"said": said, "traces": len(strategy.session.trace_log.traces)}
    except FxPipeError as error:
        if is_set_up(strategy):
            raise  # the other ranks wait for this one, so the processes must go
        return {"refused": f"{type(error).__name__}: {error}"}


@contextmanager
def said_to_the_user() -> Iterator[list[str]]:
    """The warnings and notes of the block, as they come."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = rank_zero.log  # Lightning puts its own there
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *args, **kwargs: said.append(str(message))
            yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def is_set_up(strategy: FxPipeStrategy) -> bool:
    """Whether the module has been split, after which ranks no longer fail together."""
    try:
        return strategy.session is not None
    except RuntimeError:
        return False
