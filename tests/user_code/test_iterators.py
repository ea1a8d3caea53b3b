"""Iterators that user code keeps: what a dry run draws from them comes again, once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.user_code.iterators import Rewindable, StepIterators, is_iterator
from lightning_fxpipe.user_code.undo import undo_after


def numbers() -> Iterator[int]:
    yield from range(9)


def random_numbers() -> Iterator[float]:
    while True:
        yield torch.rand(()).item()


ITERATORS: dict[str, Callable[[], Any]] = {
    "count": itertools.count,
    "cycle": lambda: itertools.cycle([3, 4]),
    "list": lambda: iter([5, 6, 7, 8]),
    "dict": lambda: iter({"a": 1, "b": 2, "c": 3}),
    "generator": numbers,
    "enumerate": lambda: enumerate("abcdef"),
    "zip": lambda: zip("abc", "def", strict=True),
    "map": lambda: map(str, range(5)),
    "chain": lambda: itertools.chain([1], [2, 3]),
    "loader": lambda: iter(DataLoader(TensorDataset(torch.arange(8)), batch_size=2)),
}


class Holder(nn.Module):
    def __init__(self, made: Any) -> None:
        super().__init__()
        self.items = made
        self.inside = {"list": [made]}


@pytest.mark.parametrize("name", ITERATORS)
def test_what_is_drawn_in_a_dry_run_comes_again(name: str) -> None:
    expected = [str(item) for item, _ in zip(ITERATORS[name](), range(3), strict=False)]
    holder = Holder(ITERATORS[name]())
    assert is_iterator(holder.items)
    for _ in range(2):
        with undo_after(holder) as undoing:
            drawn = [str(next(holder.items)), str(next(holder.inside["list"][0]))]
            assert undoing.before.is_drawn_from()
        assert drawn == expected[:2]
    assert holder.items is holder.inside["list"][0]
    assert [str(next(holder.items)) for _ in expected] == expected


def test_an_iterator_that_has_ended_ends_again_and_one_put_in_its_place_is_forgotten() -> None:
    holder = Holder(iter([1]))
    with undo_after(holder):
        assert list(holder.items) == [1]
        holder.items = iter([2])
    assert list(holder.items) == [1]


def test_items_are_kept_only_while_a_dry_run_may_want_them_back() -> None:
    rewindable = Rewindable(itertools.count())
    mark = rewindable.mark()
    assert [next(rewindable) for _ in range(3)] == [0, 1, 2]
    assert len(rewindable._kept) == 3
    rewindable.go_to(mark.position)
    del mark
    assert [next(rewindable) for _ in range(4)] == [0, 1, 2, 3]
    assert not rewindable._kept


def test_another_ranks_place_is_reached_by_drawing() -> None:
    rewindable = Rewindable(iter("abcd"))
    rewindable.go_to(2)
    assert next(rewindable) == "c"


def test_random_items_are_drawn_once() -> None:
    torch.manual_seed(1)
    expected = [torch.rand(()).item() for _ in range(3)]
    torch.manual_seed(1)
    holder = Holder(random_numbers())
    with undo_after(holder):
        next(holder.items)
    assert [next(holder.items), torch.rand(()).item(), next(holder.items)] == expected


def test_random_items_of_another_state_are_refused() -> None:
    holder = Holder(random_numbers())
    with undo_after(holder):
        next(holder.items)
    torch.manual_seed(8)
    with pytest.raises(UnsupportedError, match="draws from an iterator whose items depend on random numbers") as caught:
        next(holder.items)
    assert "generator=torch.Generator()" in str(caught.value)


def test_the_methods_of_the_iterator_are_there() -> None:
    def echo() -> Any:
        heard = None
        while True:
            heard = yield heard

    rewindable: Any = Rewindable(echo())
    next(rewindable)
    assert rewindable.send(4) == 4
    assert len(Rewindable(iter(DataLoader(TensorDataset(torch.arange(8)), batch_size=2)))) == 4


class Refilling(nn.Module):
    """Draws items of three batches, of which the next begins where the last has ended."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2, **options)
        self.items: Any = None

    def step(self) -> Any:
        try:
            return next(self.items)[0]
        except (TypeError, StopIteration):
            self.items = iter(self.loader)
            return next(self.items)[0]


REFILLED: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "own generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(2)},
}


@pytest.mark.parametrize("name", REFILLED)
def test_an_iterator_that_a_step_makes_is_one_for_all_its_runs_on_a_batch(name: str) -> None:
    torch.manual_seed(3)
    alone = Refilling(**REFILLED[name]())
    expected = [(alone.step().tolist(), torch.rand(()).item()) for _ in range(8)]
    torch.manual_seed(3)
    tried, iterators = Refilling(**REFILLED[name]()), StepIterators()
    found = []
    for _ in range(8):
        iterators.forget()
        seen = []
        for _ in range(2):
            with undo_after(tried) as undoing, iterators.one_run(undoing.before):
                seen.append(tried.step())
        with iterators.one_run():
            item = tried.step()
        assert all(each is item for each in seen)
        found.append((item.tolist(), torch.rand(()).item()))
    assert found == expected


def test_another_rank_finds_the_iterator_that_the_step_has_made_by_its_number() -> None:
    torch.manual_seed(3)
    mine, others = StepIterators(), StepIterators()
    here, there = Refilling(), Refilling()
    with mine.one_run():
        here.step(), here.step()
    with others.one_run():
        there.step()
    place = mine.place_of(here.items)
    assert place == (0, 2)
    assert mine.place_of(there.items) is None
    assert others.at(place) is there.items
    assert there.step().tolist() == here.step().tolist() == [4, 5]


def test_what_makes_an_item_changes_stays_changed() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_made, self.generator = 0, torch.Generator().manual_seed(1)
            self.items = self.made()

        def made(self) -> Iterator[float]:
            while True:
                self.num_made += 1
                yield torch.rand((), generator=self.generator).item()

    alone, tried = Counting(), Counting()
    expected = [next(alone.items) for _ in range(3)]
    found = []
    for _ in range(3):
        with undo_after(tried):
            next(tried.items)
        found.append(next(tried.items))
    assert (found, tried.num_made) == (expected, 3)
