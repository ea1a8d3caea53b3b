"""Where tensors have the batch, and which calls go by the numbers of its rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_fxpipe._compat.torch import symbolic_expression
from lightning_fxpipe.independence.batch_rows import Rows
from lightning_fxpipe.tracing.trace import TracedRegion
from tests.traces import WIDTH, batch, target_name, trace


class Calls(nn.Module):
    def __init__(self, calls: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._calls = calls

    def forward(self, x: Tensor) -> object:
        return self._calls(self.linear(x))


def rows_of(calls: Callable[[Tensor], object]) -> tuple[TracedRegion, Rows]:
    """As many samples as features, which must not be taken for each other."""
    traced = trace(Calls(calls), batch(WIDTH), opened=())
    return traced, Rows(traced, symbolic_expression(traced.input_nodes[0].meta["val"].shape[0]))


def node_of(traced: TracedRegion, name: str) -> fx.Node:
    """The last call of that name."""
    return [node for node in traced.graph.nodes if node.op.startswith("call") and target_name(node) == name][-1]


@pytest.mark.parametrize(
    ("name", "calls", "dims"),
    [
        ("view", lambda h: h.view(-1, 2, 3), [0]),
        ("flatten", lambda h: h.flatten(), [0]),
        ("transpose", lambda h: h.transpose(0, 1), [1]),
        ("matmul", lambda h: h @ h.T, [0, 1]),
        ("sum", lambda h: h.sum(0), []),
        ("__getitem__", lambda h: h[: len(h) // 2], [0]),
    ],
)
def test_the_dimensions_that_have_the_batch(name: str, calls: Callable[[Tensor], object], dims: list[int]) -> None:
    traced, rows = rows_of(calls)
    assert rows.carrying(node_of(traced, name).meta["val"]) == dims


@pytest.mark.parametrize(
    ("calls", "parts"),
    [
        (lambda h: torch.cat([h, h]), False),
        (lambda h: h.flatten(), False),
        (lambda h: h[:-1], True),
        (lambda h: h[: len(h) // 2], True),
        (lambda h: h[::2], True),
        (lambda h: torch.zeros(len(h) // 100 + 1), True),
        (lambda h: torch.zeros(len(h) ** 2), True),
    ],
)
def test_some_of_the_samples_are_no_number_for_each(calls: Callable[[Tensor], object], parts: bool) -> None:
    traced, rows = rows_of(calls)
    (result,) = traced.graph.output_node().all_input_nodes
    assert rows.has_parts_of_samples(result.meta["val"]) == parts


def set_items(h: Tensor) -> Tensor:
    h = h.clone()
    h[torch.arange(len(h)), h.argmax(1)] = 1
    return h


def set_numbers(h: Tensor) -> Tensor:
    h, numbers = h.clone(), torch.arange(len(h))
    h[numbers, 0] = numbers.to(h.dtype)
    return h


def put_numbers(h: Tensor) -> Tensor:
    numbers = torch.arange(len(h))
    return torch.zeros(len(h), 2, dtype=torch.long).index_put((numbers, h.argmax(1) % 2), numbers)


def changed_later(h: Tensor) -> Tensor:
    numbers = torch.arange(len(h))
    seen = numbers[:, None]
    numbers += 0
    return h[seen, torch.arange(WIDTH)]


def changed_view(h: Tensor) -> Tensor:
    numbers = torch.arange(len(h))
    numbers.view(-1, 1).mul_(0)
    return h[numbers]


OWN: dict[str, Callable[[Tensor], object]] = {
    "rows": lambda h: h[torch.arange(len(h))],
    "end by name": lambda h: h[torch.arange(end=len(h), dtype=torch.int32)],
    "start and step": lambda h: h[torch.arange(0, len(h), 1)],
    "a flattened batch": lambda h: h.flatten()[torch.arange(h.numel())],
    "a batch twice": lambda h: torch.cat([h, 2 * h])[torch.arange(2 * len(h))],
    "views side by side": lambda h: torch.cat([h[:, :2], h[:, 2:]], 1)[torch.arange(len(h))],
    "a slice of all": lambda h: h[torch.arange(len(h))[:], :2],
    "items set": set_items,
    "broadcast": lambda h: h[torch.broadcast_tensors(torch.arange(len(h))[:, None], torch.arange(WIDTH))],
    "another tensor of the batch": lambda h: torch.zeros(len(h), 3)[torch.arange(len(h)), h.argmax(1) % 3],
    "dimensions swapped": lambda h: h.T[:, torch.arange(len(h))[:, None].transpose(0, 1)[0]],
}


@pytest.mark.parametrize("calls", OWN.values(), ids=OWN)
def test_numbers_that_only_index_each_row_are_its_own(calls: Callable[[Tensor], object]) -> None:
    traced, rows = rows_of(calls)
    numbering = [node for node in traced.graph.nodes if target_name(node) == "arange" and rows.carrying(node.meta["val"])]
    assert numbering
    assert rows.own_numbers.issuperset(numbering)
    assert not any(rows.is_numbering(node) for node in numbering)
    assert not any(rows.picks_rows(node, rows.symbol) for node in traced.graph.nodes)


FOREIGN: dict[str, Callable[[Tensor], object]] = {
    "every second": lambda h: torch.cat([h, h])[torch.arange(0, 2 * len(h), 2)],
    "from one on": lambda h: torch.cat([h, h])[torch.arange(1, len(h) + 1)],
    "backwards": lambda h: h[torch.arange(len(h) - 1, -1, -1)],
    "flipped": lambda h: h[torch.arange(len(h)).flip(0)],
    "halved": lambda h: h[torch.arange(len(h)) // 2],
    "used as values": lambda h: h * torch.arange(len(h))[:, None],
    "set as values": set_numbers,
    "put as values": put_numbers,
    "given back": lambda h: (h, torch.arange(len(h))),
    "of features, as many as samples": lambda h: h.T[torch.arange(len(h))],
    "of features beside rows": lambda h: h[torch.arange(len(h)), torch.arange(len(h))],
    "of a table": lambda h: h + torch.ones(WIDTH, WIDTH)[torch.arange(len(h))],
    "of half a batch twice as long": lambda h: torch.cat([h, h])[torch.arange(len(h))],
    "of the tokens": lambda h: h.flatten()[torch.arange(len(h))],
    "crosswise": lambda h: h[torch.arange(len(h))[:, None], torch.arange(len(h))[None] % WIDTH],
    "beside a mask": lambda h: h[torch.arange(len(h)), torch.ones(WIDTH, dtype=torch.bool)],
    "along a dimension": lambda h: h.gather(0, torch.arange(len(h))[:, None].expand(-1, WIDTH)),
    "changed later": changed_later,
    "changed by a view": changed_view,
    "of itself": lambda h: h[(n := torch.arange(len(h)))[n]],
    "other memory": lambda h: h[torch.arange(len(h))[:, None].view(torch.int32)],
}


@pytest.mark.parametrize("calls", FOREIGN.values(), ids=FOREIGN)
def test_other_numbers_are_not(calls: Callable[[Tensor], object]) -> None:
    traced, rows = rows_of(calls)
    numbering = [node for node in traced.graph.nodes if target_name(node) == "arange" and rows.carrying(node.meta["val"])]
    assert numbering
    assert any(rows.is_numbering(node) for node in numbering)
    assert len(numbering) > 1 or rows.own_numbers.isdisjoint(numbering)


@pytest.mark.parametrize(
    ("name", "calls", "picks"),
    [
        ("__getitem__", lambda h: h[h.argmax(1)], True),
        ("__getitem__", lambda h: h[h.argmax(1) > 2], False),
        ("__getitem__", lambda h: h[:, h.argmax(1)], False),
        ("__getitem__", lambda h: h[torch.arange(len(h)), h.argmax(1)], False),
        ("__setitem__", lambda h: h.clone().__setitem__(0, 1.0), True),
        ("__setitem__", lambda h: h.clone().__setitem__((slice(None), 0), 1.0), False),
        ("index_put", lambda h: h.index_put((h.argmax(1),), torch.zeros(())), True),
        ("index_select", lambda h: h.index_select(0, h.argmax(1)), True),
        ("index_select", lambda h: h.index_select(1, h.argmax(1)), False),
        ("gather", lambda h: h.gather(0, h.argsort(1)), True),
        ("gather", lambda h: torch.gather(h, dim=-2, index=h.argsort(1)), True),
        ("gather", lambda h: h.gather(1, h.argsort(1)), False),
        ("scatter_add", lambda h: h.scatter_add(0, h.argsort(1), h), True),
        ("take", lambda h: h.take(h.argmax(1)), True),
        ("embedding", lambda h: nn.functional.embedding(h.argmax(1), h), True),
        ("embedding", lambda h: nn.functional.embedding(h.argmax(1), torch.ones(WIDTH, 2)), False),
    ],
)
def test_rows_that_are_picked_by_number(name: str, calls: Callable[[Tensor], object], picks: bool) -> None:
    traced, rows = rows_of(calls)
    assert rows.picks_rows(node_of(traced, name), rows.symbol) == picks


@pytest.mark.parametrize(
    ("name", "calls", "calculates"),
    [
        ("div", lambda h: h / len(h), True),
        ("div", lambda h: h / h.shape[1], False),
        ("new_full", lambda h: h.new_full((), len(h)), True),
        ("new_full", lambda h: h.new_full((len(h),), 2), False),
        ("view", lambda h: h.view(len(h), 2, 3), False),
    ],
)
def test_calculating_with_the_number_of_samples(name: str, calls: Callable[[Tensor], object], calculates: bool) -> None:
    traced, rows = rows_of(calls)
    assert rows.calculates_with_number(node_of(traced, name)) == calculates
