"""Traces: which nodes are recorded and where each came from, what a trace covers, what it leaves as it was, what it refuses."""

from __future__ import annotations

import builtins
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lightning_fxpipe._compat import FakeTensor, tree_leaves
from lightning_fxpipe.cost import build_chain
from lightning_fxpipe.errors import TraceError, UnsupportedError
from lightning_fxpipe.graphwriter import CONSTANT_PREFIX
from lightning_fxpipe.recordable import RegionCall
from lightning_fxpipe.sizes import SymbolicSize
from lightning_fxpipe.trace import TracedRegion, trace_region
from tests.models import BasicBlock, ResNet18, SkipMLP, TiedGPT, make_model, make_samples

BATCH = 4
WIDTH = 6


def call_of(*args: Any, batch_size: int | None = None, path: str = "", **kwargs: Any) -> RegionCall:
    size = next(leaf.shape[0] for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return RegionCall(path=path, args=args, kwargs=kwargs, batch_size=batch_size or size)


def trace(model: nn.Module, *args: Any, opened: Any = None, **kwargs: Any) -> TracedRegion:
    return trace_region(model, call_of(*args, **kwargs), opened=opened)


def batch(size: int = BATCH, width: int = WIDTH) -> Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(size))


def target_name(node: fx.Node) -> str:
    """``layer1.0.conv1``, ``add_``, ``flatten``, ``getitem``."""
    return str(node.target) if isinstance(node.target, str) else node.target.__name__


def calls(traced: TracedRegion) -> list[tuple[str, str, str]]:
    """Op, target and module path of every call."""
    return [
        (node.op, target_name(node), node.meta["module_path"])
        for node in traced.graph.nodes
        if node.op in ("call_module", "call_function", "call_method")
    ]


def names(traced: TracedRegion) -> list[str]:
    return [target for _, target, _ in calls(traced)]


def line_of(function: Callable[..., Any], text: str) -> str:
    """``file:line`` of the line of ``function`` that contains ``text``."""
    lines, first = inspect.getsourcelines(function)
    return f"{inspect.getsourcefile(function)}:{first + next(i for i, line in enumerate(lines) if text in line)}"


class TwoLayers(nn.Module):
    """``first``, whatever a subclass does in between, ``last``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.build()

    def build(self) -> None:
        """Adds what the subclass needs."""

    def between(self, h: Tensor) -> Tensor:
        return torch.relu(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


# --------------------------------------------------------------------------------------------- where nodes came from


class ModulePathTracer(fx.Tracer):
    """PyTorch's example ``examples/fx/module_tracer.py``."""

    def __init__(self) -> None:
        super().__init__()
        self.current_module_path = ""
        self.node_to_originating_module: dict[fx.Node, str] = {}

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        before = self.current_module_path
        try:
            self.current_module_path = self.path_of_module(m)
            return super().call_module(m, forward, args, kwargs)
        finally:
            self.current_module_path = before

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        proxy = super().create_proxy(*args, **kwargs)
        self.node_to_originating_module[proxy.node] = self.current_module_path
        return proxy


@pytest.fixture(scope="module")
def resnet() -> TracedRegion:
    torch.manual_seed(0)
    return trace(ResNet18(), torch.randn(2, 3, 64, 64))


def test_stem_first_block_and_tail_of_resnet_come_from_the_modules_of_the_pytorch_example(resnet: TracedRegion) -> None:
    stem_and_first_block = [
        ("call_module", "conv1", "conv1"),
        ("call_module", "bn1", "bn1"),
        ("call_module", "relu", "relu"),
        ("call_module", "maxpool", "maxpool"),
        ("call_module", "layer1.0.conv1", "layer1.0.conv1"),
        ("call_module", "layer1.0.bn1", "layer1.0.bn1"),
        ("call_module", "layer1.0.relu", "layer1.0.relu"),
        ("call_module", "layer1.0.conv2", "layer1.0.conv2"),
        ("call_module", "layer1.0.bn2", "layer1.0.bn2"),
        # `out += identity`: torch.fx's proxies have no in-place add and make it an `add`, here it is what Python ran.
        ("call_method", "add_", "layer1.0"),
        ("call_module", "layer1.0.relu", "layer1.0.relu"),
    ]
    tail = [
        ("call_module", "layer4.1.bn2", "layer4.1.bn2"),
        ("call_method", "add_", "layer4.1"),
        ("call_module", "layer4.1.relu", "layer4.1.relu"),
        ("call_module", "avgpool", "avgpool"),
        ("call_function", "flatten", ""),
        ("call_module", "fc", "fc"),
    ]
    found = calls(resnet)
    assert found[: len(stem_and_first_block)] == stem_and_first_block
    assert found[-len(tail) :] == tail


