"""A construction without data: whatever a constructor does, its tensors are those that it makes on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.deferred_init.construction import Construction
from lightning_fxpipe.deferred_init.drawing import spend

CPU = torch.device("cpu")


def cut_off() -> nn.Module:
    """Draws until all values are within bounds: code that looks at values."""
    module = nn.ModuleList([nn.Linear(30, 20), nn.Linear(30, 20)])
    nn.init.trunc_normal_(module[0].weight, std=0.02)
    nn.init.trunc_normal_(module[1].weight, mean=5.0, a=7, b=9)
    return module


def by_hand() -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(50, 40) * 0.02)
    with torch.no_grad():
        module.weight[3] = 0
        module.weight[:, 5:7] += torch.rand(2)
    position, rate = torch.arange(500).unsqueeze(1), torch.exp(torch.arange(0, 64, 2) * -0.1)
    table = torch.zeros(500, 64)
    table[:, 0::2], table[:, 1::2] = torch.sin(position * rate), torch.cos(position * rate)
    module.register_buffer("table", table)
    module.register_buffer("mask", torch.tril(torch.ones(200, 200)).view(1, 200, 200), persistent=False)
    module.register_buffer("steps", torch.tensor([float(s) for s in torch.linspace(0, 1, 4).tolist()]) * torch.rand(4))
    return module


def called() -> nn.Module:
    """Runs layers that change buffers, which their operators' schemas do not say."""
    module = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(20_000)])
    for norm in module:
        norm(torch.randn(4, norm.num_features) + 2)
    return module


def seeded() -> nn.Module:
    """Sets generators, and has one of its own."""
    module = nn.ModuleList([nn.Linear(5, 6)])
    torch.manual_seed(9)
    module.append(nn.Linear(5, 6))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module.append(nn.Linear(4, 4))
    own = torch.Generator().manual_seed(5)
    module.append(nn.Linear(4, 4))
    nn.init.normal_(module[3].weight, generator=own)
    module.drawn = nn.Parameter(torch.randn(4, generator=own))
    module.order = nn.Parameter(torch.randperm(70).float())
    module.chosen = nn.Parameter(torch.bernoulli(torch.full((30,), 0.3)))
    module.like = nn.Parameter(torch.rand_like(module.chosen))
    return module


def loaded() -> nn.Module:
    module = nn.Linear(3, 4)
    module.load_state_dict({"weight": torch.arange(12.0).view(4, 3), "bias": torch.randn(4)})
    module.weight.data = torch.cat([module.weight.data, torch.randn(4, 3)])
    module.more = nn.Parameter(module.weight[:, 0].clone())
    return module


def emptied() -> nn.Module:
    """What the constructor itself lays on the meta device takes no random numbers until it has memory."""
    with torch.device("meta"):
        module = nn.Linear(3, 4)
    module.to_empty(device="cpu")
    module.reset_parameters()
    return module


def torchs_own() -> nn.Module:
    conv, recurrent = nn.Conv2d(3, 4, 5), nn.LSTM(5, 6, num_layers=2)
    attention, embedding = nn.MultiheadAttention(8, 2), nn.Embedding(40, 7, padding_idx=3)
    return nn.ModuleList([nn.Linear(30, 70), nn.BatchNorm1d(7), embedding, recurrent, attention, conv, nn.PReLU()])


def orthogonal() -> nn.Module:
    module = nn.Linear(8, 8)
    nn.init.orthogonal_(module.weight)
    nn.init.sparse_(module.weight, 0.3)
    return nn.utils.parametrizations.spectral_norm(module)


