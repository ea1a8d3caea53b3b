"""What user code sets before the model's call counts in that very call, wherever it is kept and whoever sets it.

A trace was compared with user state, and recorded, before the step's own code had run: what the step sets was that of the step
before. Each holder is tried with each moment in one process, where a stage's graph is as stale as on several ranks.
"""

from __future__ import annotations

import os
import warnings
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe import FxPipeError, FxPipeStrategy
from lightning_fxpipe.tracing.trace_log import TraceLog
from tests.lit import make_trainer

ALL_TESTS = "FXPIPE_ALL_TESTS" in os.environ
FACTOR = 1.0
IN_CONTEXT = ContextVar("IN_CONTEXT", default=1.0)


class Block(nn.Module):
    scale: Any = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.entries = {"scale": 1.0}

    def set_scale(self, scale: float) -> None:
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.scale * self.entries["scale"]


class Annealed(L.LightningModule):
    """Multiplies by a number that is kept in a ``holder`` and set at a ``moment``; ``calls`` its parts in the step or not."""

    def __init__(self, holder: str, moment: str, calls: str) -> None:
        super().__init__()
        global FACTOR
        FACTOR = 1.0
        IN_CONTEXT.set(1.0)
        torch.manual_seed(3)
        self.holder, self.moment, self.calls = holder, moment, calls
        self.first, self.second, self.third = Block(), Block(), Block()
        self.number, self.count, self.is_on, self.entries, self.items = 1.0, 1, True, {"by": {"now": 1.0}}, [1.0]
        self.array, self.scalar, self.config = np.ones(1), np.float64(1.0), SimpleNamespace(factor=1.0)
        self.tensor = torch.ones(())
        self.register_buffer("buffer", torch.ones(()))
        self.seen: list[float] = []

    def put(self, value: float) -> None:
        global FACTOR
        match self.holder:
            case "attribute":
                self.number = value
            case "own attribute":  # of what it was
                self.number = 0.5 * self.number + value
            case "integer":
                self.count = int(10 * value)
            case "flag":
                self.is_on = int(10 * value) % 2 == 0
            case "dict":
                self.entries["by"]["now"] = value
            case "list":
                self.items[0] = value
            case "array":
                self.array[0] = value
            case "scalar of numpy":
                self.scalar = np.float64(value)
            case "object":
                self.config.factor = value
            case "new object":
                self.config = SimpleNamespace(factor=value)
            case "tensor":
                self.tensor = torch.tensor(value)
            case "buffer":
                self.buffer = torch.tensor(value)
            case "buffer in place":
                self.buffer.fill_(value)
            case "global variable":
                FACTOR = value
            case "context variable":
                IN_CONTEXT.set(value)
            case "zero at its second value":
                self.count = round(10 * value) - 3
            case "submodule":
                self.second.scale = value
            case "entry of a submodule":
                self.second.entries["scale"] = value
            case "class":
                type(self.second).scale = value

    @property
    def factor(self) -> Any:
        match self.holder:
            case "attribute" | "own attribute":
                return self.number
            case "integer":
                return self.count / 10 if self.count < 8 else self.count / 20
            case "flag":
                return 1.0 if self.is_on else 0.3
            case "dict":
                return 1 - self.entries["by"]["now"] / 3
            case "list":
                return max(0.2, self.items[0])
            case "array":
                return float(self.array[0])
            case "scalar of numpy":
                return self.scalar
            case "object" | "new object":
                return self.config.factor
            case "tensor":
                return self.tensor
            case "buffer" | "buffer in place":
                return self.buffer
            case "global variable":
                return FACTOR
            case "context variable":
                return IN_CONTEXT.get()
            case "zero at its second value":
                return 1.0 - self.count
            case "counter":
                return min(0.9, 0.2 + self.global_step / 8)
            case "counter of the Trainer":
                return 1 / (2 + self.trainer.global_step)
        return 1.0

    def forward(self, x: Tensor, factor: float = 1.0, *, shift: float = 0.0) -> Tensor:
        return self.third(self.second(self.first(x) * self.factor * factor + shift))

    def loss(self, batch: Any, value: float) -> Tensor:
        if "step" in self.moment:
            self.put(value)
        if self.holder == "arguments":
            out = self(batch[0], value, shift=0.1 / value)
        else:
            out = self.forward(batch[0]) if self.calls == "parts" else self(batch[0])
        if self.moment == "step and back":
            self.put(1.0)
        return (out - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch, 0.3 + 0.1 * self.global_step)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch, 2.0 + 0.1 * batch_idx))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.moment == "hook":
            self.put(0.3 + 0.1 * self.global_step)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(float(self.trainer.callback_metrics["loss"]))

    def on_validation_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["val_loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


HOLDERS = (
    *("attribute", "own attribute", "integer", "flag", "dict", "list", "array", "scalar of numpy", "object", "new object"),
    *("tensor", "buffer", "buffer in place", "global variable", "context variable", "submodule", "class"),
)
# Nothing stores them, so that no symbol could be put in their place.
COUNTERS = ("counter", "counter of the Trainer")
# In place, each microbatch of 1F1B would invalidate what those before it have saved; arrays and flags have no symbols.
NUMBERS = (
    "attribute",
    "own attribute",
    "integer",
    "dict",
    "list",
    "scalar of numpy",
    "object",
    "new object",
    "global variable",
    "context variable",
    "zero at its second value",
)


def fit(module: Any, **options: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(22, 6, generator=generator), torch.randn(22, 6, generator=generator)), 4)
    Block.scale = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(max_epochs=2, **options).fit(module, data, data)
    Block.scale = 1.0
    return {"seen": module.seen, "state": {fqn: value.clone() for fqn, value in module.state_dict().items()}}