def test_every_node_of_resnet_comes_from_where_the_pytorch_example_says(resnet: TracedRegion) -> None:
    tracer = ModulePathTracer()
    expected = [
        (node.op, target_name(node), tracer.node_to_originating_module[node])
        for node in tracer.trace(ResNet18()).nodes
        if node.op not in ("placeholder", "output")
    ]
    in_place_adds_as_fx_sees_them = [
        ("call_function", "add", path) if (op, target) == ("call_method", "add_") else (op, target, path)
        for op, target, path in calls(resnet)
    ]
    assert in_place_adds_as_fx_sees_them == expected


def test_every_node_has_a_module_path_and_every_call_a_source(resnet: TracedRegion) -> None:
    # The output alone has none, as in PyTorch's example.
    assert [node.op for node in resnet.graph.nodes if "module_path" not in node.meta] == ["output"]
    assert [node.meta["module_path"] for node in resnet.input_nodes] == [""]
    adds = [node for node in resnet.graph.nodes if node.target == "add_"]
    assert {node.meta["source"] for node in adds} == {line_of(BasicBlock.forward, "out += identity")}


def test_shared_module_goes_by_its_first_name() -> None:
    class Shared(TwoLayers):
        def build(self) -> None:
            self.again = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.again(self.first(x)))

    assert names(trace(Shared(), batch())) == ["first", "first", "last"]


def test_parameter_used_directly_is_a_get_attr_for_each_use_under_its_own_name() -> None:
    model = TiedGPT(depth=1)
    ids = make_samples("gpt", 3)[0]

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.scale = nn.Parameter(torch.ones(40))

        def forward(self, ids: Tensor) -> Tensor:
            return self.inner(ids) * self.scale + self.scale

    graph = trace(Twice(), ids).graph
    attributes = [(node.target, node.meta["module_path"]) for node in graph.nodes if node.op == "get_attr"]
    assert attributes == [("inner.pos", "inner"), ("scale", ""), ("scale", "")]
    assert all(len(node.users) == 1 for node in graph.nodes if node.op == "get_attr")


def test_call_of_a_submodule_is_traced_with_paths_of_the_root() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = TwoLayers()

    traced = trace(Outer(), batch(), path="model")
    assert calls(traced) == [
        ("call_module", "model.first", "model.first"),
        ("call_function", "relu", "model"),
        ("call_module", "model.last", "model.last"),
    ]


# ------------------------------------------------------------------------------------------------------ what is opened


def test_only_the_called_module_is_opened_unless_more_is_asked_for() -> None:
    model = make_model("resnet")
    x = make_samples("resnet", 2)[0]
    default = trace(model, x, opened=())
    assert names(default) == [
        "conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "flatten", "fc",
    ]  # fmt: skip
    assert default.opened == ()
    one_block = trace(model, x, opened=("layer1", "layer1.1"))
    assert names(one_block)[4:13] == [
        "layer1.0", "layer1.1.conv1", "layer1.1.bn1", "layer1.1.relu", "layer1.1.conv2", "layer1.1.bn2", "add_",
        "layer1.1.relu", "layer2",
    ]  # fmt: skip
    assert one_block.opened == ("layer1", "layer1.1")


def test_block_inside_a_module_that_stays_whole_is_not_opened() -> None:
    traced = trace(make_model("resnet"), make_samples("resnet", 2)[0], opened=("layer1.1",))
    assert "layer1" in names(traced)
    assert traced.opened == ()


