"""What mixes samples without showing it in a shape is found by trial, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_fxpipe.independence import mixing_call


class Stage(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.function(self.first(x))))


def found(function: Callable[[Tensor], Tensor]) -> str | None:
    torch.manual_seed(2)
    module = fx.symbolic_trace(Stage(function))
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    state = torch.get_rng_state()
    mixing = mixing_call(module, [torch.randn(4, 3)], [0], lambda name: 0, 4)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in module.named_buffers())
    torch.set_rng_state(state)
    assert module.norm.training
    return mixing


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.roll(1, 0),
        lambda x: x.flip(0),
        lambda x: x.sort(0).values,
        lambda x: x - x.mean(0),
        lambda x: x.softmax(0),
        lambda x: x.cumsum(0),
        lambda x: (x @ x.T).softmax(1) @ x,
        lambda x: x[torch.tensor([1, 0, 3, 2])],
    ],
)
def test_calls_that_mix_samples_are_named(function: Callable[[Tensor], Tensor]) -> None:
    assert found(function) is not None


@pytest.mark.parametrize(
    "function",
    [lambda x: x.sort(1).values, lambda x: x - x.mean(1, keepdim=True), lambda x: x.softmax(1), lambda x: x.relu().exp()],
)
def test_calls_within_samples_are_not(function: Callable[[Tensor], Tensor]) -> None:
    """Nor are a batch norm, of whose statistics the user is told, and dropout."""
    assert found(function) is None


def test_the_first_call_that_mixes_is_named() -> None:
    assert "roll" in str(found(lambda x: x.sin().roll(1, 0).flip(0)))


def test_a_single_sample_shows_nothing() -> None:
    module = fx.symbolic_trace(Stage(torch.sin))
    assert mixing_call(module, [torch.randn(1, 3)], [0], lambda name: 0, 1) is None


def test_integers_stay_legal() -> None:
    """What stands in a sample's place is another one's: an index made up could be out of range."""

    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).flip(0)

    ids = torch.tensor([[4], [0], [3]])
    assert mixing_call(fx.symbolic_trace(Embeds()), [ids], [0], lambda name: 0, 3) is not None
    assert ids.tolist() == [[4], [0], [3]]
