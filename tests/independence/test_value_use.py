"""Whether calls look at values, or at shapes only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.independence import value_use
from lightning_fxpipe.independence.value_use import made_without_values
from lightning_fxpipe.planner.cost import group_calls
from lightning_fxpipe.tracing.repeat import Repeat
from tests.traces import WIDTH, batch, target_name, trace


class Calls(nn.Module):
    """A function, or a module that stays whole."""

    def __init__(self, inner: nn.Module | Callable[[Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = inner

    def forward(self, x: Tensor) -> object:
        return self.inner(self.linear(x))


def independent(inner: nn.Module | Callable[[Tensor], object], name: str) -> list[int | None]:
    """Of the tensors that the call ``name`` gives those that do not follow from the batch; which entry of a tuple they are."""
    traced = trace(Calls(inner), batch(), opened=())
    (group,) = [group for group in group_calls(traced.graph)[0] if target_name(group[0]) == name]
    following = {
        node for node in group[0].all_input_nodes if any(isinstance(size, torch.SymInt) for size in node.meta["val"].shape)
    }
    assert following
    found = made_without_values(Repeat(traced), group, following)
    return [node.args[1] if "part_of" in node.meta else None for node in group if node in found]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("zeros_like", lambda h: torch.zeros_like(h)),
        ("new_full", lambda h: h.new_full((2,), 3)),
        ("to", lambda h: torch.ones(3).to(h)),
        ("type_as", lambda h: torch.ones(3, dtype=torch.int64).type_as(h)),
        ("expand_as", lambda h: torch.ones(1, 1).expand_as(h)),
    ],
)
def test_calls_of_torch_that_take_over_a_kind(name: str, function: Callable[[Tensor], Tensor]) -> None:
    assert independent(function, name) == [None]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("sum", lambda h: h.sum()),
        ("any", lambda h: (h > 0).any(0)),
        ("detach", lambda h: h.detach()),
        ("mul", lambda h: 0 * h),
        ("addmm_", lambda h: torch.zeros(WIDTH, WIDTH).addmm_(h.T, h)),
    ],
)
def test_calls_of_torch_that_look_at_values(name: str, function: Callable[[Tensor], Tensor]) -> None:
    assert independent(function, name) == []


class Table(nn.Module):
    """Positions for as many places as there are; of several results only some look at the values."""

    num_calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9, WIDTH))
        self.register_buffer("table", torch.zeros(9, WIDTH))
        self.outside = {"table": torch.zeros(9, WIDTH)}

    def forward(self, x: Tensor) -> object:
        rows = self.weight[: x.shape[1]]
        return rows.to(x.dtype) + 1, x.mean() * rows, rows + x.new_zeros(()), rows


def test_each_result_of_a_module_by_itself() -> None:
    assert independent(Table(), "inner") == [0, 2, 3]


class GivesInput(Table):
    def forward(self, x: Tensor) -> object:
        return x, x.T, self.weight[: x.shape[1]]


class KeepsInput(Table):
    def forward(self, x: Tensor) -> object:
        self.table[0] = x[0]
        return self.weight[: x.shape[1]]


class Accumulates(Table):
    def forward(self, x: Tensor) -> object:
        total = torch.zeros(WIDTH)
        total += x.sum(0)
        return total, torch.zeros(WIDTH)


class Counts(Table):
    def forward(self, x: Tensor) -> object:
        self.num_calls += 1
        return self.weight * self.num_calls


class Branches(Table):
    def forward(self, x: Tensor) -> object:
        return self.weight if x.sum().item() > 0 else -self.weight


class Custom(torch.autograd.Function):
    """Torch sees what it does, but not what goes by."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.sum(0)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class Applies(Table):
    def forward(self, x: Tensor) -> object:
        return Custom.apply(x), self.weight[0]  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("module", "found"),
    [(GivesInput, [2]), (KeepsInput, []), (Accumulates, [1]), (Counts, []), (Branches, []), (Applies, [1])],
)
def test_what_cannot_be_seen_counts_as_looking(module: type[Table], found: list[int]) -> None:
    inner = module()
    before = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
    assert independent(inner, "inner") == found
    assert inner.num_calls == 0
    assert type(inner.weight) is nn.Parameter
    assert all(torch.equal(tensor, before[name]) for name, tensor in inner.state_dict().items())


def test_a_size_that_depends_on_data_counts_as_looking() -> None:
    assert independent(lambda h: torch.zeros_like(h[h > 0]), "zeros_like") == []


def test_a_result_that_is_no_fake_comes_from_out_of_sight() -> None:
    assert value_use._Followed().reaches(torch.ones(1))
