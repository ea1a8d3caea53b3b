"""Lightning's and the user's own calls of the model on ``self.example_input_array``, as on one device."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, compare, go

EXAMPLE = torch.linspace(-1, 1, 60).reshape(5, 12)  # no batch has five samples


class Summarised(Net):
    """Has an example, and layers that do something else in training."""

    example: Any = EXAMPLE

    def __init__(self) -> None:
        super().__init__()
        self.head.append(nn.Sequential(nn.BatchNorm1d(5), nn.Dropout(0.2)))
        self.temperature = nn.Parameter(torch.ones(1))
        self.example_input_array = self.example


class TupleExample(Summarised):
    """An example of several arguments."""

    example = (EXAMPLE, torch.ones(5, 12))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x if scale is None else x * scale)


class DictExample(TupleExample):
    """An example of keyword arguments."""

    example = {"x": EXAMPLE, "scale": torch.ones(5, 12)}


class Noisy(Summarised):
    """Draws random numbers in each forward, so the summary moves the generators on."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))


class Looking(Summarised):
    """Looks at values of the example."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.mean().item() if len(x) == 5 else x)


class Counting(Summarised):
    """Knows how often it has been called on the example."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def on_fit_start(self) -> None:
        self.before_fit = self.calls

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 5:
            self.calls += 1
        return super().forward(x)


class CallsItself(Summarised):
    """Calls the model in hooks."""

    def on_fit_start(self) -> None:
        self.seen = [self(self.example_input_array.to(self.device)).detach().cpu()]

    def on_train_epoch_start(self) -> None:
        with torch.no_grad():
            self.seen.append(self(self.example_input_array.to(self.device)).cpu())


class KeepsGraph(Logger):
    """Calls the model on rank 0 as TensorBoard's logger does."""

    def __init__(self, traces: bool) -> None:
        super().__init__()
        self.traces = traces
        self.kept: list[Any] = []

    name = version = "kept"

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        pass

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Tensor | None = None) -> None:
        example = model._apply_batch_transfer_handler(model._on_before_batch_transfer(model.example_input_array))
        if self.traces:
            graph = torch.jit.trace(model, example, check_trace=False)
            self.kept += [
                re.sub(r"_mangle_\d+", "", str(graph.inlined_graph)),
                *(p.detach().clone() for p in graph.parameters()),
            ]
        else:
            self.kept.append(model(example).detach())


@contextmanager
def printed() -> Iterator[list[str]]:
    """Collects the model summary that is printed or logged in the block."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    source = logging.getLogger("lightning.pytorch.callbacks.model_summary")
    level = source.level
    source.addHandler(handler)
    source.setLevel(logging.INFO)
    console = io.StringIO()
    try:
        with redirect_stdout(console):
            yield texts
    finally:
        source.removeHandler(handler)
        source.setLevel(level)
        texts.append(console.getvalue())


def _run(module: type[Net], callbacks: Sequence[L.Callback] = (), **more: Any) -> Run:
    options = {"enable_model_summary": True, "max_epochs": 1, **more.pop("options", {})}
    return Run(module=module, callbacks=lambda folder: callbacks, options=options, strategy={"num_microbatches": 1}, **more)


def _kept(trainer: L.Trainer, module: Any, folder: Path) -> Any:
    assert isinstance(trainer.logger, KeepsGraph)
    return trainer.logger.kept


RUNS: dict[str, Callable[[], Run]] = {
    "tensor": lambda: _run(Summarised),
    "tuple": lambda: _run(TupleExample),
    "dict, all layers": lambda: _run(DictExample, [ModelSummary(max_depth=-1)]),
    "rich": lambda: _run(Summarised, [RichModelSummary(max_depth=2)]),
    "random numbers": lambda: _run(Noisy),
    "values": lambda: _run(Looking),
    "counted calls": lambda: _run(Counting, look=lambda trainer, module, folder: (module.calls, module.before_fit)),
    "in hooks": lambda: _run(CallsItself, look=lambda trainer, module, folder: module.seen),
    "traced graph": lambda: _run(Summarised, options={"logger": KeepsGraph(traces=True)}, look_at_zero=_kept),
    "graph of a call": lambda: _run(Noisy, options={"logger": KeepsGraph(traces=False)}, look_at_zero=_kept),
    "validate": lambda: _run(
        Summarised, options={"logger": KeepsGraph(traces=True)}, look_at_zero=_kept, calls=("validate", "fit")
    ),
}


def do(name: str, folder: str, stages: int) -> dict[str, Any]:
    """One run, and on rank 0 what its summary says."""
    run = RUNS[name]()
    with printed() as texts:
        seen = go(run, Path(folder), stages)
    if "at_zero" in seen:
        # Lightning says what is in use, which is not the same; a rich table's borders are as wide as the console.
        lines = [line.split() for text in texts for line in text.splitlines() if line.strip(" -─━┏┓└┘┡┩│")]
        seen["at_zero"] = (seen["at_zero"], lines)
        assert name == "validate" or any("Params" in line for line in lines), lines
    return seen


@pytest.mark.parametrize("name", RUNS)
def test_calls_on_the_example_see_the_whole_model(ranks: Callable[[int], RankPool], tmp_path: Path, name: str) -> None:
    compare(ranks, do, [name], tmp_path, 2)