def check(holder: str, moment: str, calls: str, schedule: Any, num_microbatches: int) -> None:
    strategy = FxPipeStrategy(num_stages=2, num_microbatches=num_microbatches, schedule=schedule)
    there = fit(Annealed(holder, moment, calls), strategy=strategy)
    torch.testing.assert_close(there, fit(Annealed(holder, moment, calls)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("calls", ["model", "parts"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_the_step_sets_counts_in_its_own_call(holder: str, calls: str) -> None:
    check(holder, "step", calls, "gpipe", 2)


@settings(
    deadline=None, max_examples=60 if "FXPIPE_ALL_TESTS" in os.environ else 8, derandomize="FXPIPE_ALL_TESTS" not in os.environ
)
@given(
    holder=st.sampled_from(HOLDERS),
    moment=st.sampled_from(["step", "step and back", "hook"]),
    calls=st.sampled_from(["model", "parts"]),
    schedule=st.sampled_from(["auto", "gpipe", "looped_bfs"]),
    num_microbatches=st.sampled_from([1, 2, 4]),
)
def test_whoever_sets_it(holder: str, moment: str, calls: str, schedule: str, num_microbatches: int) -> None:
    check(holder, moment, calls, schedule, num_microbatches)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps of the traces that are made."""
    steps: list[str] = []
    original = TraceLog.add
    monkeypatch.setattr(
        TraceLog, "add", lambda self, trace, varying: (steps.append(trace.step), original(self, trace, varying))
    )
    return steps


@pytest.mark.parametrize("moment", ["step", "hook"])
@pytest.mark.parametrize("holder", NUMBERS)
def test_a_number_is_recorded_twice_and_then_an_input(holder: str, moment: str, made: list[str]) -> None:
    check(holder, moment, "model", "gpipe", 2)
    # The one of the plan, those of two values, and of the last batch's size; `max` and `<` have a graph for each side.
    assert made.count("training_step") <= 5


class OneSchedule(L.LightningModule):
    """All its layers, of which a cut falls into one, have the object that says how much they count."""

    def __init__(self, schedule: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.schedule, self.seen = schedule, []
        self.layers = nn.Sequential(*(Scheduled(schedule) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        value = self.schedule["value"] if isinstance(self.schedule, dict) else self.schedule.value
        return self.layers(x) * value  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(float(self.trainer.callback_metrics["loss"]))

    def on_train_batch_start(self, *args: Any) -> None:
        if isinstance(self.schedule, dict):
            self.schedule["value"] *= 0.9
        else:
            self.schedule.value *= 0.9

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


class Scheduled(nn.Module):
    def __init__(self, schedule: Any) -> None:
        super().__init__()
        self.first, self.second, self.schedule = nn.Linear(6, 6), nn.Linear(6, 6), schedule

    def forward(self, x: Tensor) -> Tensor:
        value = self.schedule["value"] if isinstance(self.schedule, dict) else self.schedule.value
        return self.second(torch.tanh(self.first(x))) * value  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [lambda: SimpleNamespace(value=1.0), lambda: {"value": 1.0}], ids=["object", "dict"])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_number_in_what_several_layers_have_is_one_input(stages: int, make: Any, made: list[str]) -> None:
    """The first layer's became an input, which the others, and the trial of exchanges, found in place of a number."""
    here, there = OneSchedule(make()), OneSchedule(make())
    strategy = FxPipeStrategy(num_stages=stages, num_microbatches=2)
    torch.testing.assert_close(fit(there, strategy=strategy), fit(here), rtol=1e-5, atol=1e-6)
    assert made.count("training_step") <= 5


class TwoSchedules(OneSchedule):
    """In the fourth step the module itself gets another schedule than its layers have."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.layers[0].schedule.value *= 0.9  # type: ignore[union-attr, operator]
        if batch_idx == 3:
            self.schedule = SimpleNamespace(value=3.0)


def test_numbers_that_were_one_and_are_two_count_as_two() -> None:
    """The trace would go on with the layers' number for both."""
    here, there = (TwoSchedules(SimpleNamespace(value=1.0)) for _ in range(2))
    strategy = FxPipeStrategy(num_stages=2, num_microbatches=2)
    torch.testing.assert_close(fit(there, strategy=strategy), fit(here), rtol=1e-5, atol=1e-6)


def test_a_number_among_the_arguments_is_an_input(made: list[str]) -> None:
    """The step computes it, as a reversal strength: it was part of what calls are told apart by."""
    check("arguments", "step", "model", "gpipe", 2)
    assert made.count("training_step") <= 5
    assert made.count("validation_step") <= 5


@pytest.mark.parametrize("calls", ["model", "parts"])
@pytest.mark.parametrize("holder", COUNTERS)
def test_a_counter_that_recorded_code_reads_is_an_input(holder: str, calls: str, made: list[str]) -> None:
    """Between two calls in a step, or in a forward: each of its values was recorded anew, a second for each step."""
    check(holder, "hook", calls, "gpipe", 2)
    assert made.count("training_step") <= 5


class Flagged(Annealed):
    """Hands conditions on a counter, and on sizes, to functions of torch."""

    def loss(self, batch: Any, value: float) -> Tensor:
        with torch.set_grad_enabled(self.global_step < 3):
            hidden = self.first(batch[0])
        hidden = nn.functional.dropout(hidden, 0.0, training=self.global_step > 5)
        return (self.third(self.second(hidden)) - batch[1]).square().mean(0, keepdim=len(hidden) > 1).sum()


@pytest.mark.parametrize("calls", ["model", "parts"])
def test_a_condition_handed_to_a_function_is_one_of_the_trace(calls: str, made: list[str]) -> None:
    """Functions in C accept no symbol for a flag, so that each value of the counter was recorded anew."""
    strategy = FxPipeStrategy(num_stages=2, num_microbatches=2, schedule="gpipe")
    there = fit(Flagged("counter", "hook", calls), strategy=strategy)
    torch.testing.assert_close(there, fit(Flagged("counter", "hook", calls)), rtol=1e-5, atol=1e-6)
    assert made.count("training_step") <= 6


class Between(Annealed):
    """Computes a number before its first call and uses it before the second: a reversal strength, the weight of a mixture."""

    def number_of(self, batch_idx: int) -> Any:
        match self.holder:
            case "local variable":
                return 2 / (1 + np.exp(-self.global_step / 8)) - 0.5
            case "rounded":
                return 0.1 * round(2 + self.global_step / 2)
            case "read from a tensor":
                return (0.3 + 0.1 * torch.tensor(self.global_step)).item()
            case "batch's index":
                return 0.4 + batch_idx / 10
            case "element of an array":
                return self.array[0] * (2 + self.global_step) / 10
        return 1 / (2 + batch_idx) if batch_idx % 2 else 0.5 + self.current_epoch

    def step(self, batch: Any, batch_idx: int) -> Tensor:
        number = self.number_of(batch_idx)
        hidden = self.second(Scale.apply(self.first(batch[0]), number))  # type: ignore[no-untyped-call]
        return (self.third(torch.lerp(hidden, torch.sin(hidden), number) * number) - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.step(batch, batch_idx))


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    "holder", ["local variable", "rounded", "read from a tensor", "batch's index", "element of an array", "several"]
)
def test_a_number_handed_from_call_to_call_is_an_input(holder: str, schedule: str, made: list[str]) -> None:
    """It is stored nowhere, so each of its values was recorded anew."""
    strategy = FxPipeStrategy(num_stages=2, num_microbatches=2, schedule=schedule)
    there = fit(Between(holder, "step", "parts"), strategy=strategy)
    torch.testing.assert_close(there, fit(Between(holder, "step", "parts")), rtol=1e-5, atol=1e-6)
    assert made.count("training_step") <= 5


class SetsBetween(Annealed):
    """Sets what the second of its calls reads when it has made the first; ``late``, from some step on."""

    def loss(self, batch: Any, value: float) -> Tensor:
        is_time = self.moment != "late" or self.global_step > 3
        hidden = self.first(batch[0])
        if is_time:
            self.put(value)
        return (self.third(self.second(hidden) * self.factor) - batch[1]).square().mean()


@pytest.mark.parametrize("moment", ["always", "late"])
@pytest.mark.parametrize("holder", [*(h for h in HOLDERS if h != "buffer in place"), "entry of a submodule"])
def test_what_the_step_sets_between_its_calls_counts_in_the_next(holder: str, moment: str) -> None:
    """The stages had computed all calls when the step came to it."""
    runs = [
        fit(SetsBetween(holder, moment, "parts"), strategy=strategy)
        for strategy in (FxPipeStrategy(num_stages=2, num_microbatches=2, schedule="gpipe"), "auto")
    ]
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-5, atol=1e-6)


class SetsInside(nn.Module):
    """Its forward sets what its own submodules read; from some call on, or for one call only."""

    def __init__(self, holder: str) -> None:
        super().__init__()
        self.holder, self.number, self.drop = holder, 0.5, nn.Dropout(0.0)
        self.first, self.second, self.third = Block(), Block(), Block()
        self.inner = nn.Sequential(nn.Linear(6, 6), Block())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        match self.holder:
            case "attribute":
                self.second.scale = self.number
            case "by a method":
                self.second.set_scale(self.number)
            case "entry":
                self.second.entries["scale"] = self.number
            case "class":
                Block.scale = self.number
            case "by turns":
                for factor, block in enumerate((self.first, self.second, self.first)):
                    block.scale = self.number + factor
                    hidden = block(hidden)
            case "for one call":
                self.second.scale = self.number
                hidden = self.second(hidden)
                self.second.scale = 1.0
            case "of a module inside":
                self.inner[1].scale = 1.0 if self.number > 0.7 else 0.5
                hidden = self.inner(hidden)
            case "torch's module":
                self.drop.p = 1.0 if self.number > 0.7 else 0.0
                hidden = hidden + self.drop(hidden)
        return self.third(self.second(hidden))


class ModelSets(Annealed):
    def __init__(self, holder: str, moment: str, calls: str) -> None:
        super().__init__(holder, moment, calls)
        self.model = SetsInside(holder)

    def loss(self, batch: Any, value: float) -> Tensor:
        if self.moment == "step":
            self.model.number = value
        return (self.model(batch[0]) - batch[1]).square().mean()


@pytest.mark.parametrize("moment", ["constant", "step"])
@pytest.mark.parametrize(
    "holder", ["attribute", "by a method", "by turns", "for one call", "of a module inside", "torch's module"]
)
def test_what_a_forward_sets_for_its_submodules_counts(holder: str, moment: str) -> None:
    """Only the code that was recorded set it, and no stage does: they had what was there before."""
    runs = [
        fit(ModelSets(holder, moment, "model"), strategy=strategy)
        for strategy in (FxPipeStrategy(num_stages=2, num_microbatches=2, schedule="gpipe"), "auto")
    ]
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("moment", ["constant", "step"])
@pytest.mark.parametrize("holder", ["entry", "class"])
def test_a_forward_that_sets_an_object_of_several_modules_is_refused(holder: str, moment: str) -> None:
    """It set the same in the recording that had it already, and was taken for what is set once and for all."""
    strategy = FxPipeStrategy(num_stages=2, num_microbatches=2, schedule="gpipe")
    with pytest.raises(FxPipeError, match=r"Modules exchange a value through a shared object.*scale"):
        fit(ModelSets(holder, moment, "model"), strategy=strategy)
