"""What a trace leaves behind in the module, the generators and the process: nothing."""

from __future__ import annotations

import builtins
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fxpipe._compat.torch import FakeTensor
from lightning_fxpipe.errors import TraceError
from tests.models import make_model, make_samples
from tests.traces import WIDTH, TwoLayers, batch, calls, trace

# ------------------------------------------------------------------------------------------- what is left as it was


class Watched(NamedTuple):
    """Whatever of a module a trace could change; compared by identity."""

    attributes: dict[tuple[str, str], Any]
    contents: dict[tuple[str, str], list[Any]]

    @classmethod
    def of(cls, model: nn.Module) -> Watched:
        attributes, contents = {}, {}
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                attributes[path, name] = value
                if isinstance(value, dict):
                    contents[path, name] = [item for pair in value.items() for item in pair]
                elif isinstance(value, (list, set)):
                    contents[path, name] = list(value)
        return cls(attributes, contents)

    def assert_same(self, model: nn.Module) -> None:
        now = Watched.of(model)
        assert now.attributes.keys() == self.attributes.keys()
        for key, value in self.attributes.items():
            assert now.attributes[key] is value, key
        for key, items in self.contents.items():
            found = now.contents[key]
            assert len(found) == len(items), key
            assert all(a is b for a, b in zip(found, items, strict=True)), key


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Asserts that the block leaves the module, the generators and what a trace patches as they were."""
    watched = Watched.of(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    globals_before = (
        builtins.len, vars(nn.Module)["__call__"], vars(torch.autograd.Function)["apply"], torch.is_grad_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    )  # fmt: skip
    generators = random.getstate(), torch.get_rng_state()
    yield
    watched.assert_same(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert modes == [module.training for module in model.modules()]
    assert globals_before == (
        builtins.len, vars(nn.Module)["__call__"], vars(torch.autograd.Function)["apply"], torch.is_grad_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
    )  # fmt: skip
    assert random.getstate() == generators[0]
    assert torch.equal(torch.get_rng_state(), generators[1])


class Restless(TwoLayers):
    """Whole modules may do all this to themselves on every call; a trace must leave none of it behind."""

    def __init__(self, disturb: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.disturb = disturb

    def build(self) -> None:
        self.bn = nn.BatchNorm1d(WIDTH)
        self.count, self.last_input = 0, None
        self.seen: list[Any] = []
        self.cache: dict[int, Tensor] = {}
        self.plain = torch.zeros(1)
        self.register_buffer("mask", None)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def between(self, h: Tensor) -> Tensor:
        self.disturb(self, h)
        return self.bn(h) + torch.randn(1)


class AroundRestless(nn.Module):
    """Keeps a :class:`Restless` below the called module, where it may stay whole."""

    def __init__(self, disturb: Callable[[Any, Tensor], Any], dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.restless = Restless(disturb)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.restless(F.dropout(self.embed(x), self.dropout))


DISTURBANCES: dict[str, Callable[[Any, Tensor], Any]] = {
    "nothing": lambda self, h: None,
    "draws from the generators": lambda self, h: (random.random(), torch.rand(3)),
    "counts": lambda self, h: setattr(self, "count", self.count + 1),
    "keeps a tensor": lambda self, h: setattr(self, "last_input", h),
    "adds an attribute": lambda self, h: setattr(self, "new", h),
    "appends to a list": lambda self, h: self.seen.append(h),
    "fills a dict": lambda self, h: self.cache.setdefault(len(self.cache), torch.ones(WIDTH)),
    "replaces a buffer": lambda self, h: setattr(self, "mean", self.mean * 0.9 + h.mean(0)),
    "changes a buffer in place": lambda self, h: self.mean.add_(h.detach().mean(0)),
    "makes a buffer on first use": lambda self, h: setattr(self, "mask", torch.ones(WIDTH)) if self.mask is None else None,
    "registers a buffer": lambda self, h: self.register_buffer("late", torch.ones(WIDTH)),
    "changes a plain tensor in place": lambda self, h: self.plain.add_(1),
}


@pytest.mark.parametrize("opened", [(), None], ids=["whole", "opened"])
@pytest.mark.parametrize("name", DISTURBANCES)
def test_module_below_the_called_one_is_left_as_it_was(name: str, opened: Any) -> None:
    model = AroundRestless(DISTURBANCES[name])
    before = model.restless.plain.clone()
    with unchanged(model):
        trace(model, batch(), opened=opened)
    assert torch.equal(model.restless.plain, before)
    # The module still computes on real tensors.
    assert not isinstance(model(batch()), FakeTensor)


@pytest.mark.parametrize("name", DISTURBANCES)
def test_called_module_is_left_as_it_was_even_where_it_is_refused(name: str) -> None:
    model = Restless(DISTURBANCES[name])
    before = model.plain.clone()
    with unchanged(model):
        try:
            trace(model, batch())
        except TraceError:
            assert name not in ("nothing", "changes a buffer in place")
    assert torch.equal(model.plain, before)
    assert not isinstance(model(batch()), FakeTensor)


@pytest.mark.parametrize("opened", [(), None], ids=["whole", "opened"])
def test_module_is_left_as_it_was_when_its_forward_raises(opened: Any) -> None:
    def fail(self: Any, h: Tensor) -> None:
        self.count = 5
        self.mean.add_(1)
        raise ValueError("no good")

    model = AroundRestless(fail)
    with unchanged(model), pytest.raises(TraceError, match="no good"):
        trace(model, batch(), opened=opened)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_module_computes_on_its_real_weights_after_a_trace(kind: type[nn.RNNBase]) -> None:
    # These keep a second list of their weights, and exchange it in their forward where a weight is another object.
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0]

    model, x = Net(), torch.randn(3, 5, WIDTH)
    expected = model(x)
    trace(model, x)
    assert all(a is b for a, b in zip(model.rnn._flat_weights, model.rnn.parameters(), strict=True))
    assert torch.equal(model(x), expected)


def test_gradients_and_optimizer_identity_survive_a_trace() -> None:
    model = make_model("gpt")
    ids = make_samples("gpt", 3)[0]
    model(ids).sum().backward()
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    trace(model, ids)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(a.grad is b for a, b in zip(model.parameters(), gradients, strict=True))
    assert model.head.weight is model.tok.weight


def test_inputs_are_left_as_they_were() -> None:
    class InPlace(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x.mul_(2)))

    x = batch()
    trace(InPlace(), x)
    assert torch.equal(x, batch())


def test_parameters_on_the_meta_device_are_enough() -> None:
    with torch.device("meta"):
        model = make_model("mlp")
    traced = trace(model, make_samples("mlp", 3)[0])
    on_cpu = trace(make_model("mlp"), make_samples("mlp", 3)[0])
    assert calls(traced) == calls(on_cpu)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert {node.meta["val"].device.type for node in traced.graph.nodes if "val" in node.meta} == {"cpu"}
