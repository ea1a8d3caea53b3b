"""What mixes samples without showing it in a shape is found by trial, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import version_of
from lightning_fxpipe.independence.trials import carrying_call, counting_call, mixing_call, mixing_call_of_one


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


class Remembers(nn.Module):
    """Keeps something for its next call, and may use it."""

    def __init__(self, uses: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.uses, self.drop = uses, nn.Dropout(0.5)
        self.kept: Tensor | None = None
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.kept is None else self.uses(x, self.kept)
        self.kept = x.square()
        self.average.lerp_(x.mean(0), 0.5)
        return self.drop(y + self.average)


class KeepsATable(nn.Module):
    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[1]).cos()
        return x * self.table


def carried(module: nn.Module) -> str | None:
    graph = fx.Graph()
    graph.output(graph.call_module("inside", (graph.call_function(torch.sin, (graph.placeholder("x"),)),)))
    stage = fx.GraphModule(nn.ModuleDict({"inside": module}), graph)
    before, buffers = dict(vars(module)), [buffer.clone() for buffer in module.buffers()]
    found = carrying_call(stage, [torch.randn(4, 3)])
    assert vars(module) == before
    assert all(map(torch.equal, module.buffers(), buffers))
    return found


def test_a_module_that_uses_what_it_has_kept_of_the_call_before_is_named() -> None:
    """The next microbatch would get what this one has left, and on one device it is the next batch that does."""
    assert carried(Remembers(torch.add)) == "inside"
    assert carried(Remembers(lambda x, kept: torch.cat([x, kept]))) == "inside"
    assert carried(Remembers(lambda x, kept: x @ kept)) == "inside"  # which fails


@pytest.mark.parametrize("module", [Remembers(lambda x, kept: x), KeepsATable(), nn.Linear(3, 3)])
def test_what_is_kept_and_not_used_or_always_the_same_is_left_alone(module: nn.Module) -> None:
    """Nor do buffers count, of which the user is told, and dropout."""
    assert carried(module) is None


def counted(function: Callable[[Tensor], Tensor], *, num_rows: int = 4, num_added: int = 1) -> str | None:
    torch.manual_seed(2)
    module = fx.symbolic_trace(Stage(function))
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    fixed = ["mean", "full", "rand"]
    found = counting_call(
        module, [torch.randn(num_rows, 3)], [0], lambda name: None if name in fixed else 0, fixed, num_rows, num_added
    )
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in module.named_buffers())
    return found.call


@pytest.mark.parametrize(
    ("call", "function"),
    [
        ("truediv", lambda x: x / x.shape[0]),
        ("full", lambda x: x * _full(x)),
        ("numbers", lambda x: x + _numbers(x)),
        ("halves", lambda x: _halves(x)),
        ("weighted", lambda x: _weighted(x)),
        ("mean", lambda x: x - x.mean(0)),
        ("roll", lambda x: x.roll(1, 0)),
        ("first_set", lambda x: _first_set(x)),
    ],
)
def test_calls_that_go_by_number_or_place_are_named(call: str, function: Callable[[Tensor], Tensor]) -> None:
    assert call in str(counted(function))


@fx.wrap
def _numbers(x: Tensor) -> Tensor:
    return torch.arange(len(x))[:, None]


@fx.wrap
def _weighted(x: Tensor) -> Tensor:
    return x * torch.linspace(0, 1, len(x))[:, None]


@fx.wrap
def _own(x: Tensor) -> Tensor:
    return x[torch.arange(len(x))]


@fx.wrap
def _full(x: Tensor) -> Tensor:
    return torch.full((), len(x))


@fx.wrap
def _halves(x: Tensor) -> Tensor:
    return torch.cat([x[: len(x) // 2] * 2, x[len(x) // 2 :]])


@fx.wrap
def _first_set(x: Tensor) -> Tensor:
    x[0] = 0
    return x


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sort(1).values,
        lambda x: x / x.shape[1],
        lambda x: _own(x),
        lambda x: x.relu_().exp_(),
        lambda x: nn.functional.dropout(x).sin(),
        lambda x: nn.functional.dropout(x[:, None]).squeeze(1).sin(),
        lambda x: x + torch.rand(3),
        lambda x: x.unbind(1)[0][:, None] + x,
    ],
)
def test_calls_that_do_not_go_by_number_or_place_are_not(function: Callable[[Tensor], Tensor]) -> None:
    """Nor is what random numbers make of it."""
    assert counted(function) is None
    assert counted(function, num_rows=6, num_added=2) is None


def test_a_single_sample_shows_what_goes_by_the_number() -> None:
    assert "truediv" in str(counted(lambda x: x / x.shape[0], num_rows=1))
    assert counted(torch.sin, num_rows=1) is None


def test_a_number_that_a_module_sets_by_the_number_of_samples_is_named() -> None:
    """What it is after several microbatches is not what it is after the batch."""

    class Sets(nn.Module):
        calls, capacity, width = 0, 0, 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls, self.capacity, self.width = self.calls + 1, 2 * len(x), x.shape[1]
            return x.sin()

    graph = fx.Graph()
    graph.output(graph.call_module("inside", (graph.placeholder("x"),)))
    stage = fx.GraphModule(nn.ModuleDict({"inside": Sets()}), graph)
    found = counting_call(stage, [torch.randn(4, 3)], [0], lambda name: 0, [], 4, 1)
    assert found.call is None
    assert found.numbers == ("inside.capacity",)
    assert "capacity" not in vars(stage.inside)


@pytest.mark.parametrize(("function", "mixes"), [(lambda x: x.reshape(-1), False), (lambda x: x.T.reshape(-1), True)])
def test_entries_of_a_sample_stand_together_or_it_is_said(function: Callable[[Tensor], Tensor], mixes: bool) -> None:
    """A flattened batch of tokens is joined from those of microbatches."""

    class Flattens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return function(self.first(x))

    torch.manual_seed(2)
    module, inputs = fx.symbolic_trace(Flattens()), [torch.randn(4, 3)]
    assert (mixing_call(module, inputs, [0], lambda name: 0, 4) is not None) == mixes
    assert (counting_call(module, inputs, [0], lambda name: 0, [], 4, 1).call is not None) == mixes


@pytest.mark.parametrize(
    ("call", "function"),
    [
        ("flip", lambda x: x.flip(0)),
        ("getattr", lambda x: x.sort(0).values),
        ("softmax", lambda x: x.softmax(0)),
        (None, lambda x: x.flip(1)),
        (None, lambda x: nn.functional.dropout(x).sin()),
    ],
)
def test_a_single_sample_gets_another_one_to_notice(call: str | None, function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(2)
    found = mixing_call_of_one(fx.symbolic_trace(Stage(function)), [torch.randn(1, 3)], [0], lambda name: 0)
    assert (found is None) if call is None else (call in str(found))


def test_code_that_holds_for_a_single_sample_only_is_not_tried() -> None:
    module = fx.symbolic_trace(Stage(lambda x: x.view(1, 3)))
    assert mixing_call_of_one(module, [torch.randn(1, 3)], [0], lambda name: 0) is None


class HasTable(nn.Module):
    """Results are views of its parameter, its buffer and a tensor that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.plain = nn.Parameter(torch.randn(8, 3)), Plain()
        self.register_buffer("table", torch.randn(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[:1].expand(1, 3) + self.weight[:1] + self.plain(x) + self.weight[: x.shape[0]]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.randn(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.kept[: len(x)]


def test_trying_leaves_the_module_s_own_memory_as_it_is() -> None:
    """Neither its values nor, for what an earlier call saved for its backward pass, its versions change."""

    class Leaf(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    torch.manual_seed(2)
    model = HasTable()
    module = fx.GraphModule(model, Leaf().trace(model))
    own = (model.weight, model.table, model.plain.kept)
    before = [(tensor.detach().clone(), version_of(tensor)) for tensor in own]
    x = torch.randn(4, 3)
    assert mixing_call(module, [x], [0], lambda name: 0, 4) is None
    rows_of = {"plain": 0, "getitem_2": 0, "add_3": 0}.get
    assert "plain" in str(counting_call(module, [x], [0], rows_of, ["getitem", "getitem_1"], 4, 1).call)
    assert "getitem" in str(counting_call(module, [x], [0], {"getitem_2": 0}.get, ["getitem", "getitem_1"], 4, 1).call)
    for tensor, (values, version) in zip(own, before, strict=True):
        assert torch.equal(tensor, values)
        assert version_of(tensor) == version


class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x


def test_trying_leaves_the_attributes_as_they_are() -> None:
    graph, counts = fx.Graph(), CountsCalls()
    graph.output(graph.call_module("counts", (graph.placeholder("x"),)))
    module = fx.GraphModule({"counts": counts}, graph)
    assert mixing_call(module, [torch.randn(4, 3)], [0], lambda name: 0, 4) is None
    assert module.counts.num_calls == 0
