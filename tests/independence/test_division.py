"""Which part of a region may run on microbatches; a graph that cannot be divided is left as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.independence.division import NotDivisible, divide, has_several_entries, joined_dim
from tests.traces import WIDTH, TwoLayers, batch, target_name, trace


class Cache:
    """What a layer fills."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        h = self.linear(x)
        cache.kept.append(h.sum(0))
        return h


class ReturnsItsCache(nn.Module):
    """What the cache holds is of the whole batch, and later code gets it."""

    def __init__(self) -> None:
        super().__init__()
        self.fills = Fills()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        cache = Cache()
        return self.fills(x, cache), cache.kept[0]


def test_a_graph_that_cannot_be_divided_stays_as_it_was() -> None:
    """The cache that the layer fills had got a copy, which nobody fills, and from which the result was taken."""
    traced = trace(ReturnsItsCache(), batch(), opened=())
    before = [node.name for node in traced.graph.nodes]
    with pytest.raises(NotDivisible):
        divide(traced)
    assert [node.name for node in traced.graph.nodes] == before
    traced.graph.lint()


class Between(TwoLayers):
    """Two layers with some calls between them."""

    def __init__(self, calls: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._calls = calls

    def between(self, h: Tensor) -> Tensor:
        return self._calls(h)


def tail_of(calls: Callable[[Tensor], Tensor]) -> set[str]:
    """Names of the calls that must see the whole batch."""
    traced = trace(Between(calls), batch(8), opened=())
    return {target_name(node) for node in divide(traced).tail}


def columns(h: Tensor) -> Tensor:
    return torch.arange(h.shape[1])[None]


def with_items(h: Tensor) -> Tensor:
    h = h.clone()
    h[torch.arange(len(h)), h.argmax(1)] = 0
    return h


def meshed(h: Tensor) -> Tensor:
    i, j = torch.meshgrid(torch.arange(len(h)), torch.arange(WIDTH), indexing="ij")
    return h[i, j]


def transformers_mask(h: Tensor) -> Tensor:
    """As transformers makes masks: with a grid of the numbers of samples, heads, queries and keys."""
    samples, keys = torch.arange(h.shape[0])[:, None, None, None], torch.arange(WIDTH)[None, None, None, :]
    mask = h.new_ones((), dtype=torch.bool) & (keys <= torch.arange(WIDTH)[None, None, :, None]) & (h > 0)[samples, keys]
    return torch.where(mask.expand(h.shape[0], -1, WIDTH, WIDTH), 1.0, 0.0).sum(2).squeeze(1) * h


OWN_ROWS = {
    "all of each row": lambda h: h[torch.arange(len(h))],
    "a grid": lambda h: h[torch.arange(len(h), device=h.device)[:, None], columns(h)],
    "an item of each row": lambda h: h * h[torch.arange(len(h)), h.argmax(1)].unsqueeze(1),
    "a fixed item": lambda h: h * h[torch.arange(len(h)), -1, None],
    "expanded": lambda h: h[torch.arange(h.size(0)).unsqueeze(-1).expand(-1, WIDTH), h.argsort(1)],
    "reshaped": lambda h: h[torch.arange(0, len(h)).view(-1, 1).long(), h.argsort(1)],
    "an item of each row is set": with_items,
    "a mesh": meshed,
    "index_select": lambda h: h.index_select(0, torch.arange(len(h))),
    "index_put": lambda h: h.index_put((torch.arange(len(h)), h.argmax(1)), torch.zeros(())),
    "a mask of transformers": transformers_mask,
    "a token of each": lambda h: h + TABLE[:1].expand(len(h), -1) + TABLE[0].repeat(len(h), 1),
    "a token of each, interleaved": lambda h: h + TABLE[:1].repeat_interleave(len(h), 0),
    "gathered from each": lambda h: h.gather(1, h.argsort(1)),
    "zeros of their number": lambda h: h + h.new_zeros(len(h), WIDTH) + torch.full((len(h), 1), 2.0),
    "the second dimension": lambda h: h.T[:, torch.arange(len(h))].T,
}


@pytest.mark.parametrize("calls", OWN_ROWS.values(), ids=OWN_ROWS)
def test_each_row_may_be_indexed_by_its_own_number(calls: Callable[[Tensor], Tensor]) -> None:
    assert tail_of(calls) == set()


def halves(h: Tensor) -> Tensor:
    first = len(h) // 2
    return torch.cat([h[:first] * 2, h[first:]])


def first_row(h: Tensor) -> Tensor:
    h = h.clone()
    h[0] = 0
    return h


def by_number(h: Tensor, name: str, *more: Tensor) -> Tensor:
    """A method that goes along the first dimension by numbers in a tensor."""
    index = torch.zeros(len(h), WIDTH, dtype=torch.long)
    result: Tensor = getattr(h, name)(0, index, *more)
    return result


TABLE = torch.zeros(100, WIDTH)

OTHER_NUMBERS = {
    "the first of a table of zeros": ("__getitem__", lambda h: h + TABLE[: len(h)]),
    "narrow, of a table of zeros": ("narrow", lambda h: h + TABLE.narrow(0, 0, len(h))),
    "each of a table so often": (
        "repeat_interleave",
        lambda h: h + TABLE[:3].repeat_interleave(len(h), 0).view(3, -1, WIDTH)[0],
    ),
    "padded to their number": ("pad", lambda h: h + nn.functional.pad(TABLE[:2], (0, 0, 0, len(h) - 2))),
    "gathered": ("gather", lambda h: by_number(h, "gather")),
    "scattered": ("scatter_add", lambda h: by_number(h, "scatter_add", h)),
    "index_select by the first item": ("index_select", lambda h: h.index_select(0, h.argmax(1))),
    "index_add": ("index_add", lambda h: h.index_add(0, h.argmax(1), h)),
    "looked up in the batch": ("embedding", lambda h: nn.functional.embedding(h.argmax(1), h)),
    "their number in a tensor": ("new_full", lambda h: h * h.new_full((), len(h))),
    "their number as a bound": ("clamp", lambda h: h * torch.clamp(TABLE[0], max=len(h))),
    "flipped numbers": ("__getitem__", lambda h: h[torch.arange(len(h)).flip(0)]),
    "halved numbers": ("__getitem__", lambda h: h[torch.arange(len(h)) // 2]),
    "every second number": ("__getitem__", lambda h: h[torch.arange(0, 2 * len(h), 2) // 2]),
    "other kinds of numbers": (
        "view",
        lambda h: h[torch.arange(len(h), dtype=torch.int64)[:, None].view(torch.int32)].sum(1),
    ),
    "a mesh that is stacked": (
        "stack",
        lambda h: h + torch.stack(torch.meshgrid(torch.arange(len(h)), torch.arange(WIDTH), indexing="ij")).sum(0),
    ),
    "gathered by their own numbers": ("gather", lambda h: h.gather(0, torch.arange(len(h))[:, None].expand(-1, WIDTH))),
    "added": ("add", lambda h: h + torch.arange(len(h))[:, None]),
    "indexed and added": ("add", lambda h: (n := torch.arange(len(h)))[:, None] + h[n]),
    "looked up in a table": ("__getitem__", lambda h: h + torch.ones(100, WIDTH)[torch.arange(len(h))]),
    "one row further": ("__getitem__", lambda h: h[torch.arange(len(h)) - 1]),
    "from one on": ("__getitem__", lambda h: torch.cat([h[1:], h[:1]])),
    "of a flattened batch": ("__getitem__", lambda h: h * h.flatten()[torch.arange(len(h)) * WIDTH][:, None]),
    "reshaped to other places": (
        "view",
        lambda h: h[torch.arange(len(h))[:, None].expand(-1, 2).reshape(2, -1)[0]].view(-1, 6),
    ),
    "sorted": ("__getitem__", lambda h: h[h[:, 0].argsort()]),
    "halves": ("cat", halves),
    "every second": ("stack", lambda h: torch.stack([h[::2], h[1::2]], 1).view(-1, WIDTH)),
    "counted": ("cumsum", lambda h: h * torch.ones(len(h)).cumsum(0)[:, None]),
    "a flag of the first": ("cat", lambda h: h * torch.cat([torch.zeros(1), torch.ones(len(h) - 1)])[:, None]),
    "what all have in common": ("any", lambda h: h * (h > 0).any(0)),
    "divided by their number": ("div", lambda h: h / len(h)),
    "times their reciprocal number": ("mul", lambda h: h * (1 / len(h))),
}


@pytest.mark.parametrize(("call", "calls"), OTHER_NUMBERS.values(), ids=OTHER_NUMBERS)
def test_what_depends_on_the_place_in_the_batch_sees_all_of_it(call: str, calls: Callable[[Tensor], Tensor]) -> None:
    tail = tail_of(calls)
    assert {"last", call} <= tail


def test_a_row_set_by_its_number_is_not_one_of_each_microbatch() -> None:
    with pytest.raises(NotDivisible, match="modified for the whole batch"):
        tail_of(first_row)


def test_numbers_of_rows_are_not_joined() -> None:
    """The tail makes them for the batch; those of the microbatches, one after the other, would begin anew with each."""

    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h, rows = self.linear(x), torch.arange(len(x))
            return h[rows], (h - h.mean(0))[rows].sum()

    traced = trace(Picks(), batch(8), opened=())
    division = divide(traced)
    numbers = [node for node in traced.graph.nodes if target_name(node) == "arange"]
    assert sorted(node in division.tail for node in numbers) == [False, True]
    for node in numbers:
        assert {user in division.tail for user in node.users} == {node in division.tail}


class Table(nn.Module):
    """An embedding of positions, whatever stands there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        positions = self.weight[: x.shape[1]]
        return positions.to(x.dtype), x.mean() * positions


class Positions(nn.Module):
    def __init__(self, entry: int) -> None:
        super().__init__()
        self.table, self.linear = Table(), nn.Linear(WIDTH, WIDTH)
        self._entry = entry

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, None] + self.table(x)[self._entry])


@pytest.mark.parametrize(("entry", "tail"), [(0, set()), (1, {"table", "getitem", "add", "linear"})])
def test_what_looks_at_shapes_only_does_not_see_the_batch(entry: int, tail: set[str]) -> None:
    traced = trace(Positions(entry), batch(8), opened=())
    assert {target_name(node) for node in divide(traced).tail} == tail


def test_asking_what_a_module_looks_at_leaves_it_as_it_was() -> None:
    class Counts(Table):
        num_calls = 0

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.num_calls += 1
            return super().forward(x)

    model = Positions(0)
    model.table = Counts()
    traced = trace(model, batch(8), opened=())
    assert {target_name(node) for node in divide(traced).tail} >= {"table", "linear"}  # what it counts is out of sight
    assert model.table.num_calls == 0
    assert type(model.table.weight) is nn.Parameter
    assert model.table.weight.sum() == 9 * WIDTH


class Routes(nn.Module):
    """A loss that takes what a layer gives for each token of a flattened batch, as that of a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = Router(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, logits = self.router(x)
        return self.head(h).mean() + logits.mean(0).std()


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.linear(x.view(-1, WIDTH))


def test_several_entries_for_each_row_may_be_joined() -> None:
    traced = trace(Routes(), torch.randn(4, 5, WIDTH), opened=())
    division = divide(traced)
    assert {target_name(node) for node in division.tail} == {"mean", "std", "add"}
    results = [node for node in traced.graph.nodes if node not in division.tail and any(u in division.tail for u in node.users)]
    assert [(joined_dim(node, division), has_several_entries(node, division)) for node in results] == [(0, True), (0, False)]


class WritesAfterwards(TwoLayers):
    """What the stages have a view of is changed by a mean over the batch."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.first(x))
        result = self.last(h)
        h.mul_(result.mean())
        return result, h


def test_memory_that_the_tail_changes_and_stages_have_is_refused() -> None:
    with pytest.raises(NotDivisible, match="shares memory with a tensor that is modified for the whole batch"):
        divide(trace(WritesAfterwards(), batch()))


def test_code_for_one_batch_size_is_not_divided() -> None:
    def fixed(h: Tensor) -> Tensor:
        return h if len(h) == 4 else -h

    with pytest.raises(NotDivisible, match="specialised to one batch size"):
        divide(trace(Between(fixed), batch(4)))
