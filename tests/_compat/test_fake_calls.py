"""Results of repeated calls are those that the fake mode itself would give."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_fxpipe._compat import torch as _compat
from lightning_fxpipe._compat.fake_calls import WritesData, repeated_calls
from lightning_fxpipe._compat.torch import FakeTensor, FakeWorld, storage_key, symbolic_expression, version_of
from lightning_fxpipe.tracing.trace import trace_region
from tests.traces import call_of

CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "linear": F.linear,
    "sum": lambda x, w: x + x.sum(dim=1, keepdim=True),
    "sums of other types": lambda x, w: (x + 1, x + 1.5, x.long() + 1, x.long() + True),
    "views": lambda x, w: (x.view(-1, 8), x[:, 1:], x.transpose(0, 1), x.unsqueeze(1).expand(-1, 3, -1, -1)),
    "reshape with and without a copy": lambda x, w: (x.reshape(-1), x.transpose(0, 1).reshape(-1)),
    "parts": lambda x, w: (*x.chunk(2, dim=1), *x.split([1, 3], dim=1), *x.unbind(1)),
    "norm": lambda x, w: F.layer_norm(x, (8,)),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True),
    "cat": lambda x, w: torch.cat([torch.tensor([]), x.flatten()]),
    "factories": lambda x, w: (torch.arange(x.shape[0]), x.new_zeros(x.shape[0], 3), torch.ones(2, dtype=torch.float64)),
    "written in place": lambda x, w: (x.clone().add_(1).relu_(), x.clone().transpose_(0, 1), x.clone().unsqueeze_(0)),
    "written through a view": lambda x, w: written(x.clone(), x),
    "dropout": lambda x, w: F.dropout(x, 0.5),
    "conjugate": lambda x, w: (torch.complex(x, x).conj() * 2, torch.complex(x, x).conj().imag),
    "views of another type": lambda x, w: (torch.view_as_complex(x.view(-1, 4, 2)), x.view(torch.int32), x.view(torch.int64)),
}


def written(target: Tensor, value: Tensor) -> Tensor:
    target[:, 0] = value[:, 1]
    return target


def described(value: Any) -> list[Any]:
    """All that code can ask a fake tensor about."""
    return [
        (
            [*map(symbolic_expression, (*t.shape, *t.stride(), t.storage_offset()))],
            (t.dtype, t.device, t.layout, t.requires_grad, t.is_leaf, t.is_conj(), t.is_neg(), type(t), type(t.grad_fn)),
            symbolic_expression(t.untyped_storage().nbytes()),
        )
        for t in _compat.tree_leaves(value)
    ]


def tensors(world: FakeWorld) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return world.input(torch.randn(6, 4, 8), [0]), world.static(nn.Parameter(torch.randn(5, 8)))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_repeated_call_gives_what_the_fake_mode_gives(call: Callable[[Tensor, Tensor], Any], requires_grad: bool) -> None:
    world = FakeWorld()
    x, weight = tensors(world)
    x.requires_grad_(requires_grad)
    with world.active():
        first, second = call(x, weight), call(x, weight)
    with _compat.enable_python_dispatcher(), world.mode:
        plain = call(x, weight)
    assert described(first) == described(second) == described(plain)


def test_an_operator_runs_once_for_arguments_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[Any] = []
    dispatch = FakeTensorMode.dispatch

    def counted(self: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
        run.append(func)
        return dispatch(self, func, *args, **kwargs)

    world = FakeWorld()
    x, weight = tensors(world)
    with world.active():
        layers = [F.linear(x, weight) for _ in range(2)]
        monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
        layers += [F.linear(x, weight) for _ in range(20)]
    assert run == []
    assert len({storage_key(layer) for layer in layers}) == len(layers)


def test_each_result_has_memory_of_its_own_and_each_view_that_of_its_base() -> None:
    """Where a cut may fall, and what is changed in place, follows from who shares memory with whom."""
    world = FakeWorld()
    x, _ = tensors(world)
    with world.active():
        bases = [x + 1 for _ in range(3)]
        views = [base[:, 1:].transpose(0, 1) for base in bases]
    assert len({*map(storage_key, bases)}) == len(bases)
    assert [*map(storage_key, views)] == [*map(storage_key, bases)]


def test_what_is_written_in_place_reaches_base_and_views() -> None:
    world = FakeWorld()
    x, weight = tensors(world)
    with world.active():
        for _ in range(3):
            base = x + 1
            view, before = base[:, 0], version_of(base)
            view.add_(weight.sum())
            assert base.requires_grad
            assert view.requires_grad
            assert version_of(base) == version_of(view) > before


def test_the_argument_that_is_returned_is_found_by_its_place() -> None:
    """Where several arguments are one tensor, nobody can tell which of them another call returns."""
    world = FakeWorld()
    x, _ = tensors(world)
    with world.active():
        a, b, c = (x.clone() for _ in range(3))
        assert torch.add(a, a, out=a) is a
        assert torch.add(a, b, out=c) is c
        assert torch.add(b, c, out=a) is a


def test_results_are_differentiated_through() -> None:
    world = FakeWorld()
    x, weight = tensors(world)
    with world.active():
        for _ in range(3):
            (gradient,) = torch.autograd.grad(F.linear(x, weight).tanh().sum(), weight)
            assert gradient.shape == weight.shape


def test_a_size_that_depends_on_data_is_another_each_time() -> None:
    world = FakeWorld()
    x, _ = tensors(world)
    with world.active():
        mask = x > 0
        sizes = {symbolic_expression((mask & True).nonzero().shape[0]) for _ in range(3)}
    assert len(sizes) == 3


def test_tensors_with_data_stay_what_they_are() -> None:
    """Code that runs outside of the fakes meanwhile got a fake in place of its numbers."""
    world = FakeWorld()
    with world.active():
        fakes = [torch.zeros(3) for _ in range(2)]
        with _compat.outside_fakes():
            found = torch.zeros(3)
    assert all(isinstance(fake, FakeTensor) for fake in fakes)
    assert not isinstance(found, FakeTensor)


def test_a_value_that_is_known_stays_known() -> None:
    world = FakeWorld()
    with world.active():
        assert [(torch.tensor(3) + n).item() for n in (1, 2, 1, 2)] == [4, 5, 4, 5]


def test_the_graph_of_a_model_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.dropout(self.out(heads.transpose(1, 2).reshape(x.shape)), 0.1, self.training)
            x[:, 0] *= 2
            return x

    @contextmanager
    def unrepeated(mode: FakeTensorMode) -> Any:
        yield

    model, call = nn.Sequential(*(Block() for _ in range(3))), call_of(torch.randn(6, 4, 8))
    found = trace_region(model, call, opened=None)
    monkeypatch.setattr(_compat, "repeated_calls", unrepeated)
    expected = trace_region(model, call, opened=None)
    assert [str(node.format_node()) for node in found.graph.nodes] == [str(node.format_node()) for node in expected.graph.nodes]
    for node, other in zip(found.graph.nodes, expected.graph.nodes, strict=True):
        assert described(node.meta.get("val", ())) == described(other.meta.get("val", ())), node
        assert len(node.meta.get("mutated_storages", ())) == len(other.meta.get("mutated_storages", ()))


def test_the_fake_mode_is_afterwards_what_it_was() -> None:
    mode = FakeWorld().mode
    before = mode.cache_enabled
    with mode, repeated_calls(mode):
        assert not mode.cache_enabled
    assert mode.cache_enabled == before


def test_tensors_with_data_are_not_written_to() -> None:
    """The fake mode runs an in-place operator that has no fakes, see ``findings/fake_mode_writes_to_real_tensors.sh``."""
    world, scale = FakeWorld(), torch.ones(2)
    x, _ = tensors(world)
    with world.active():
        for write in (lambda: scale.mul_(2.0), lambda: scale.add_(x.sum()), lambda: torch.add(x.sum(), 1, out=scale)):
            with pytest.raises(WritesData, match="neither an argument nor an attribute of a module"):
                write()
        x.mul_(2.0)
    assert scale.tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_who_asks_for_the_memory_of_results_gets_no_more_than_of_other_fakes() -> None:
    """Copies that torch makes when they are written to raise an error then, and end the process when they are gone."""
    world = FakeWorld()
    x, weight = tensors(world)
    with world.active():
        results = [F.linear(x, weight) for _ in range(3)]
    assert [result.untyped_storage().data_ptr() for result in results] == [0, 0, 0]
    results.clear()
    gc.collect()


@pytest.mark.parametrize("num_samples", [2, 16])
def test_a_convolution_sets_no_condition_on_the_number_of_samples(num_samples: int) -> None:
    """Otherwise a graph that was traced with a batch of 16 would not run microbatches of fewer samples, on CPUs."""
    world, select = FakeWorld(), torch._C._select_conv_backend
    fake = world.input(torch.ones(num_samples, 3, 8, 8), (0,))
    with world.active():
        torch.nn.functional.conv2d(fake, torch.empty(8, 3, 3, 3), padding=1)
    assert not world.guards()
    assert torch._C._select_conv_backend is select
