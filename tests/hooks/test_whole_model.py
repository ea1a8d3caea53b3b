"""What code sees through :class:`WholeView`: a placeholder describes itself, and anything else gets what it stands for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d as dist
from torch import Tensor, nn

from lightning_fxpipe.distributed.topology import Placement, Topology
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.hooks.whole_model import Held, Used, WholeModel, WholeView


class Looks:
    """A layer of placeholders, a view on it, and which looks have brought something here."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.real = nn.Linear(3, 2)
        self.real(torch.randn(4, 3)).square().sum().backward()
        self.layer = nn.Linear(3, 2, device="meta")
        self.brought: list[str] = []
        self.held: dict[int, Tensor] = {}
        pairs = list(zip(self.layer.parameters(), self.real.parameters(), strict=True))
        self._values: dict[int, Tensor] = {id(p): q for p, q in pairs}
        self._gradients = {id(p): q.grad for p, q in pairs}
        self.common: dict[int, Tensor] = {}
        used = Used(values=self.values, gradients=self.gradients, common=lambda: self.brought.append("common"))
        held = partial(Held, missed=self.held, common=self.common)
        self.view = WholeView({id(p): p for p, _ in pairs}, held, used, torch.device("cpu"))

    def values(self) -> dict[int, Tensor]:
        self.brought.append("values")
        return self._values

    def gradients(self) -> dict[int, Tensor | None]:
        self.brought.append("gradients")
        return self._gradients


DESCRIBING: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda p: (p.shape, p.size(0), p.numel(), p.dim(), p.ndim, len(p), p.stride()),
    "kind": lambda p: (p.dtype, p.requires_grad, p.is_leaf, p.is_floating_point(), p.layout),
    "identity": lambda p: {p: 1}[p],
}


@pytest.mark.parametrize("what", DESCRIBING)
def test_a_description_brings_nothing_here(what: str) -> None:
    looks = Looks()
    with looks.view:
        assert DESCRIBING[what](looks.layer.weight) == DESCRIBING[what](looks.real.weight)
    assert looks.brought == []


def test_values_are_brought_before_a_rank_changes_its_own() -> None:
    """Later this rank's own would be sent as changed, and the ranks that receive them would change them once more."""
    looks = Looks()
    own = nn.Linear(2, 2)
    own.weight.grad = torch.ones(2, 2)
    looks.held[id(own.weight)] = own.weight
    with looks.view, torch.no_grad():
        assert (own.weight.shape, own.weight.device.type) == ((2, 2), "cpu")
        own.bias.mul_(2)
        assert looks.brought == []
        own.weight.mul_(2)
        assert looks.brought == ["values"]
        own.weight.grad.mul_(0.5)
        own.weight.grad = None
    assert looks.brought == ["values", "gradients", "gradients"]


def test_uses_of_what_every_rank_has_are_noted() -> None:
    """One rank alone may change it, and no vote would compare it."""
    looks = Looks()
    own = nn.Linear(2, 2)
    looks.common[id(own.weight)] = own.weight
    with looks.view, torch.no_grad():
        own.weight.size()
        own.bias.mul_(2)
        assert looks.brought == []
        own.weight.mul_(2)
        own.bias.requires_grad_(False)
    assert looks.brought == ["common", "common"]


def test_nothing_is_brought_into_the_trace_of_another() -> None:
    """The message would become part of what is recorded."""
    looks = Looks()
    with looks.view, pytest.raises(UnsupportedError, match="A hook traces the model with a tracer that cannot access"):
        torch.jit.trace(lambda x: x @ looks.layer.weight.t(), torch.ones(1, 3))  # type: ignore[no-untyped-call]


VALUES: dict[str, Callable[[nn.Linear], Any]] = {
    "method": lambda layer: layer.weight.norm(),
    "function of a list": lambda layer: torch.stack([layer.weight, layer.weight]),
    "foreach": lambda layer: torch._foreach_norm(list(layer.parameters())),
    "operator": lambda layer: 1 + layer.weight * 2,
    "data": lambda layer: layer.weight.data.sum(),
    "state_dict": lambda layer: list(layer.state_dict().values()),
    "copy": lambda layer: layer.weight.detach().clone(),
    "deep copy": lambda layer: list(copy.deepcopy(layer).parameters()),
    "like": lambda layer: torch.zeros_like(layer.weight),
    "device": lambda layer: torch.zeros(2, device=layer.weight.device),
    "vector": lambda layer: nn.utils.parameters_to_vector(layer.parameters()),
    "item": lambda layer: layer.bias.tolist(),
    "forward": lambda layer: layer(torch.ones(1, 3)),
    "gradient": lambda layer: layer.weight.grad.abs().mean(),
    "norm of gradients": lambda layer: nn.utils.get_total_norm([p.grad for p in layer.parameters()]),
    "clipping": lambda layer: (nn.utils.clip_grad_norm_(layer.parameters(), 0.1), layer.weight.grad),
}


@pytest.mark.parametrize("what", VALUES)
def test_a_look_gives_what_one_device_has(what: str) -> None:
    looks = Looks()
    expected = VALUES[what](copy.deepcopy(looks.real) if "grad" not in what and what != "clipping" else Looks().real)
    with looks.view:
        found = VALUES[what](looks.layer)
    torch.testing.assert_close(found, expected)


def test_changes_last_as_long_as_the_view() -> None:
    looks = Looks()
    with looks.view, torch.no_grad():
        looks.layer.weight.fill_(3.0)
        assert looks.layer.weight.sum() == 18
        looks.layer.weight.grad = None
        assert looks.layer.weight.grad is None
        looks.layer.requires_grad_(False)
    assert looks.layer.weight.is_meta
    assert not looks.layer.weight.requires_grad, "freezing is for the placeholder itself"


def test_a_change_in_place_puts_nothing_else_into_the_module() -> None:
    """What `weight *= 2` gives is put into the module, where the value had taken the placeholder's place for good."""
    looks = Looks()
    before, placeholder = looks.real.weight.detach().clone(), looks.layer.weight
    with looks.view, torch.no_grad():
        looks.layer.weight *= 2
        torch.testing.assert_close(looks.layer.weight.sum(), 2 * before.sum())
    assert looks.layer.weight is placeholder


def test_a_state_can_be_loaded() -> None:
    looks = Looks()
    other = nn.Linear(3, 2)
    with looks.view:
        looks.layer.load_state_dict(other.state_dict())
        assert torch.equal(looks.layer.weight, other.weight)


def test_other_tensors_are_left_alone() -> None:
    looks = Looks()
    with looks.view:
        assert torch.ones(3).sum() == 3
        assert nn.Linear(2, 2, device="meta").weight.device.type == "meta"
    assert looks.brought == []


def alone() -> Topology:
    return Topology(group=None, control_group=None, rank=0, placement=Placement(num_ranks=1), device=torch.device("cpu"))


def test_a_module_that_is_whole_again_has_no_placeholders() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    plan: Any = None
    whole = WholeModel(module, plan, alone())
    assert whole.placeholders().keys() == {id(parameter) for parameter in module[1].parameters()}
    for name, parameter in nn.Linear(2, 2).named_parameters():
        setattr(module[1], name, parameter)
    assert whole.placeholders() == {}


def test_brought_tensors_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come in one message, and each may be changed in place."""
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: None)
    plan: Any = None
    one, other = WholeModel(nn.Module(), plan, alone())._broadcast(0, [torch.ones(2), torch.zeros(3)])
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    assert (one.tolist(), other.tolist()) == ([1, 1], [0, 0, 0])
