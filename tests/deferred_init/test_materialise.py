"""Values for a module without data: recorded ones, those of the modules' own methods, or a refusal by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fxpipe.deferred_init.materialise import Constructions, Materials, placeholder_for, put_in_place
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.user_code.exchange import named_tensors

CPU = torch.device("cpu")


def values(module: nn.Module, materials: Materials) -> dict[str, torch.Tensor]:
    fqns = [fqn for *_, fqn, tensor in named_tensors(module) if tensor.is_meta]
    return dict(zip(fqns, materials.values(fqns), strict=True))


class Applied(nn.Module):
    """A model that initialises all of its modules, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


class Deferring(nn.Module):
    """A model that leaves its initialisation out on the meta device, as Hugging Face's do, around a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4) * 2.0, persistent=False)
        if not self.layer.weight.is_meta:
            self.initialize_weights()

    def initialize_weights(self) -> None:
        for module in self.modules():
            if getattr(module, "_is_hf_initialized", False) is not True:
                module._is_hf_initialized = True
                if module is self:
                    self.table.copy_(torch.arange(4) * 2.0)
                elif isinstance(module, nn.Linear):
                    nn.init.trunc_normal_(module.weight, std=0.02)
                    nn.init.ones_(module.bias)


class Attributes(nn.Module):
    """Has tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.table = torch.rand(3)
        self.tables = {"one": [torch.rand(2)], "pair": (torch.rand(1), 3)}


@pytest.mark.parametrize("kind", [Applied, Deferring, lambda: nn.Transformer(8, 2, 1, 1, 8, batch_first=True)])
def test_a_module_on_the_meta_device_initialises_itself_as_its_constructor_does(kind: Any) -> None:
    torch.manual_seed(3)
    expected = kind()
    torch.manual_seed(3)
    with torch.device("meta"):
        module = kind()
    found = values(module, Constructions().take(module, draws=True))
    for *_, fqn, tensor in named_tensors(expected):
        torch.testing.assert_close(found[fqn], tensor, rtol=0, atol=0, msg=fqn)


def test_a_method_that_has_both_names_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing Lightning's demos gives MultiheadAttention the first of them."""
    monkeypatch.setattr(nn.MultiheadAttention, "reset_parameters", nn.MultiheadAttention._reset_parameters, raising=False)
    test_a_module_on_the_meta_device_initialises_itself_as_its_constructor_does(lambda: nn.MultiheadAttention(8, 2))


def test_attributes_get_their_data_in_place() -> None:
    torch.manual_seed(3)
    expected = Attributes()
    torch.manual_seed(3)
    constructions = Constructions()
    with constructions.recording(CPU, draws=True):
        module = Attributes()
    tables = module.tables
    constructions.take(module, draws=True)
    assert module.tables is tables
    for found, value in (
        (module.table, expected.table),
        (tables["one"][0], expected.tables["one"][0]),
        (tables["pair"][0], expected.tables["pair"][0]),
    ):
        assert torch.equal(found, value)
    assert module.layer.weight.is_meta


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (lambda: nn.ParameterList([nn.Parameter(torch.randn(3))]), "0 (no module method"),
        (lambda: nn.Sequential(nn.Linear(2, 2), Attributes()), "1.table (no module method"),
    ],
)
def test_what_nobody_initialises_is_named(module: Any, named: str) -> None:
    with torch.device("meta"):
        blank = module()
    with pytest.raises(UnsupportedError, match=re.escape(named)):
        Constructions().take(blank, draws=True)


def test_a_checkpoint_may_bring_what_nobody_initialises() -> None:
    with torch.device("meta"):
        blank = nn.Sequential(nn.Linear(2, 2), nn.ParameterList([nn.Parameter(torch.randn(3))]))
    materials = Constructions().take(blank, draws=False)
    before = torch.get_rng_state()
    found = values(blank, materials)
    assert all(not value.any() for value in found.values())
    for fqn, value in found.items():
        materials.note_placed(fqn, value)
    found["1.0"].fill_(5)
    with pytest.raises(UnsupportedError, match=r"1\.0 \(no module method"):
        Constructions().take(blank, draws=False).finish(["0.weight"], draws=False)
    materials.finish(["1.0", "0.bias"], draws=False)
    assert found["0.weight"].abs().min() > 0
    assert not found["0.bias"].any()
    assert found["1.0"].eq(5).all()
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_parameter_that_gets_data_is_the_same_object() -> None:
    blank = nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
    blank.mark = 1  # type: ignore[attr-defined]
    made = put_in_place(blank, torch.ones(3))
    assert made is blank
    assert made.device == CPU
    assert not made.requires_grad
    assert made.mark == 1  # type: ignore[attr-defined]


def test_a_module_that_another_run_has_split_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.weight = placeholder_for(module.weight)  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="has lost some of its parameters"):
        Constructions().take(module, draws=True)
