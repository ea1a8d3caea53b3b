"""Which calls become nodes, and with what arguments, contexts and changes in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fxpipe.planner.cost import build_chain
from lightning_fxpipe.tracing.graph_writer import CONSTANT_PREFIX
from tests.traces import WIDTH, TwoLayers, batch, names, target_name, trace

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
    assert not traced.held.constants


def test_tensor_that_is_no_attribute_is_a_constant() -> None:
    scale = torch.arange(float(WIDTH))

    class Net(TwoLayers):
        def between(self, h: Tensor) -> Tensor:
            return h * scale + scale

    traced = trace(Net(), batch())
    assert list(traced.held.constants) == [f"{CONSTANT_PREFIX}0"]
    assert traced.held.constants[f"{CONSTANT_PREFIX}0"] is scale
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
