"""A block that is like one before need not run: which are, and that a graph is the same as if all had run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import storage_key, symbolic_expression, tree_leaves
from lightning_fxpipe.tracing.known_calls import KnownCalls
from lightning_fxpipe.tracing.trace import TracedRegion
from tests.models import make_model, make_samples
from tests.traces import WIDTH, batch, trace

NUM_BLOCKS = 5
SEEN: list[int] = []


class Block(nn.Module):
    """A block that knows its number, and makes no use of it."""

    counted = 0

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Any:
        return x + self.dropout(self.linear(x)).relu()


class Stack(nn.Module):
    """Calls blocks of a kind one after the other."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(make(index) for index in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Any:
        results = []
        x = x * self.scale  # so that the first block gets what the others get: a result that trains
        for block in self.blocks:
            result = block(x)
            results.append(result)
            x = tree_leaves(result)[0]
        return results


class Pair(Block):
    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return {"x": x, "more": (x.sum(dim=1), None, 3)}


class Sized(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), torch.zeros(self.index + 1)


class Named(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        if index == 3:
            self.wide = True

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.new_zeros(7 if hasattr(self, "wide") else 2)


class Listed(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), torch.zeros(1 + {**vars(self)}["index"])


class Inner(Block):
    """A module inside reads its number, of which the call of it may be known when this one is watched."""

    def __init__(self, index: int) -> None:
        super().__init__(0)
        self.before = Sized(0)
        self.inside = Sized(index // 2)

    def forward(self, x: Tensor) -> Any:
        return self.inside(self.before(x)[0])


class Counting(Block):
    def forward(self, x: Tensor) -> Any:
        self.index += 1
        return super().forward(x), torch.zeros(self.index)


class Telling(Block):
    def forward(self, x: Tensor) -> Any:
        SEEN.append(self.linear.in_features)
        return super().forward(x)


class Shared(Block):
    def forward(self, x: Tensor) -> Any:
        Shared.counted += 1
        return super().forward(x)


class Drawing(Block):
    def forward(self, x: Tensor) -> Any:
        random.random()
        return super().forward(x)


class InPlace(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.add_(1))


class Widening(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.linear.weight.unsqueeze(0)


class Marking(Block):
    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        x.mark = self.linear.in_features  # type: ignore[attr-defined]
        return x


class Twice(Block):
    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x, x.view(-1)


def tied(index: int) -> nn.Module:
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    if index in (0, 2):
        block[1].weight = block[0].weight
    return block


def frozen(index: int) -> nn.Module:
    return Block(index).requires_grad_(index % 2 == 0)


def evaluated(index: int) -> nn.Module:
    return Block(index).train(index % 2 == 0)


def hooked(index: int) -> nn.Module:
    block = Block(index)
    if index == 3:
        block.register_forward_hook(lambda module, args, result: result[:, :WIDTH].clone())
    return block


def patched(index: int) -> nn.Module:
    block = Block(index)
    if index == 3:
        block.forward = lambda x: x * 2  # type: ignore[method-assign]
    return block


# How many of five blocks are answered: the first only runs, and the second is watched.
CASES: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "alike": (Block, 3),
    "of torch alone": (lambda _: nn.Linear(WIDTH, WIDTH), 3),
    "a dict of several results": (Pair, 3),
    "a frozen one": (frozen, 1),  # three and two
    "two kinds, by mode": (evaluated, 1),
    "tied inside": (tied, 1),
    "one with a hook": (hooked, 2),
    "one with another forward": (patched, 2),
    "an attribute that is read": (Sized, 0),
    "an attribute that only one has": (Named, 2),
    "all attributes are read": (Listed, 0),
    "an attribute that a module inside reads": (Inner, 1),  # 0 0 1 1 2: the second pair's second
    "an attribute that is set": (Counting, 0),
    "a global list": (Telling, 0),
    "an attribute of the class": (Shared, 0),
    "random numbers": (Drawing, 0),
    "an argument written in place": (InPlace, 0),
    "a view of a parameter": (Widening, 0),
    "an attribute of a tensor": (Marking, 0),
    "two results in the same memory": (Twice, 0),
}


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the classes of which a call is answered, as long as a test runs."""
    names: list[str] = []
    plain = KnownCalls.answered

    def noted(self: KnownCalls, question: Any, known: Any) -> Any:
        names.append(type(question.module).__name__)
        return plain(self, question, known)

    monkeypatch.setattr(KnownCalls, "answered", noted)
    return names


def without_memory(monkeypatch: pytest.MonkeyPatch, make: Callable[[], TracedRegion]) -> TracedRegion:
    with monkeypatch.context() as patch:
        patch.setattr(KnownCalls, "ask", lambda *args: None)
        return make()


def described(traced: TracedRegion) -> list[Any]:
    """All that a graph says, in a form that can be compared with another's."""
    numbers = {node: index for index, node in enumerate(traced.graph.nodes)}

    def plain(value: Any) -> Any:
        return fx.map_arg(value, lambda node: f"node {numbers[node]}")

    def value_of(node: fx.Node) -> Any:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return None
        sizes = [*map(symbolic_expression, (*value.shape, *value.stride(), value.storage_offset()))]
        return sizes, value.dtype, value.device, value.requires_grad

    return [
        (
            (node.op, str(node.target), repr(plain(node.args)), repr(plain(node.kwargs))),
            (node.meta["module_path"], node.meta.get("source"), node.meta.get("inner_results"), node.meta.get("context")),
            (len(node.meta.get("mutated_storages", ())), len(node.meta.get("module_storages", ())), value_of(node)),
        )
        for node in traced.graph.nodes
        if node.op != "output"
    ]


@pytest.mark.parametrize(("make", "expected"), CASES.values(), ids=CASES)
def test_blocks_are_answered_where_all_that_they_read_is_alike(
    make: Callable[[int], nn.Module], expected: int, answered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def record() -> TracedRegion:
        return trace(Stack(make), batch(), opened=())

    traced = record()
    found = [name for name in answered if name == type(make(0)).__name__]
    all_run = without_memory(monkeypatch, record)
    assert described(traced) == described(all_run)
    assert traced.guards.keys() == all_run.guards.keys()
    assert len(found) == 2 * expected  # a graph is recorded twice


@pytest.mark.parametrize("name", ["gpt", "resnet", "unet", "mlp"])
def test_graphs_of_whole_models_are_the_same_as_if_all_had_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (inputs, _) = make_model(name), make_samples(name, 4)

    def record() -> TracedRegion:
        opened = [path for path, module in model.named_modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
        return trace(model, inputs, opened=opened)

    assert described(record()) == described(without_memory(monkeypatch, record))


def test_a_result_may_be_written_into_as_one_that_was_made(answered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Writing(Stack):
        def forward(self, x: Tensor) -> Any:
            last = super().forward(x)[-1]
            last += 1  # not into a leaf that trains, nor into what other blocks have returned
            with torch.no_grad():
                return last, self.blocks[0](x)

    def record() -> TracedRegion:
        return trace(Writing(Block), batch(), opened=())

    traced = record()
    blocks = [node for node in traced.graph.nodes if node.op == "call_module"]
    assert answered
    assert len({storage_key(node.meta["val"]) for node in blocks}) == NUM_BLOCKS + 1
    assert described(traced) == described(without_memory(monkeypatch, record))


def test_what_is_drawn_in_a_block_that_need_not_run_is_known(answered: list[str]) -> None:
    class Noisy(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) + torch.randn_like(x)

    # Each is opened then, so that its numbers are drawn for the whole batch.
    traced = trace(Stack(Noisy), batch(), opened=())
    assert answered
    assert traced.opened == tuple(f"blocks.{index}" for index in range(NUM_BLOCKS))
