"""Random numbers of the stages: reproducible from their key, different for different keys, and invisible outside."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_fxpipe.randomness import own_random_numbers

# What blake2b gives for the key (42, "training_step", 10, 3, 1).
FROZEN_SEED = 1282889949952987779


def draw() -> tuple[list[float], list[float], list[float]]:
    """A few numbers from each default generator: torch's, Python's and numpy's."""
    return torch.rand(3).tolist(), [random.random() for _ in range(3)], numpy.random.rand(3).tolist()


def drawn_under(*key: int | str) -> tuple[list[float], list[float], list[float]]:
    with own_random_numbers(*key):
        return draw()


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def test_numbers_follow_from_the_key_and_nothing_else() -> None:
    seed_everything(0)
    first = drawn_under(3, "training_step", 7, 0, 1)
    seed_everything(1)
    draw()
    assert drawn_under(3, "training_step", 7, 0, 1) == first


def test_each_generator_draws_other_numbers_under_another_key() -> None:
    for one, other in zip(drawn_under(0, "a", 1), drawn_under(0, "a", 2), strict=True):
        assert one != other


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((5, "training_step", 0, 0, 0), (6, "training_step", 0, 0, 0)),
        ((5, "training_step", 0, 0, 0), (5, "validation_step", 0, 0, 0)),
        ((5, "training_step", 0, 1, 0), (5, "training_step", 0, 0, 1)),
        ((1, 23), (12, 3)),
        ((1, 2), ("1", "2")),
        ((1,), (1, 0)),
    ],
    ids=["seed", "step", "microbatch and stage swapped", "digits", "type", "length"],
)
def test_similar_keys_draw_different_numbers(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert drawn_under(*one)[0] != drawn_under(*other)[0]


@given(keys=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(0, 20)), min_size=2, max_size=6))
def test_no_two_keys_give_the_same_seed(keys: set[tuple[int, int, int]]) -> None:
    seeds = set()
    for key in keys:
        with own_random_numbers(*key):
            seeds.add(torch.initial_seed())
    assert len(seeds) == len(keys)


def test_the_seed_of_a_key_is_the_same_in_every_process_and_release() -> None:
    """A resumed run is another process, maybe after an update: ``hash()`` would give it other numbers."""
    with own_random_numbers(42, "training_step", 10, 3, 1):
        assert torch.initial_seed() == FROZEN_SEED


def test_generators_continue_where_they_were() -> None:
    seed_everything(4)
    expected = [draw(), draw()]
    seed_everything(4)
    first = draw()
    drawn_under(1)
    assert [first, draw()] == expected


def test_generators_continue_where_they_were_after_an_exception() -> None:
    def fail() -> None:
        with own_random_numbers(1):
            draw()
            raise KeyError

    seed_everything(4)
    expected = draw()
    seed_everything(4)
    with pytest.raises(KeyError):
        fail()
    assert draw() == expected


def test_blocks_nest() -> None:
    with own_random_numbers("outer"):
        expected = [draw(), draw()]
    with own_random_numbers("outer"):
        first = draw()
        drawn_under("inner")
        assert [first, draw()] == expected


def test_dropout_repeats_under_its_key() -> None:
    dropout, x = nn.Dropout(0.5), torch.ones(64)
    with own_random_numbers(0, 0):
        first = dropout(x)
    with own_random_numbers(0, 1):
        other = dropout(x)
    with own_random_numbers(0, 0):
        again = dropout(x)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert not torch.equal(other, first)
