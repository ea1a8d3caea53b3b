"""Optimizers whose step needs all parameters together are found by trying them, and refused with several stages."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import broadcast
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_fxpipe.distributed.replica import Replica
from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.optim.coupling import couples_parameters
from lightning_fxpipe.strategy.support import check_optimizers


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
        assert check_optimizers([make()], 2) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: Clipping(parameters()),
        lambda: as_groups(Clipping),
        lambda: Estimating(parameters()),
        lambda: Around(parameters(), Clipping),
    ],
)
def test_a_step_of_all_parameters_together_is_found_with_several_stages(make: Callable[[], Optimizer]) -> None:
    optimizer = make()
    assert check_optimizers([optimizer], 1) == []
    with pytest.warns(UserWarning, match="needs all parameters at once"):
        assert check_optimizers([optimizer], 2) == [optimizer]


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


class Sharp(Around):
    """As SAM does: gradients are those of a place that lies further along the gradient of all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad / norm, alpha=0.05)
        with torch.enable_grad():
            loss = closure()
        for p in parameters:
            p.copy_(self.state[p]["old"])
        self.inner.step()
        return loss


class SlowLists(Around):
    """As Lookahead is often written: slow weights by their place in the groups."""

    def __init__(self, params: Any, inner: Callable[[Any], Optimizer], every: int = 20) -> None:
        super().__init__(params, inner)
        self.slow_weights = [[p.clone().detach() for p in group["params"]] for group in self.param_groups]
        self.every, self.count = every, 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            for group, slow in zip(self.param_groups, self.slow_weights, strict=False):
                for p, q in zip(group["params"], slow, strict=False):
                    q.add_(p.data - q, alpha=0.5)
                    p.data.copy_(q)
        return loss


class SlowFlat(Around):
    """Slow weights in one vector."""

    def __init__(self, params: Any, inner: Callable[[Any], Optimizer]) -> None:
        super().__init__(params, inner)
        self.slow = torch.cat([p.detach().reshape(-1) for group in self.param_groups for p in group["params"] if not p.is_meta])


class SlowStates(Around):
    """Slow weights in the state of their parameters, made with the optimizer."""

    def __init__(self, params: Any, inner: Callable[[Any], Optimizer], every: int = 7) -> None:
        super().__init__(params, inner)
        self.every, self.count = every, 0
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["slow"] = p.clone().detach()

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.inner.step(closure)
        self.count += 1
        for p in (p for group in self.param_groups for p in group["params"] if self.count % self.every == 0):
            p.data.copy_(self.state[p]["slow"].lerp_(p.data, 0.5))
        return loss


class Rates(Lion):
    """A rate for each parameter, by its place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rates = [0.1 * 0.5**index for index in range(sum(len(group["params"]) for group in self.param_groups))]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        parameters = (p for group in self.param_groups for p in group["params"])
        for p, rate in zip(parameters, self.rates, strict=False):
            p.data.sub_(p.grad, alpha=rate)


class Deeper(Lion):
    """A rate for each parameter, by how many come before it in its group."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                p.data.sub_(p.grad, alpha=0.1 * 0.9**index)


class Later(Lion):
    """Gathers what all gradients say, and goes by it after many steps only."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.total = 0.0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.total += sum(float(p.grad.abs().sum()) for group in self.param_groups for p in group["params"])
        return super().step(closure)


class Table(Lion):
    """A table of constants, as optimizers with 8 bits have."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.tables = {"signed": torch.linspace(-1, 1, 255), "unsigned": torch.linspace(0, 1, 255)}

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data.sub_(self.tables["signed"][(p.grad.clamp(-1, 1) * 127).long() + 127], alpha=0.01)


class Keyed(Lion):
    """A rate for each parameter, by its identity."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rates = {id(p): 0.1 * index for index, p in enumerate(p for group in self.param_groups for p in group["params"])}

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            p.data.sub_(p.grad, alpha=self.rates[id(p)])


class Counted(Lion):
    """Counts the steps of each parameter, by its identity."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen = {id(p): 0 for group in self.param_groups for p in group["params"]}

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.seen[id(p)] += 1
        return super().step(closure)


