"""Plain values that recorded code reads from modules: noted, compared, and traced again when they change."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe import UnsupportedError
from lightning_fxpipe.tracing.comparable import comparable
from lightning_fxpipe.tracing.guards import failed_guards, name_of_guard, noted_guards
from lightning_fxpipe.tracing.held_numbers import changed_numbers
from lightning_fxpipe.tracing.recordable import RegionCall
from lightning_fxpipe.tracing.trace import trace_region
from tests.traces import covers

_logger = logging.getLogger(__name__)


class Annealed(nn.Module):
    """Reads a number, an entry of a dict and a setting; keeps a list that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.temperature = 2.0
        self.options = {"scale": 1.0, "names": ["a"]}
        self.config = SimpleNamespace(bias=0.5)
        self.history: list[float] = []

    @property
    def cold(self) -> bool:
        return self.temperature < 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x) * self.options["scale"] + self.config.bias
        return h if self.cold else h / self.temperature


def call_of(x: Tensor) -> RegionCall:
    return RegionCall(path="", args=(x,), kwargs={}, batch_size=len(x))


def test_what_the_recorded_code_reads_is_noted_with_its_value() -> None:
    traced = trace_region(Annealed(), call_of(torch.ones(2, 3)))
    assert traced.guards["", "temperature"] == 2.0
    assert traced.guards["", "cold"] is False
    assert {key[1] for key in traced.guards if isinstance(key, tuple)} == {"temperature", "options", "config", "cold"}


def test_a_trace_is_not_used_once_something_that_it_has_read_changes() -> None:
    changes: list[Any] = [
        lambda m: setattr(m, "temperature", 3.0),
        lambda m: m.options.update(scale=2.0),
        lambda m: m.options["names"].append("b"),
        lambda m: setattr(m.config, "bias", 1.0),
    ]
    for change in changes:
        model = Annealed()
        traced = trace_region(model, call_of(torch.ones(2, 3)))
        assert covers(traced, call_of(torch.ones(2, 3)))
        model.history.append(1.0)
        assert covers(traced, call_of(torch.ones(2, 3)))
        change(model)
        assert not covers(traced, call_of(torch.ones(2, 3)))


class HasAState(nn.Module):
    """Uses a state, of which there is none at first."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return x if self.state is None else x + self.state


def test_a_tensor_where_code_has_found_none_is_another_value() -> None:
    model, call = HasAState(), call_of(torch.ones(2, 3))
    traced = trace_region(model, call)
    assert covers(traced, call)
    model.state = torch.ones(3)
    assert not covers(traced, call)


class Logs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        _logger.info("%s", tuple(x.shape))
        return x * 2


def test_what_a_logger_remembers_is_no_value_that_code_reads() -> None:
    """It keeps whether a level is enabled, when that was first asked."""
    model, call = Logs(), call_of(torch.ones(2, 3))
    traced = trace_region(model, call)
    _logger.setLevel(logging.ERROR)  # which makes all loggers forget
    assert covers(traced, call)


class Scale(nn.Module):
    """Keeps a number."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 2.0


class ReadsOther(nn.Module):
    """Reads an attribute of a module that is none of its submodules: it lies in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [Scale()]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.others[0].value


def test_an_attribute_of_a_module_that_is_no_submodule_is_guarded_and_an_input_from_its_second_value_on() -> None:
    model, call = ReadsOther(), call_of(torch.ones(2, 3))
    traced = trace_region(model, call)
    model.others[0].value = 3.0
    assert [name_of_guard(key) for key in traced.failed_guards()] == ["Scale.value"]
    (place,) = changed_numbers(model, traced.failed_guards()[0], 2.0)
    again = trace_region(model, replace(call, numbers=(place,)))
    assert not again.constant_numbers()
    assert covers(again, call)
    model.others[0].value = 4.0
    assert covers(again, call)


class Optional(nn.Module):
    """Uses what it has, as a model does to which another part of the program adds something."""

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scale if hasattr(self, "scale") else x
        return h + getattr(self, "shift", 0.0)


@pytest.mark.parametrize(
    "add",
    [
        lambda m: setattr(m, "scale", 2.0),
        lambda m: setattr(m, "shift", torch.ones(3)),
        lambda m: m.register_buffer("shift", torch.ones(3)),
        lambda m: setattr(m, "scale", nn.Parameter(torch.ones(3))),
    ],
)
def test_a_trace_is_not_used_once_there_is_an_attribute_that_was_missing(add: Any) -> None:
    """The read of an attribute that is not there raises, and so had no value to be compared with."""
    model = Optional()
    traced = trace_region(model, call_of(torch.ones(2, 3)))
    assert covers(traced, call_of(torch.ones(2, 3)))
    add(model)
    assert not covers(traced, call_of(torch.ones(2, 3)))


def test_a_value_that_the_dry_run_did_not_show_is_refused_at_the_call() -> None:
    """Code before the call that reads what nothing tells of, as a clock, may set another value in the real step."""
    model = nn.Sequential(Annealed())
    traced = trace_region(model, call_of(torch.ones(2, 3)), opened=["0"])
    traced.check_current("training_step")
    model[0].temperature = 3.0
    with pytest.raises(
        UnsupportedError, match="training_step sets an attribute that the model reads to an unexpected value"
    ) as raised:
        traced.check_current("training_step")
    assert "0.temperature" in str(raised.value.observed)


def test_modules_that_stay_whole_read_theirs_anew_and_note_nothing() -> None:
    model = nn.Sequential(Annealed(), nn.Linear(3, 3))
    traced = trace_region(model, call_of(torch.ones(2, 3)))
    assert not any(key[0] == "0" for key in traced.guards if isinstance(key, tuple))


def test_names_of_what_changed() -> None:
    model = nn.Sequential(Annealed())
    with noted_guards(model, lambda: True) as guards:
        assert model[0].temperature
    model[0].temperature = 1.5
    assert [*map(name_of_guard, failed_guards(model, guards))] == ["0.temperature"]


def test_what_a_function_holds_is_compared() -> None:
    """A forward may read a number through a function that has it in its closure, or among its attributes."""

    def holding(value: float) -> Any:
        def get() -> float:
            return value

        return get

    assert comparable((holding(1.0),)) == comparable((holding(1.0),)) != comparable((holding(2.0),))
    get = holding(1.0)
    before = comparable(get)
    get.scale = 2.0  # type: ignore[attr-defined]
    assert comparable(get) != before


def test_what_is_compared_is_the_value_that_was_read_first() -> None:
    model = Annealed()
    with noted_guards(model, lambda: True) as guards:
        assert model.temperature == 2.0
        model.temperature = 5.0
        assert model.temperature == 5.0
    assert guards["", "temperature"] == 2.0