def test_opening_everything_stops_at_the_modules_of_torch() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.ReLU(), SkipMLP(depth=1)))
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            h = self.body[0](x)
            return self.attention(h[:, None], h[:, None], h[:, None])[0]

    assert names(trace(Net(), batch())) == ["body.0", "__getitem__", "__getitem__", "__getitem__", "attention", "getitem"]


def test_module_with_hooks_stays_whole() -> None:
    model = make_model("resnet")
    model.layer1.register_forward_hook(lambda module, args, output: output * 2)
    traced = trace(model, make_samples("resnet", 2)[0], opened=("layer1", "layer2"))
    assert {"layer1", "layer2.0"} <= set(names(traced))
    assert dict(traced.kept_whole) == {"layer1": "hooks run around its forward"}
    assert traced.opened == ("layer2",)


# ----------------------------------------------------------------------------------------------------- sizes and reuse


def test_one_trace_covers_every_batch_size_but_no_other_sequence_length() -> None:
    model = make_model("gpt")
    ids = make_samples("gpt", 12)[0]
    traced = trace(model, ids[:4])
    for size in (2, 3, 5, 12):
        assert traced.covers(call_of(ids[:size])), size
        sizes = traced.bind_sizes(((size, 10),))
        assert sizes is not None
        assert list(sizes.values()) == [size]
    assert traced.bind_sizes(((4, 9),)) is None
    assert not traced.covers(call_of(ids[:4, :9]))


def test_batch_of_one_is_traced_apart() -> None:
    # torch decides broadcasting and contiguity differently for sizes 0 and 1.
    traced = trace(TwoLayers(), batch(4))
    assert not traced.covers(call_of(batch(1)))
    of_one = trace(TwoLayers(), batch(1))
    assert of_one.covers(call_of(batch(1)))
    assert not of_one.covers(call_of(batch(4)))


def test_two_inputs_must_agree_on_the_batch_size() -> None:
    class Two(TwoLayers):
        def forward(self, x: Tensor, *, y: Tensor) -> Tensor:
            return self.last(self.first(x) + y.sum())

    traced = trace(Two(), batch(4), y=batch(4))
    assert traced.bind_sizes(((5, WIDTH), (5, WIDTH))) is not None
    assert traced.bind_sizes(((5, WIDTH), (6, WIDTH))) is None


def test_sizes_other_than_the_first_dimension_stay_fixed_even_where_they_equal_the_batch_size() -> None:
    traced = trace(TwoLayers(), batch(WIDTH))  # six samples of width six
    assert traced.bind_sizes(((3, WIDTH),)) is not None
    assert traced.bind_sizes(((3, 3),)) is None


