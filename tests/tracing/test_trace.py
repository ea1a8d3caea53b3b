"""Traces: which nodes are recorded and where each came from, what a trace covers, what it leaves as it was, what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import tree_leaves
from lightning_fxpipe.pytree.sizes import SymbolicSize
from lightning_fxpipe.tracing.trace import TracedRegion
from tests.models import BasicBlock, ResNet18, SkipMLP, TiedGPT, make_model, make_samples
from tests.traces import WIDTH, TwoLayers, batch, call_of, calls, covers, line_of, names, target_name, trace

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


class InfersItsScale(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = torch.arange(x.shape[1]) / 2
            scale.mul_(2)
        return super().forward(x) * scale.clone()


def test_what_is_changed_in_an_inference_mode_is_recorded() -> None:
    """Tensors that are made in such a mode have no version that would tell of the change."""
    assert "mul_" in names(trace(InfersItsScale(), batch(), opened=()))


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
        assert covers(traced, call_of(ids[:size])), size
        sizes = traced.bind_sizes(((size, 10),))
        assert sizes is not None
        assert list(sizes.values()) == [size]
    assert traced.bind_sizes(((4, 9),)) is None
    assert not covers(traced, call_of(ids[:4, :9]))


def test_batch_of_one_is_traced_apart() -> None:
    # torch decides broadcasting and contiguity differently for sizes 0 and 1.
    traced = trace(TwoLayers(), batch(4))
    assert not covers(traced, call_of(batch(1)))
    of_one = trace(TwoLayers(), batch(1))
    assert covers(of_one, call_of(batch(1)))
    assert not covers(of_one, call_of(batch(4)))


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
    assert covers(traced, call_of(batch(4)))
    assert covers(traced, call_of(batch(6)))
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
    assert covers(traced, call_of(batch(4)))
    for size in (2, 3, 6):
        assert not covers(traced, call_of(batch(size))), size


def test_branch_on_the_batch_size_is_covered_where_it_goes_the_same_way() -> None:
    traced = trace(Sized(lambda h, b: h * 2 if b > 3 else h * 3), batch(4))
    assert covers(traced, call_of(batch(9)))
    assert not covers(traced, call_of(batch(3)))


def test_divisibility_that_the_forward_needs_is_checked() -> None:
    traced = trace(Sized(lambda h, b: h.view(2, -1, WIDTH).flatten(0, 1)), batch(4))
    assert covers(traced, call_of(batch(6)))
    assert not covers(traced, call_of(batch(5)))


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
    assert covers(traced, call_of(batch()))
    changed(model, batch())
    assert not covers(traced, call_of(batch()))


def test_dtype_structure_constants_and_grad_mode_are_part_of_what_a_trace_covers() -> None:
    class Scaled(TwoLayers):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.last(self.first(x.float()) * scale)

    traced = trace(Scaled(), batch(), 2.0)
    assert covers(traced, call_of(batch(), 2.0))
    assert not covers(traced, call_of(batch(), 3.0))
    assert not covers(traced, call_of(batch(), 2))  # an int may take another path
    assert not covers(traced, call_of(batch()))
    assert not covers(traced, call_of(batch().double(), 2.0))
    assert not covers(traced, call_of(batch(), scale=2.0))
    with torch.no_grad():
        assert not covers(traced, call_of(batch(), 2.0))