class TwoModes(Lion):
    """As schedule-free optimizers are: it steps in one mode only."""

    is_training = False

    def train(self) -> None:
        self.is_training = True

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert self.is_training
        return super().step(closure)


class TalkingToo(Lion):
    """The same by a name that was imported before the run."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        broadcast(self.param_groups[0]["params"][0].grad, src=0)
        return super().step(closure)


class OfModel(Lion):
    """Keeps the model."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.model = nn.Linear(2, 2)


class Talking(Lion):
    """Shares the work between ranks."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            torch.distributed.all_reduce(p.grad)


def with_closure_over_copies(params: Any) -> Optimizer:
    params = list(params)
    copies = [p.detach().clone() for p in params]
    optimizer = SGD(params, lr=0.1)

    def step(closure: Any = None) -> None:
        for p, q in zip(params, copies, strict=True):
            p.data.lerp_(q, 0.1)

    optimizer.step = step  # type: ignore[method-assign,assignment]
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda: SlowStates(parameters(), SGD),
        lambda: Table(parameters()),
        lambda: Keyed(parameters()),
        lambda: TwoModes(parameters()),
    ],
)
def test_what_is_kept_for_each_parameter_by_itself_passes(make: Callable[[], Optimizer]) -> None:
    check_optimizers([make()], 2)


@pytest.mark.parametrize("kind", [Rates, Deeper, Later, lambda params: Sharp(params, SGD)])
def test_what_goes_by_the_other_parameters_is_refused(kind: Callable[[Any], Optimizer]) -> None:
    assert couples_parameters(kind(parameters()))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SlowLists(parameters(), SGD), r"SlowLists.slow_weights\[0\] holds 4 tensors with the parameters' shapes"),
        (lambda: SlowFlat(parameters()[:2], SGD), r"SlowFlat.slow is a tensor of shape \(12,\)"),
        (lambda: with_closure_over_copies(parameters()), "SGD.step, copies holds 4 tensors"),
        (lambda: OfModel(parameters()), "OfModel.model is a module"),
        (lambda: Talking(parameters()), "torch.distributed.all_reduce"),
        (lambda: TalkingToo(parameters()), "torch.distributed.broadcast"),
    ],
)
def test_what_cannot_be_tried_is_refused_with_the_reason(make: Callable[[], Optimizer], words: str) -> None:
    check_optimizers([make()], 1)
    with pytest.raises(UnsupportedError, match=f"(?s)optimizer cannot be verified to train a stage.*{words}"):
        check_optimizers([make()], 2)


def test_numbers_under_a_parameters_identity_are_no_common_ones() -> None:
    """The next trial's parameters may lie where those of the last one did."""
    for _ in range(10):
        assert not couples_parameters(Keyed(parameters()))
        assert not couples_parameters(Counted(parameters()))


def test_communication_is_found_while_torch_distributed_answers_for_one_replica() -> None:
    """As when a run makes its optimizers: nothing may be sent by a trial."""

    def share(value: Any) -> Any:
        raise AssertionError("a trial has communicated")

    replica = Replica(share)
    for kind, name in ((Talking, "all_reduce"), (TalkingToo, "broadcast")):
        with replica.answering(), replica.acting(), pytest.raises(UnsupportedError, match=f"torch.distributed.{name}"):
            check_optimizers([kind(parameters())], 2)


def test_a_list_of_the_parameters_themselves_is_no_obstacle() -> None:
    assert not couples_parameters(Averaging(parameters()))


def test_an_optimizer_that_cannot_make_a_step_is_refused() -> None:
    class Prepared(Lion):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["made in __init__"].add_(1)

    with pytest.raises(UnsupportedError, match="KeyError"):
        check_optimizers([Prepared(parameters())], 2)


def test_a_step_that_an_object_was_given_is_tried_below_a_schedulers_counting() -> None:
    optimizer = SGD(parameters(), lr=0.1)
    optimizer.step = Clipping.step.__get__(optimizer)  # type: ignore[method-assign]
    LambdaLR(optimizer, lambda step: 1.0)
    assert couples_parameters(optimizer)