class Sized(TwoLayers):
    """Does something with the batch size between its layers."""

    def __init__(self, use: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.use = use

    def between(self, h: Tensor) -> Tensor:
        return self.use(h, h.shape[0])


@pytest.mark.parametrize(
    "use",
    [
        lambda h, b: h.reshape(b * 2, 3).reshape(b, WIDTH),
        lambda h, b: h + torch.arange(b)[:, None],
        lambda h, b: torch.cat((h[: b // 2], h[b // 2 :])),
        lambda h, b: h * len(h),
        lambda h, b: h * (1 / b),
        lambda h, b: h * b**0.5,
        lambda h, b: h.new_zeros(b, WIDTH) + h,
    ],
    ids=["reshape", "arange", "slices", "len", "inverse", "root", "new_zeros"],
)
def test_arithmetic_with_the_batch_size_keeps_it_symbolic(use: Callable[[Tensor, Any], Tensor]) -> None:
    traced = trace(Sized(use), batch(4))
    assert traced.covers(call_of(batch(4)))
    assert traced.covers(call_of(batch(6)))
    assert all(not isinstance(value, torch.SymInt) for node in traced.graph.nodes for value in tree_leaves(node.args))


@pytest.mark.parametrize(
    "use",
    [
        lambda h, b: h * int(b),
        lambda h, b: h * float(b),
        lambda h, b: h * torch.tensor(b),
        lambda h, b: torch.stack([h[i] for i in range(b)]),
        lambda h, b: h * 2 if b == 4 else h,
    ],
    ids=["int", "float", "tensor", "loop", "equal"],
)
def test_python_that_fixes_the_batch_size_is_covered_at_that_size_only(use: Callable[[Tensor, Any], Tensor]) -> None:
    traced = trace(Sized(use), batch(4))
    assert traced.covers(call_of(batch(4)))
    for size in (2, 3, 6):
        assert not traced.covers(call_of(batch(size))), size


def test_branch_on_the_batch_size_is_covered_where_it_goes_the_same_way() -> None:
    traced = trace(Sized(lambda h, b: h * 2 if b > 3 else h * 3), batch(4))
    assert traced.covers(call_of(batch(9)))
    assert not traced.covers(call_of(batch(3)))


def test_divisibility_that_the_forward_needs_is_checked() -> None:
    traced = trace(Sized(lambda h, b: h.view(2, -1, WIDTH).flatten(0, 1)), batch(4))
    assert traced.covers(call_of(batch(6)))
    assert not traced.covers(call_of(batch(5)))


def test_symbolic_sizes_are_kept_in_the_nodes() -> None:
    graph = trace(Sized(lambda h, b: h.view(b * 2, 3).view(b, WIDTH)), batch(4)).graph
    view = next(node for node in graph.nodes if node.target == "view")
    assert isinstance(view.args[1], SymbolicSize)
    assert view.args[2] == 3


@pytest.mark.parametrize(
    "changed",
    [
        lambda model, x: model.eval(),
        lambda model, x: model.first.eval(),
        lambda model, x: model.last.requires_grad_(False),
    ],
    ids=["eval", "one module in eval", "frozen"],
)
def test_mode_and_trainable_parameters_are_part_of_what_a_trace_covers(changed: Callable[[Any, Tensor], Any]) -> None:
    model = TwoLayers()
    traced = trace(model, batch())
    assert traced.covers(call_of(batch()))
    changed(model, batch())
    assert not traced.covers(call_of(batch()))


def test_dtype_structure_constants_and_grad_mode_are_part_of_what_a_trace_covers() -> None:
    class Scaled(TwoLayers):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.last(self.first(x.float()) * scale)

    traced = trace(Scaled(), batch(), 2.0)
    assert traced.covers(call_of(batch(), 2.0))
    assert not traced.covers(call_of(batch(), 3.0))
    assert not traced.covers(call_of(batch(), 2))  # an int may take another path
    assert not traced.covers(call_of(batch()))
    assert not traced.covers(call_of(batch().double(), 2.0))
    assert not traced.covers(call_of(batch(), scale=2.0))
    with torch.no_grad():
        assert not traced.covers(call_of(batch(), 2.0))


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
    "fills a dict": lambda self, h: self.cache.setdefault(WIDTH, torch.ones(WIDTH)),
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


# -------------------------------------------------------------------------------------------------- what is recorded


def test_custom_autograd_function_is_one_node_with_its_backward() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
            return torch.mul(x, factor)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient * -7, None  # a gradient that no recorded mul would give

    class Net(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            return Double.apply(h, 2.0)

    traced = trace(Net(), batch())
    assert names(traced) == ["first", "autograd_function", "last"]
    node = next(node for node in traced.graph.nodes if node.op == "call_function")
    assert node.args[1] == 2.0
    h = batch().requires_grad_()
    node.target(h, 2.0).sum().backward()
    assert torch.equal(h.grad, torch.full_like(h, -7))


def test_no_grad_block_is_kept_with_each_of_its_nodes() -> None:
    class Net(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            with torch.no_grad():
                weight = torch.sigmoid(self.last(h))
            return h * weight

    traced = trace(Net(), batch())
    contexts = {node.name: node.meta.get("context") for node in traced.graph.nodes}
    assert {name for name, context in contexts.items() if context} == {"last", "sigmoid"}
    assert not contexts["sigmoid"].grad_enabled
    # The second call of the same module, outside the block, is recorded as an ordinary one.
    assert contexts["last_1"] is None
    needs_gradient = {node.name: node.meta["val"].requires_grad for node in traced.graph.nodes if "val" in node.meta}
    assert needs_gradient == {
        "region_input_0": False, "first": True, "last": False, "sigmoid": False, "mul": True, "last_1": True,
    }  # fmt: skip


def test_autocast_switched_off_for_a_block_is_kept_with_each_of_its_nodes() -> None:
    class Net(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return h.float() @ self.last.weight

    with torch.autocast("cpu", dtype=torch.bfloat16):
        traced = trace(Net(), batch())
    nodes = {node.name: node for node in traced.graph.nodes}
    assert nodes["first"].meta.get("context") is None
    assert nodes["first"].meta["val"].dtype == torch.bfloat16
    assert not nodes["matmul"].meta["context"].autocast_enabled
    assert nodes["matmul"].meta["val"].dtype == torch.float32


def test_in_place_calls_are_recorded_in_order_with_what_they_change() -> None:
    class Net(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            h += 1
            h[:, 0] = 0
            F.relu(h, inplace=True)
            view = h[:, 1:]
            view.mul_(2)
            return h

    graph = trace(Net(), batch()).graph
    nodes = {node.name: node for node in graph.nodes}
    assert [node.name for node in graph.nodes if node.meta.get("mutated_storages")] == ["add_", "setitem", "relu", "mul_"]
    assert len(set().union(*(nodes[name].meta["mutated_storages"] for name in ("add_", "setitem", "relu", "mul_")))) == 1
    assert nodes["mul_"].args == (nodes["getitem"], 2)
    # What Python calls h after `h += 1` and relu is the result of those calls.
    assert nodes["getitem"].args[0] is nodes["relu"]


def test_type_and_shape_of_a_value_are_those_before_a_later_in_place_change() -> None:
    # A cut before the change would send what the tensor was then.
    class Net(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            total = torch.zeros_like(h)
            total += h
            return total.unsqueeze_(1).squeeze(1)

    values = {node.name: node.meta["val"] for node in trace(Net(), batch()).graph.nodes if "val" in node.meta}
    assert {name: value.requires_grad for name, value in values.items() if name in ("zeros_like", "add_")} == {
        "zeros_like": False,
        "add_": True,
    }
    assert [values[name].dim() for name in ("zeros_like", "add_", "unsqueeze_", "squeeze")] == [2, 2, 3, 2]


def test_calls_without_effect_or_use_are_dropped_but_random_ones_stay() -> None:
    class Net(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            torch.sin(h)
            torch.rand(2)  # moves the generator on
            F.dropout(h)
            return h

    assert names(trace(Net(), batch())) == ["first", "drawn_rand", "dropout", "last"]


def test_questions_about_a_tensor_leave_no_node() -> None:
    class Net(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            assert h.dim() == 2
            assert h.is_floating_point()
            assert h.shape[1] == h.size(1) == h.numel() // len(h) == WIDTH
            assert h.dtype == torch.float32
            assert h.device.type == "cpu"
            assert f"{h.shape[1]}" == str(WIDTH)
            return h

    assert names(trace(Net(), batch())) == ["first", "last"]


def test_tensor_attribute_that_is_no_buffer_goes_by_its_own_name() -> None:
    class Net(TwoLayers):
        def build(self) -> None:
            self.scale = torch.arange(float(WIDTH))

        def between(self, h: Tensor) -> Tensor:
            return h * self.scale + self.scale

    model = Net()
    traced = trace(model, batch())
    assert [node.target for node in traced.graph.nodes if node.op == "get_attr"] == ["scale"] * 2
    assert not traced.constants


def test_tensor_that_is_no_attribute_is_a_constant() -> None:
    scale = torch.arange(float(WIDTH))

    class Net(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            return h * scale + scale

    traced = trace(Net(), batch())
    assert list(traced.constants) == [f"{CONSTANT_PREFIX}0"]
    assert traced.constants[f"{CONSTANT_PREFIX}0"] is scale
    assert [node.target for node in traced.graph.nodes if node.op == "get_attr"] == [f"{CONSTANT_PREFIX}0"] * 2


def test_results_of_a_module_with_several_outputs_are_taken_apart() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            output, (hidden, cell) = self.rnn(x)
            return output + hidden[0][:, None] + cell[0][:, None]

    traced = trace(Net(), torch.randn(3, 5, WIDTH))
    (rnn,) = (node for node in traced.graph.nodes if node.op == "call_module")
    parts = [node for node in traced.graph.nodes if node.meta.get("part_of") is not None]
    pair = parts[1]
    assert [node.args for node in parts] == [(rnn, 0), (rnn, 1), (pair, 0), (pair, 1)]
    assert {node.meta["module_path"] for node in parts} == {"rnn"}
    shapes = [tuple(parts[i].meta["val"].shape) for i in (0, 2, 3)]
    assert [shape[-1] for shape in shapes] == [WIDTH] * 3
    assert shapes[1][0] == 1


def test_results_in_dicts_with_none_and_constants_are_taken_apart() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"h": self.linear(x), "mask": None, "depth": 3, "more": [x * 2, {"x": x}]}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> dict[str, Any]:
            out = self.inner(x)
            assert out["mask"] is None
            return {"logits": out["h"] * out["depth"], "parts": (out["more"][0], None, "name"), "loss": None}

    traced = trace(Net(), batch(), opened=())
    assert names(traced)[0] == "inner"
    assert [node.args[1] for node in traced.graph.nodes if target_name(node) == "getitem"][:3] == ["h", "more", 0]
    assert traced.result(["a", "b"]) == {"logits": "a", "parts": ("b", None, "name"), "loss": None}
    assert len(traced.output_node.args[0]) == 2


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@pytest.mark.parametrize("opened", [(), None], ids=["whole", "opened"])
def test_named_tuple_may_go_from_module_to_module(opened: Any) -> None:
    class Make(TwoLayers):
        def forward(self, x: Tensor) -> Pair:
            return Pair(self.first(x), self.last(x))

    class Take(TwoLayers):
        def forward(self, pair: Pair) -> Tensor:
            return self.first(pair.left) + self.last(pair.right)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make, self.take = Make(), Take()

        def forward(self, x: Tensor) -> Tensor:
            return self.take(self.make(x))

    traced = trace(Net(), batch(), opened=opened)
    assert [node.op for node in traced.graph.nodes if "module_path" not in node.meta] == ["output"]
    units = build_chain(traced).units
    assert {unit.path for unit in units} <= {"make", "take", "make.first", "make.last", "take.first", "take.last", ""}


# ----------------------------------------------------------------------------- what stays whole, what is refused


class Gate(TwoLayers):
    """Looks at values."""

    def between(self, h: Tensor) -> Tensor:
        if h.sum() > 0:
            return torch.relu(h)
        return h


class Around(nn.Module):
    """A module below the called one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embed, self.inner = nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.embed(x))


def test_submodule_that_looks_at_values_stays_whole_with_a_reason() -> None:
    traced = trace(Around(Gate()), batch(), opened=("inner",))
    assert names(traced) == ["embed", "inner"]
    assert traced.opened == ()
    assert list(traced.kept_whole) == ["inner"]
    assert "looks at values" in traced.kept_whole["inner"]


def test_submodule_that_looks_at_values_may_stay_unopened() -> None:
    assert names(trace(Around(Gate()), batch(), opened=())) == ["embed", "inner"]


def test_called_module_that_looks_at_values_is_refused_with_file_and_line() -> None:
    with pytest.raises(TraceError, match="forward of Gate cannot be recorded") as caught:
        trace(Gate(), batch())
    assert line_of(Gate.between, "if h.sum() > 0") in (caught.value.where or "")
    assert "looks at a value" in (caught.value.observed or "")


def test_error_in_the_called_module_is_shown_with_file_and_line() -> None:
    class Broken(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            return h @ torch.ones(WIDTH + 1, 2)  # no such shape

    with pytest.raises(TraceError) as caught:
        trace(Broken(), batch())
    assert line_of(Broken.between, "no such shape") in (caught.value.where or "")
    assert isinstance(caught.value.__cause__, RuntimeError)


ASSIGNMENTS = {
    "count": DISTURBANCES["counts"],
    "mean": DISTURBANCES["replaces a buffer"],
    "last_input": DISTURBANCES["keeps a tensor"],
    "new": DISTURBANCES["adds an attribute"],
    "mask": DISTURBANCES["makes a buffer on first use"],
    "late": DISTURBANCES["registers a buffer"],
    # Not an assignment to the module, but as lost once the Python no longer runs.
    "seen": DISTURBANCES["appends to a list"],
    "cache": DISTURBANCES["fills a dict"],
}


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_submodule_that_changes_itself_stays_whole_with_a_reason(name: str) -> None:
    traced = trace(AroundRestless(ASSIGNMENTS[name]), batch(), opened=("restless",))
    assert "restless" in names(traced)
    assert list(traced.kept_whole) == ["restless"]
    assert f"self.{name}" in traced.kept_whole["restless"]


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_called_module_that_changes_itself_is_refused(name: str) -> None:
    with pytest.raises(TraceError, match=f"self.{name}"):
        trace(Restless(ASSIGNMENTS[name]), batch())


def test_plain_tensor_changed_in_place_is_recorded_or_refused() -> None:
    try:
        traced = trace(Restless(DISTURBANCES["changes a plain tensor in place"]), batch())
    except TraceError:
        return
    assert "add_" in names(traced)


class LayerDrop(TwoLayers):
    """Python's generator chooses the path."""

    def between(self, h: Tensor) -> Tensor:
        return torch.relu(h) if random.random() < 0.5 else h


@pytest.mark.parametrize("seed", range(6))
def test_random_path_is_refused_whatever_comes_out_of_the_generator(seed: int) -> None:
    random.seed(seed)
    with pytest.raises(TraceError, match="LayerDrop"):
        trace(LayerDrop(), batch())


def test_random_path_inside_a_module_that_stays_whole_is_its_own_affair() -> None:
    random.seed(0)
    assert names(trace(Around(LayerDrop()), batch(), opened=())) == ["embed", "inner"]


def test_random_number_of_python_as_a_factor_is_refused() -> None:
    class Noisy(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            return h * random.random()

    with pytest.raises(TraceError, match="another path each time"):
        trace(Noisy(), batch())


def test_number_taken_out_of_a_tensor_is_refused() -> None:
    # It would be a constant of the trace, or have to cross a cut as a number.
    class Item(TwoLayers):
        def build(self) -> None:
            self.scale = nn.Parameter(torch.tensor(2.0))

        def between(self, h: Tensor) -> Tensor:
            return h * self.scale.item()  # here

    with pytest.raises(TraceError) as caught:
        trace(Item(), batch())
    assert line_of(Item.between, "# here") in (caught.value.where or "")


def test_hook_on_a_gradient_is_refused() -> None:
    # The graph has no place for it; left out, the gradients would be wrong without a word.
    class Hooked(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            h.register_hook(lambda gradient: gradient * 2)
            return h

    with pytest.raises(TraceError, match="hook"):
        trace(Hooked(), batch())
    assert names(trace(Around(Hooked()), batch(), opened=("inner",))) == ["embed", "inner"]


def test_size_as_a_result_is_refused() -> None:
    class Sizes(TwoLayers):
        def forward(self, x: Tensor) -> Any:
            return self.last(self.first(x)), x.shape[0]

    with pytest.raises(TraceError, match="a size of a tensor"):
        trace(Sizes(), batch())


class Opaque:
    """Nothing that torch knows how to look into."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_tensors_of_an_object_that_is_an_argument_are_inputs() -> None:
    class Net(TwoLayers):
        def forward(self, x: Tensor, extra: Opaque) -> Tensor:
            return self.last(self.first(x) + extra.tensor)

    traced = trace(Net(), batch(), Opaque(batch()))
    assert [tuple(node.meta["val"].shape[1:]) for node in traced.input_nodes] == [(WIDTH,), (WIDTH,)]
    assert traced.covers(call_of(batch(7), Opaque(batch(7))))
    assert not traced.covers(call_of(batch(7), (batch(7),)))


def test_object_goes_from_module_to_module_as_its_tensors() -> None:
    class Make(TwoLayers):
        def forward(self, x: Tensor) -> Opaque:
            return Opaque(self.first(x))

    class Take(TwoLayers):
        def forward(self, made: Opaque) -> Tensor:
            return self.first(made.tensor)

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make, self.take = Make(), Take()

        def forward(self, x: Tensor) -> Tensor:
            return self.take(self.make(x))

    traced = trace(Around(Inner()), batch(), opened=("inner",))
    assert names(traced) == ["embed", "inner.make", "tensor_inside", "refilled", "getitem", "inner.take"]
    assert not traced.kept_whole


def test_result_has_the_type_that_the_module_returns() -> None:
    class Net(TwoLayers):
        def forward(self, x: Tensor) -> Any:
            return Opaque(self.first(x))

    result = trace(Net(), batch()).result([torch.ones(2)])
    assert type(result) is Opaque
    assert torch.equal(result.tensor, torch.ones(2))


def test_results_that_nobody_wants_are_left_out_and_cannot_be_used() -> None:
    class Net(TwoLayers):
        def forward(self, x: Tensor) -> Any:
            hidden = self.first(x)
            return {"hidden": Opaque(hidden), "out": self.last(hidden)}

    traced = trace_region(Net(), call_of(batch()), wanted=[1])
    assert [str(node.target) for node in traced.output_node.args[0]] == ["last"]
    result = traced.result([torch.ones(2)])
    assert torch.equal(result["out"], torch.ones(2))
    assert result["hidden"].tensor.detach() is result["hidden"].tensor  # as Lightning does with whatever a step returns
    with pytest.raises(UnsupportedError, match="Tensor 0 in the result of the module is used"):
        _ = result["hidden"].tensor + 1
    with pytest.raises(UnsupportedError, match="is used"):
        _ = result["hidden"].tensor.shape


def test_tensor_put_into_an_argument_is_refused() -> None:
    class Net(TwoLayers):
        def forward(self, x: dict[str, Tensor]) -> Tensor:
            x["hidden"] = self.first(x["x"])
            return self.last(x["hidden"])

    with pytest.raises(TraceError, match="puts a tensor into one of its arguments"):
        trace_region(Net(), RegionCall(path="", args=({"x": batch()},), kwargs={}, batch_size=BATCH))


def test_models_own_exception_handler_does_not_hide_that_a_call_cannot_be_recorded() -> None:
    class Handled(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            try:
                h.data = h.detach() * 2
            except Exception:
                return h
            return h

    with pytest.raises(TraceError, match="assigning to Tensor.data"):
        trace(Handled(), batch())


class Checked(TwoLayers):
    """Asks about its input before it computes."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            return x
        return super().forward(x)


def test_question_about_an_input_is_answered_as_in_the_traced_call_and_checked() -> None:
    traced = trace(Checked(), batch())
    (check,) = [node for node in traced.graph.nodes if node.meta.get("checks")]
    check.target(torch.tensor(True))
    with pytest.raises(UnsupportedError, match="another path") as caught:
        check.target(torch.tensor(False))
    assert caught.value.where == line_of(Checked.forward, "isfinite")


def test_question_about_a_random_number_is_answered_only_where_the_answer_is_always_the_same() -> None:
    class Drop(TwoLayers):
        probability = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return x if torch.rand([]) < self.probability else super().forward(x)

    assert "last" in names(trace(Drop(), batch()))
    model = Drop()
    model.probability = 0.5
    with pytest.raises(TraceError, match="a path at random"):
        trace(model, batch())


def test_module_that_looks_at_integers_sees_those_of_the_example() -> None:
    seen: list[list[int]] = []

    class Lengths(TwoLayers):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            if not isinstance(lengths, FakeTensor):
                seen.append(lengths.tolist())
            return self.first(x)[:, : max(1, int(lengths.min()))]

    class Net(TwoLayers):
        def __init__(self) -> None:
            super().__init__()
            self.cut = Lengths()

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.cut(x, lengths + 1).sum()

    lengths = torch.tensor([2, 3, 4, 4])
    traced = trace(Net(), batch(), lengths, opened=())
    assert [3, 4, 5, 5] in seen
    assert [3, 3, 3, 3] in seen  # tells whether a size depends on them
    assert names(traced)[-2:] == ["cut", "sum"]