def half() -> nn.Module:
    """As under a precision plugin: another default dtype."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return nn.ParameterList([nn.Parameter(torch.randn(7) + torch.arange(7) / 3), nn.Parameter(torch.rand(40_000))])
    finally:
        torch.set_default_dtype(torch.float32)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "layers": torchs_own,
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
    "cut off": cut_off,
    "by hand": by_hand,
    "called": called,
    "seeded": seeded,
    "loaded": loaded,
    "emptied": emptied,
    "orthogonal": orthogonal,
    "half": half,
    "copies": lambda: nn.ModuleList([copy.deepcopy(layer) for layer in [nn.Linear(3, 4)] * 3]),
    "moved": lambda: nn.Linear(3, 4).to("cpu").half().to(CPU, torch.float64).cpu(),
}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


@pytest.mark.parametrize("name", MAKERS)
def test_tensors_and_generators_are_as_without(name: str) -> None:
    torch.manual_seed(0)
    expected = tensors_of(MAKERS[name]())
    after = torch.get_rng_state()
    torch.manual_seed(0)
    construction = Construction(CPU)
    with construction.recording():
        found = tensors_of(MAKERS[name]())
    assert torch.equal(torch.get_rng_state(), after)
    assert found.keys() == expected.keys()
    blank = {fqn: tensor for fqn, tensor in found.items() if tensor.is_meta}
    assert blank
    assert all(construction.has(t) and construction.is_unchanged(t) and construction.is_written(t) for t in blank.values())
    together = dict(zip(blank, construction.make(list(blank.values())), strict=True))
    for fqn, value in expected.items():
        assert torch.equal(together.get(fqn, found[fqn]), value), fqn
        assert together.get(fqn, found[fqn]).dtype == value.dtype
    for fqn, tensor in blank.items():  # a rank makes its own only
        assert torch.equal(construction.make([tensor])[0], expected[fqn]), fqn
    assert torch.equal(torch.get_rng_state(), after)


def test_random_numbers_may_be_drawn_later() -> None:
    torch.manual_seed(0)
    expected = tensors_of(torchs_own())
    after = torch.get_rng_state()
    torch.manual_seed(0)
    construction = Construction(CPU, draws=False)
    before = torch.get_rng_state()
    with construction.recording():
        found = tensors_of(torchs_own())
    blank = {fqn: tensor for fqn, tensor in found.items() if tensor.is_meta}
    assert torch.equal(torch.get_rng_state(), before)
    assert construction.needs_draws(list(blank.values()))
    construction.catch_up()
    assert torch.equal(torch.get_rng_state(), after)
    for fqn, value in zip(blank, construction.make(list(blank.values())), strict=True):
        assert torch.equal(value, expected[fqn])


def test_tensors_without_data_say_they_have_some_and_those_on_the_meta_device_do_not() -> None:
    construction = Construction(CPU)
    with construction.recording():
        layer = nn.Linear(3, 3)
        assert not layer.weight.is_meta
        assert layer.weight.is_cpu
        assert layer.weight.device == CPU
        assert layer.weight.detach().sum().item() == pytest.approx(float(layer.weight.detach().numpy().sum()))
        with torch.device("meta"):
            asked = nn.Linear(3, 3)
        assert asked.weight.is_meta
    assert layer.weight.is_meta


def test_what_is_changed_afterwards_is_known() -> None:
    construction = Construction(CPU)
    with construction.recording():
        layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    nn.init.zeros_(layers[1].weight)
    layers[2].half()
    assert construction.is_unchanged(layers[0].weight)
    assert not construction.is_unchanged(layers[1].weight)
    assert not construction.is_unchanged(layers[2].weight)
    assert not construction.has(nn.Linear(3, 3, device="meta").weight)


def test_tensors_that_share_memory_still_do() -> None:
    construction = Construction(CPU)
    with construction.recording():
        flat = torch.randn(6)
        module = nn.ParameterList([nn.Parameter(flat[:3]), nn.Parameter(flat[2:])])
    one, other = construction.make(list(module))
    one[2] = 7
    assert other[0] == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 70_001, 262_144, 300_007])
@pytest.mark.parametrize("function", [torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default])
def test_random_numbers_are_spent_in_parts_as_they_are_drawn_at_once(function: Any, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    function(torch.empty(size, dtype=dtype))
    expected = torch.get_rng_state()
    torch.manual_seed(2)
    spend(function, (), {}, torch.empty(size, dtype=dtype, device="meta"), CPU)
    assert torch.equal(torch.get_rng_state(), expected)
