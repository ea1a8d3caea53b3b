"""Optimizers whose step needs all parameters together are found by trying them, and refused with several stages."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_fxpipe.coupling import couples_parameters
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.support import check_optimizers


class Lion(Optimizer):
    """Each parameter by itself."""

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr})
        self.counts = {"steps": 0}

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        self.counts["steps"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.data.add_(momentum.lerp(p.grad, 0.1).sign(), alpha=-group["lr"])
                momentum.lerp_(p.grad, 0.01)
        return loss


class Clipping(Lion):
    """As LAMB does: gradients are divided by the norm of all, where it exceeds a limit."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad / norm.clamp(min=1.0), alpha=group["lr"])


class Estimating(Optimizer):
    """As Prodigy does: a step size that all parameters share, estimated from their gradients and ways so far."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "d": 1e-6, "numerator": 0.0})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        first = self.param_groups[0]
        total = 0.0
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                start = state.setdefault("start", p.detach().clone())
                total_gradient = state.setdefault("sum", torch.zeros_like(p)).add_(p.grad, alpha=first["d"])
                first["numerator"] += float(first["d"] * (p.grad * (start - p.data)).sum())
                total += float(total_gradient.abs().sum())
        first["d"] = max(first["d"], 10.0 * first["numerator"] / total)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad.sign(), alpha=first["d"] * group["lr"])


class Around(Optimizer):
    """Holds another optimizer, as Lookahead and SAM do."""

    def __init__(self, params: Any, inner: Callable[[Any], Optimizer]) -> None:
        super().__init__(params, {})
        self.inner = inner(self.param_groups)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


class Averaging(Lion):
    """Keeps a list of the parameters, and its own hands on them."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.listed = params


def parameters() -> list[nn.Parameter]:
    layers = [nn.Linear(3, 3, device=device) for device in ("cpu", "meta")]
    return [parameter for layer in layers for parameter in layer.parameters()]


def as_groups(kind: Any) -> Optimizer:
    return kind([{"params": [parameter]} for parameter in parameters()])


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdamW(parameters()),
        lambda: Lion(parameters()),
        lambda: as_groups(Lion),
        lambda: Around(parameters(), Lion),
        lambda: Around(parameters(), SGD),
    ],
)
def test_a_step_of_each_parameter_by_itself_passes(make: Callable[[], Optimizer]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_optimizers([make()], 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Clipping(parameters()),
        lambda: as_groups(Clipping),
        lambda: Estimating(parameters()),
        lambda: Around(parameters(), Clipping),
    ],
)
def test_a_step_of_all_parameters_together_is_refused_with_several_stages(make: Callable[[], Optimizer]) -> None:
    check_optimizers([make()], 1)
    with pytest.raises(UnsupportedError, match="needs all parameters together"):
        check_optimizers([make()], 2)


def test_a_warmup_that_begins_with_zero_does_not_hide_it() -> None:
    optimizer = Clipping(parameters())
    LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    assert couples_parameters(optimizer)


def test_a_trial_leaves_the_optimizer_and_the_random_numbers_as_they_are() -> None:
    optimizer = Lion(parameters())
    called: list[Any] = []
    optimizer.register_step_pre_hook(lambda *args: called.append(args))
    LambdaLR(optimizer, lambda step: 1.0)
    before = copy.deepcopy([{**group, "params": None} for group in optimizer.param_groups]), torch.get_rng_state()
    values = [parameter.clone() for parameter in optimizer.param_groups[0]["params"] if not parameter.is_meta]
    couples_parameters(optimizer)
    assert [{**group, "params": None} for group in optimizer.param_groups] == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(map(torch.equal, values, optimizer.param_groups[0]["params"]))
    assert not optimizer.state
    assert optimizer.counts == {"steps": 0}
    assert not called


def test_an_optimizer_that_cannot_be_tried_is_let_through_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="Averaging could not be tried on parameters other than its own .*attribute"):
        check_optimizers([Averaging(parameters())], 2)


def test_an_optimizer_that_needs_its_state_is_let_through_with_a_warning() -> None:
    class Prepared(Lion):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["made in __init__"].add_(1)

    with pytest.warns(UserWarning, match="KeyError"):
        check_optimizers([Prepared(parameters())], 2)
