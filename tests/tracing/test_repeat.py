"""Calls of a graph are made again on fakes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import FakeTensor, symbolic_expression
from lightning_fxpipe.pytree.sizes import size_symbols
from lightning_fxpipe.tracing.repeat import Repeat, example_sizes, has_known_size, is_of_torch, modes_of
from lightning_fxpipe.tracing.torch_calls import CallContext
from lightning_fxpipe.tracing.trace import TracedRegion
from tests.traces import BATCH, WIDTH, batch, target_name, trace


class Calls(nn.Module):
    def __init__(self, calls: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(3))
        self._calls = calls

    def forward(self, x: Tensor) -> Any:
        return self._calls(self.linear(x))


def traced_call(calls: Callable[[Tensor], Any], name: str) -> tuple[TracedRegion, fx.Node]:
    traced = trace(Calls(calls), batch(), opened=())
    return traced, next(node for node in traced.graph.nodes if node.op.startswith("call") and target_name(node) == name)


def call(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return module(*args, **kwargs)


@pytest.mark.parametrize(
    ("name", "calls", "shape"),
    [
        ("view", lambda h: h.view(len(h) * 2, 3), (BATCH * 2, 3)),
        ("cat", lambda h: torch.cat([h, h[: len(h) // 2]], dim=0), (BATCH + BATCH // 2, WIDTH)),
        ("__getitem__", lambda h: h[: len(h) - 1, 2:], (BATCH - 1, WIDTH - 2)),
        ("linear", lambda h: h, (BATCH, WIDTH)),
        ("pad", lambda h: nn.functional.pad(h, (0, 0), value=2.0), (BATCH, WIDTH)),
    ],
)
def test_a_call_gives_fakes_of_the_example_s_sizes(name: str, calls: Callable[[Tensor], Any], shape: tuple[int, ...]) -> None:
    traced, node = traced_call(calls, name)
    repeat = Repeat(traced)
    with repeat.active(), modes_of(node):
        values = {operand: repeat.blank(operand) for operand in node.all_input_nodes}

        def call_on_fakes(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            with repeat.module_on_fakes(module):
                return call(module, args, kwargs)

        result = repeat.call(node, values, call_on_fakes)
    assert isinstance(result, FakeTensor)
    assert tuple(result.shape) == shape
    assert result.dtype == node.meta["val"].dtype


def test_a_module_gets_its_own_tensors_back() -> None:
    traced, _ = traced_call(lambda h: h, "linear")
    repeat, module = Repeat(traced), traced.root
    before = dict(module.named_parameters()) | dict(module.named_buffers())
    with repeat.active(), repeat.module_on_fakes(module):
        assert all(isinstance(tensor, FakeTensor) for tensor in (*module.parameters(), *module.buffers()))
    after = dict(module.named_parameters()) | dict(module.named_buffers())
    assert after.keys() == before.keys()
    assert all(after[name] is tensor for name, tensor in before.items())


def test_sizes_that_depend_on_data_are_not_known() -> None:
    traced, node = traced_call(lambda h: (n := h[h > 0]).new_zeros(len(n)), "new_zeros")
    repeat = Repeat(traced)
    (batch_symbol,) = example_sizes(traced)
    assert example_sizes(traced)[batch_symbol] == BATCH
    assert repeat.is_known(batch_symbol)
    assert not all(map(repeat.is_known, size_symbols((node.args, node.kwargs))))
    assert not has_known_size(node.meta["val"])
    assert has_known_size(traced.input_nodes[0].meta["val"])
    assert symbolic_expression(traced.input_nodes[0].meta["val"].shape[0]) == batch_symbol


def own(h: Tensor) -> Tensor:
    return h


def test_only_functions_of_torch_are_known() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert is_of_torch(graph.call_function(torch.cat, ([x],)))
    assert is_of_torch(graph.call_method("view", (x, -1)))
    assert not is_of_torch(graph.call_function(own, (x,)))


def test_modes_are_those_of_the_call() -> None:
    def without_gradients(h: Tensor) -> Tensor:
        with torch.no_grad():
            doubled = h * 2
        return doubled + h

    traced, node = traced_call(without_gradients, "mul")
    for each, expected in ((node, False), (next(n for n in traced.graph.nodes if target_name(n) == "add"), True)):
        with torch.enable_grad(), modes_of(each):
            assert torch.is_grad_enabled() == expected


def test_autocast_is_that_of_the_trace() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        traced, node = traced_call(lambda h: h.float() @ h.float().t(), "matmul")
    repeat = Repeat(traced)
    with repeat.active():
        values = {operand: repeat.blank(operand) for operand in node.all_input_nodes}
        assert repeat.call(node, values, call).dtype == node.meta["val"].dtype == torch.bfloat16


def test_autocast_that_a_call_was_made_without_is_off() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), CallContext(True, "cpu", False, None).active():
        assert not torch.is_autocast_enabled("cpu")
