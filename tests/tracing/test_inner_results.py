"""Tensors that leave a whole module by another way than its result."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.errors import TraceError, UnsupportedError
from lightning_fxpipe.planner.assignment import Assignment
from lightning_fxpipe.tracing import trace
from lightning_fxpipe.tracing.fake_run import fake_run
from lightning_fxpipe.tracing.inner_results import taking
from lightning_fxpipe.tracing.trace import trace_region
from tests.staging import WIDTH, batch, call_of, chain_of, run_staged, run_whole

COLLECTED: ContextVar[list[Tensor] | None] = ContextVar("collected", default=None)


def collect(module: nn.Module, args: Any, output: Any) -> None:
    """As the hooks of transformers do for router logits, attentions and hidden states."""
    collected = COLLECTED.get()
    if collected is not None:
        collected.append(output[0])


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        return logits, logits.softmax(-1)


class Layer(nn.Module):
    """Returns one thing, and lets another one out."""

    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        self.router, self.out, self.calls = Router(), nn.Linear(WIDTH, WIDTH), calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            _, scores = self.router(x)
            x = torch.tanh(self.out(x)) * scores.amax(-1, keepdim=True)
        return x


class Experts(nn.Module):
    """Uses at the end what its layers have let out."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(layers or [Layer(), Layer(calls=2), Layer()])
        for module in self.modules():
            if isinstance(module, Router):
                module.register_forward_hook(collect)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        collected: list[Tensor] = []
        token = COLLECTED.set(collected)
        try:
            for layer in self.layers:
                x = layer(x)
        finally:
            COLLECTED.reset(token)
        return x, torch.stack([logits.logsumexp(-1).mean() for logits in collected]).sum()


def test_layers_stay_whole_and_return_what_the_loss_uses() -> None:
    chain = chain_of(Experts(), batch(), opened=())
    calls = [node for node in chain.traced.graph.nodes if node.op == "call_module"]
    assert [node.target for node in calls] == ["layers.0", "layers.1", "layers.2"]
    assert [node.meta["inner_results"] for node in calls] == [
        (("router.gate", 0, 0),), (("router.gate", 0, 0), ("router.gate", 1, 0)), (("router.gate", 0, 0),),
    ]  # fmt: skip


def test_stages_give_the_results_and_gradients_of_the_whole_model() -> None:
    model = Experts()
    chain = chain_of(model, batch(), opened=())
    calls = [position for position, unit in enumerate(chain.units) if unit.nodes[0].op == "call_module"]
    staged = run_staged(Assignment(chain=chain, cuts=(calls[0], calls[1])), [batch()])
    whole = run_whole(model, [batch()])
    torch.testing.assert_close(tuple(staged.result), tuple(whole.result))
    assert staged.gradients.keys() == whole.gradients.keys()
    for fqn, gradient in whole.gradients.items():
        torch.testing.assert_close(staged.gradients[fqn], gradient, msg=fqn)


class LooksAtValues(Layer):
    """Runs on made-up data while it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) < 1e9 else x


def test_value_out_of_a_module_that_looks_at_values_is_refused() -> None:
    with pytest.raises(TraceError, match="not computed during tracing|other than through its result"):
        chain_of(Experts(Layer(), LooksAtValues()), batch(), opened=())


class KeepsAFunctionsResult(nn.Module):
    """What leaves it is no module's result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(x))
        collect(self, (), (hidden,))
        return hidden * 2


def test_result_of_a_function_inside_a_whole_module_is_refused() -> None:
    with pytest.raises(TraceError, match="not computed during tracing"):
        chain_of(Experts(KeepsAFunctionsResult()), batch(), opened=())


def num_recordings(layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    made: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return fake_run(*args, **kwargs)

    monkeypatch.setattr(trace, "fake_run", counting)
    trace_region(Experts(*(LooksInside() for _ in range(layers))), call_of(batch()), opened=())
    return len(made)


class LooksInside(Layer):
    """Part of it runs on made-up data, but not what lets something out."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = Looks()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.looks(x))


class Looks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.sum()) < 1e9 else x


def test_many_layers_are_not_recorded_more_often_than_few(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_recordings(2, monkeypatch) == num_recordings(5, monkeypatch)


def test_a_module_that_makes_fewer_calls_inside_than_recorded_is_refused() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(x)

    module = Once()
    with (
        pytest.raises(UnsupportedError, match="Once makes different inner calls than when it was traced") as caught,
        taking(module, [("gate", 0, 0), ("gate", 1, 0)]),
    ):
        module(torch.ones(2, WIDTH))
    assert caught.value.observed == "1 calls of gate"
    assert "at least 2" in str(caught.value.expected)
