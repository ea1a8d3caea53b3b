"""What the recorder takes torch's recurrent layers to return is what they return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_fxpipe._compat.torch import FakeWorld, size_hint, symbolic_expression, tree_leaves
from lightning_fxpipe.tracing import trace
from lightning_fxpipe.tracing.record import Recorder
from lightning_fxpipe.tracing.recorder_settings import RecorderSettings
from lightning_fxpipe.tracing.trace import trace_region
from tests.staging import call_of
from tests.traces import covers

LENGTH, BATCH, WIDTH = 5, 3, 4
KINDS: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"batch_first": True}),
    (nn.LSTM, {"bidirectional": True, "num_layers": 2, "dropout": 0.5}),
    (nn.LSTM, {"proj_size": 2, "batch_first": True, "bidirectional": True}),
    (nn.LSTM, {"bias": False}),
    (nn.GRU, {"batch_first": True, "num_layers": 2}),
    (nn.GRU, {"bidirectional": True}),
    (nn.RNN, {"nonlinearity": "relu", "batch_first": True}),
    (nn.RNN, {"nonlinearity": "tanh"}),
]


def described(result: Any) -> list[tuple[Any, ...]]:
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return [(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad, leaf.is_leaf) for leaf in leaves]


def recorder() -> Recorder:
    return Recorder(RecorderSettings(modules={}, tensor_fqns={}, is_whole=lambda *_: True, device_type="cpu", lasting={}))


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_described_as_the_layer_makes_them(kind: Any, options: dict[str, Any], trained: bool, dtype: Any) -> None:
    torch.manual_seed(1)
    layer = kind(WIDTH, 6, **options).to(dtype).requires_grad_(trained)
    x = torch.randn(LENGTH, BATCH, WIDTH, dtype=dtype)
    expected = described(layer(x))
    mode = recorder()
    world = FakeWorld()
    fake = world.input(x, [])
    with world.active(), mode, mode.pause():
        assert described(layer(fake)) == expected


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_no_size_becomes_a_constant(kind: Any, options: dict[str, Any]) -> None:
    layer = kind(WIDTH, 6, **options)
    mode, world = recorder(), FakeWorld()
    x = world.input(torch.randn(LENGTH, BATCH, WIDTH), [], {0: 0, 1: 1})
    with world.active(), mode, mode.pause():
        output = layer(x)[0]
    assert [symbolic_expression(size) for size in output.shape[:2]] == [symbolic_expression(size) for size in x.shape[:2]]
    assert world.replacements() == {}


class CallsTorch(nn.Module):
    """The layer's function with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Parameter(torch.randn(18, WIDTH)), nn.Parameter(torch.randn(18, 6))

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(1, x.shape[0], 6)
        return torch.gru(x, state, [self.inner, self.outer], False, 1, 0.0, True, False, True)[0]


def test_the_function_itself_is_one_call_of_the_graph() -> None:
    traced = trace_region(CallsTorch(), call_of(torch.randn(BATCH, LENGTH, WIDTH)), opened=None)
    assert [node.target for node in traced.graph.nodes].count(torch.gru) == 1


class Packs(nn.Module):
    """Packs sequences, and pads them again."""

    def __init__(self, kind: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.layer = kind(WIDTH, 6, **{**options, "batch_first": True})
        self.is_sorted = "proj_size" in options

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.is_sorted)
        output, state = self.layer(packed)
        padded, _ = pad_packed_sequence(output, batch_first=True)
        longer, _ = pad_packed_sequence(output, batch_first=True, total_length=LENGTH + 1)
        return padded, longer, state


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_packed_sequences_are_described_but_for_their_number_of_entries(kind: Any, options: dict[str, Any]) -> None:
    """What is packed and padded again has the shapes, dtypes and gradients that it has on real data."""
    model, x, lengths = Packs(kind, options), torch.randn(BATCH, LENGTH, WIDTH), torch.tensor([4, 3, 1])
    traced = trace_region(model, call_of(x, lengths), opened=None)
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    found = [node.meta["val"] for node in output.all_input_nodes]
    expected = [leaf for leaf in tree_leaves(model(x, lengths)) if isinstance(leaf, Tensor)]
    sizes = [tuple(size_hint(size) for size in tensor.shape) for tensor in found]
    assert sizes == [tuple(tensor.shape) for tensor in expected]
    assert [(t.dtype, t.requires_grad) for t in found] == [(t.dtype, t.requires_grad) for t in expected]
    assert covers(traced, call_of(x, torch.tensor([4, 2, 2])))
    assert not covers(traced, call_of(x, torch.tensor([5, 2, 2]))), "the longest sequence is a dimension of the results"


def test_a_recurrent_layer_is_recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lists of weights change with its weights, which looked as if opened code kept a state: the trace began again."""
    recorded = []
    record = trace._record

    def counted(*args: Any, **kwargs: Any) -> Any:
        recorded.append(args)
        return record(*args, **kwargs)

    monkeypatch.setattr(trace, "_record", counted)
    model = Recurrent()
    traced = trace_region(model, call_of(torch.randn(2, 5, 3)), opened=(), check=False)
    assert len(recorded) == 1
    assert [str(node.target) for node in traced.graph.nodes if node.op == "call_module"] == ["layer", "head"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0])
