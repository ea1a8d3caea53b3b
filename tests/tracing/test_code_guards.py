"""Plain values that code reads from elsewhere than modules are those of today."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_fxpipe.tracing.code_guards import CodeKey, RunKey, code_guards
from lightning_fxpipe.tracing.guards import failed_guards, guarded_values, name_of_guard

SCALE = 1.0
OPTIONS = {"dropout": 0.1, "layers": [1, 2]}
UNNAMED = 3
HERE = sys.modules[__name__]


class Settings:
    width = 4

    def method(self) -> None:
        """No value."""


class Annealing(Callback):
    def __init__(self) -> None:
        self.temperature = 1.0


def inner(x: Tensor) -> Tensor:
    return x * OPTIONS["dropout"]


class Base(nn.Module):
    bias = 0.5


class Model(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x) * self.scale + self.bias

    @property
    def scale(self) -> float:
        return SCALE

    def helper(self, x: Tensor) -> Tensor:
        return inner(x)[:, : Settings.width]

    def unused(self) -> int:
        return UNNAMED


class AsksTheRun(nn.Module):
    _trainer: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return x * self.trainer.optimizers[0].param_groups[0]["lr"] * self.trainer.callbacks[0].temperature


def names_of(module: nn.Module) -> list[str]:
    return sorted(str(key) for key in code_guards(module, [""]) if isinstance(key, (CodeKey, RunKey)))


def test_what_forward_names_and_its_methods_and_functions_is_read() -> None:
    found = code_guards(Model(), [""])
    assert {key.names for key in found if isinstance(key, CodeKey)} >= {("SCALE",), ("OPTIONS",), ("Settings", "width")}
    assert ("", "bias") in found
    assert not any("UNNAMED" in name or "method" in name for name in names_of(Model()))


def test_an_attribute_is_no_global_variable_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that calls its module `model` would have it compared as a whole before each batch, counters and all."""
    monkeypatch.setattr(HERE, "helper", SimpleNamespace(seen=0), raising=False)
    assert not any("helper" in name for name in names_of(Model()))


def test_a_module_in_a_global_variable_is_no_plain_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HERE, "SCALE", nn.Linear(2, 2))
    assert not any("SCALE" in name for name in names_of(Model()))


def test_only_opened_modules_are_looked_at() -> None:
    assert code_guards(nn.Sequential(Model()), []) == {}
    assert code_guards(nn.Sequential(nn.Linear(2, 2)), ["", "0"]) == {}
    assert ("0", "bias") in code_guards(nn.Sequential(Model()), ["0"])


CHANGES: dict[str, tuple[Any, str, Any]] = {
    "global": (HERE, "SCALE", 2.0),
    "class": (Settings, "width", 2),
    "base": (Base, "bias", 1.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    reads = code_guards(model, [""])
    assert not failed_guards(model, reads)
    monkeypatch.setattr(*CHANGES[name])
    assert len(failed_guards(model, reads)) == 1


def test_a_change_in_a_container_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    reads = code_guards(model, [""])
    monkeypatch.setitem(OPTIONS, "layers", [1, 3])
    assert [*map(name_of_guard, failed_guards(model, reads))] == [f"{__name__}.OPTIONS"]


def test_a_variable_that_is_gone_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    reads = code_guards(model, [""])
    monkeypatch.delattr(HERE, "SCALE")
    assert [*map(name_of_guard, failed_guards(model, reads))] == [f"{__name__}.SCALE"]


def test_rates_and_callbacks_are_read_where_code_names_them() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer, callback = torch.optim.SGD([weight], lr=0.1), Annealing()
    module = AsksTheRun()
    module._trainer = SimpleNamespace(
        strategy=SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[]), callbacks=[callback]
    )
    reads = code_guards(module, [""])
    assert names_of(module) == ["trainer.callbacks", "trainer.param_groups"]
    weight.data.add_(1)  # what is trained is no setting
    assert not failed_guards(module, reads)
    optimizer.param_groups[0]["lr"] = 0.2
    assert [*map(name_of_guard, failed_guards(module, reads))] == ["trainer.param_groups"]
    callback.temperature = 0.5
    assert [*map(name_of_guard, failed_guards(module, reads))] == ["trainer.callbacks", "trainer.param_groups"]
    assert names_of(Model()) == [name for name in names_of(Model()) if "trainer" not in name]


def test_a_module_without_a_trainer_has_no_rates() -> None:
    module = AsksTheRun()
    assert set(guarded_values(module, code_guards(module, [""])).values()) <= {None}
