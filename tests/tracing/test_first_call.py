"""What modules set on their first call once and for all, and what user code remembers outside of modules."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe._compat.torch import FakeTensor
from lightning_fxpipe.errors import TraceError
from lightning_fxpipe.tracing.region import StepCall, find_region
from lightning_fxpipe.tracing.trace import TracedRegion, trace_region
from tests.staging import WIDTH, batch, call_of
from tests.traces import covers

TABLES: dict[int, Tensor] = {}


def table(size: int) -> Tensor:
    made = torch.zeros(size)
    made[0::2] = torch.sin(torch.arange(0, size, 2) / 3.0)
    return made + 1


class Caching(nn.Module):
    """Two layers with something between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table: Tensor | None = None
        self.tables: dict[int, Tensor] = {}
        self.made: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.between(self.first(x)))
        return result

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class InAttribute(Caching):
    def between(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] != x.shape[1]:
            self.table = table(x.shape[1]).to(x)
        return x * self.table


class OfTheKind(Caching):
    def between(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = x.new_ones(x.shape[1]).cumsum(0).type_as(x)
        return x * self.table


class InDict(Caching):
    def between(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = table(x.shape[1])
            self.made.append(x.shape[1])
        return x * self.tables[x.shape[1]]


class AsBuffer(Caching):
    def between(self, x: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.register_buffer("late", table(x.shape[1]), persistent=False)
        return x * self.late


class Flagged(Caching):
    started = False

    def between(self, x: Tensor) -> Tensor:
        if not self.started:
            self.started, self.scale = True, 2.0
        return x * self.scale


class HooksOnce(Caching):
    hooked = False

    def between(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.hooked = True
            self.last.register_forward_hook(double)
        return x


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


class InFunction(Caching):
    @staticmethod
    @cache
    def remembered(size: int) -> Tensor:
        return table(size)

    def between(self, x: Tensor) -> Tensor:
        return x * self.remembered(x.shape[1])


class InGlobal(Caching):
    def between(self, x: Tensor) -> Tensor:
        if x.shape[1] not in TABLES:
            TABLES[x.shape[1]] = table(x.shape[1])
        return x * TABLES[x.shape[1]]


class OnTheClass(Caching):
    shared: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        if OnTheClass.shared is None:
            OnTheClass.shared = table(x.shape[1])
        return x * OnTheClass.shared


CONSTANT = (InAttribute, OfTheKind, InDict, AsBuffer, Flagged, HooksOnce)
OUTSIDE = (InFunction, InGlobal, OnTheClass)


class Around(nn.Module):
    """So that the module that caches is not the one whose call is traced."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


def trace_opened(model: nn.Module) -> TracedRegion:
    return trace_region(model, call_of(batch()), opened={"inner"})


def held(model: nn.Module) -> dict[str, Any]:
    """What a module has besides its parameters and submodules."""
    own = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    return own | dict(model.named_buffers()) | {"hooks": [len(child._forward_hooks) for child in model.modules()]}


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, Tensor):
        assert not isinstance(found, FakeTensor)
        torch.testing.assert_close(found, expected)
    else:
        assert found == expected


@pytest.mark.parametrize("kind", [*CONSTANT, *OUTSIDE])
def test_module_is_opened_and_has_afterwards_what_its_first_call_would_have_set(kind: type[Caching]) -> None:
    model, plain = Around(kind()), Around(kind())
    traced = trace_opened(model)
    assert traced.opened == ("inner",)
    assert not traced.kept_whole
    result = plain(batch())
    if kind in CONSTANT:
        assert_equal(held(model.inner), held(plain.inner))
    torch.testing.assert_close(model(batch()), result)
    assert not any(isinstance(value, FakeTensor) for value in [*TABLES.values(), OnTheClass.shared])


@pytest.mark.parametrize("kind", CONSTANT)
def test_second_trace_finds_the_module_as_the_first_left_it(kind: type[Caching]) -> None:
    model = Around(kind())
    trace_opened(model)
    before = held(model.inner)
    traced = trace_opened(model)
    assert traced.opened == ("inner",)
    assert_equal(held(model.inner), before)


class CountsInHook(Caching):
    """What its layer's hook changes, the layer changes in every run: it has the hook in its stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(self.count)

    def count(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.made.append(1)
        self.tables[len(self.tables)] = output.detach()

    def between(self, x: Tensor) -> Tensor:
        return x


def test_module_is_opened_whose_layer_has_a_hook_that_changes_it() -> None:
    model = Around(CountsInHook())
    traced = trace_opened(model)
    assert traced.opened == ("inner",)
    assert not traced.kept_whole
    assert not model.inner.made


class Counting(Caching):
    count = 0

    def between(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


class GrowingDict(Caching):
    def between(self, x: Tensor) -> Tensor:
        self.tables[len(self.tables)] = table(x.shape[1])
        return x * self.tables[0]


class GrowingAttributes(Caching):
    def between(self, x: Tensor) -> Tensor:
        setattr(self, f"table_{len(vars(self))}", table(x.shape[1]))
        return x


class FromData(Caching):
    """The first batch decides."""

    def between(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = x.detach().std(dim=0)
        return x / self.table


class FromWeights(Caching):
    def between(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = self.first.weight.detach().sum(0)
        return x * self.table


class OfTheBatch(Caching):
    """Another table for another number of samples."""

    def between(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[0])
        return x * self.table[:, None]


class AtRandom(Caching):
    def between(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.rand(x.shape[1])
        return x * self.table


class FlagAndData(Caching):
    """Keeping the flag alone would leave the table unmade."""

    started = False

    def between(self, x: Tensor) -> Tensor:
        if not self.started:
            self.started, self.table = True, x.detach().mean(0)
        assert self.table is not None
        return x + self.table


@pytest.mark.parametrize(
    "kind", [Counting, GrowingDict, GrowingAttributes, FromData, FromWeights, OfTheBatch, AtRandom, FlagAndData]
)
def test_module_whose_state_is_no_constant_stays_whole_and_as_it_was(kind: type[Caching]) -> None:
    model = Around(kind())
    before = copy.copy(held(model.inner))
    traced = trace_opened(model)
    assert "its forward changes self." in traced.kept_whole["inner"]
    assert_equal(held(model.inner), before)


def test_called_module_itself_that_counts_is_refused() -> None:
    with pytest.raises(TraceError, match="changes self.count"):
        trace_region(Counting(), call_of(batch()))


class MarksLayer(Caching):
    """Sets an attribute of a module inside it, whose own code would set none."""

    def between(self, x: Tensor) -> Tensor:
        self.first.is_used = True  # type: ignore[assignment]
        return x


class CountsOnLayer(Caching):
    def __init__(self) -> None:
        super().__init__()
        self.first.count = 0  # type: ignore[assignment]

    def between(self, x: Tensor) -> Tensor:
        self.first.count += 1  # type: ignore[assignment, operator]
        return x


def test_what_a_forward_sets_on_a_module_inside_it_is_set() -> None:
    model = MarksLayer()
    trace_region(model, call_of(batch()))
    assert model.first.is_used is True


def test_a_forward_that_counts_on_a_module_inside_it_is_refused() -> None:
    """The graph would not count, and nothing would say so."""
    with pytest.raises(TraceError, match=r"changes self\.first\.count"):
        trace_region(CountsOnLayer(), call_of(batch()))


class Step(nn.Module):
    """A step that calls such a model, after it has set something of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.num_steps = model, 0

    def training_step(self, batch: Tensor) -> Tensor:
        self.num_steps += 1
        return self.model(batch).sum()


@pytest.mark.parametrize("kind", [InAttribute, InDict, MarksLayer])
def test_what_is_set_on_the_first_call_stays_when_the_step_before_it_is_undone(kind: type[Caching]) -> None:
    """A region is recorded in a dry run of the step up to its call."""
    step = Step(kind())
    region = find_region(step, StepCall(function=step.training_step, args=(batch(),), kwargs={}), batch_size=len(batch()))
    traced = trace_region(step, region)
    assert step.num_steps == 0
    assert traced.is_current()
    assert covers(traced, region)


class Leaves(nn.Module):
    """Leaves tensors in attributes that it does not read."""

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.reads = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), reads
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.reads and self.kept is not None:
            hidden = hidden + self.kept["hidden"].detach()
        self.kept = {"hidden": hidden, "else": 3}
        return self.last(hidden)


def test_tensors_that_the_called_module_leaves_are_results() -> None:
    module, x = Leaves(), batch()
    traced = trace_region(module, call_of(x))
    assert module.kept is None
    hidden, last = torch.zeros(1), torch.ones(1)
    assert traced.result([last, hidden]) is last
    assert module.kept == {"hidden": hidden, "else": 3}
    assert module.kept["hidden"] is hidden


def test_those_that_its_next_call_reads_are_none() -> None:
    with pytest.raises(TraceError, match=r"its forward changes self\.kept"):
        trace_region(Leaves(reads=True), call_of(batch()))


class KeepsItsMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(4, 4), torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        self.mean = result.detach().mean(0)
        return result


def test_what_a_block_sets_on_itself_is_no_attribute_of_the_module_around_it() -> None:
    """Results of a call are attributes that its forward leaves on its own module, not on those inside."""
    model = Around(KeepsItsMean())
    assert trace_region(model, call_of(torch.randn(4, 4))).left == ()
    assert trace_region(model.inner, call_of(torch.randn(4, 4))).left == ("mean",)
