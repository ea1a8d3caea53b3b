"""Random numbers of the stages: reproducible from their key, different for different keys, and invisible outside."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_fxpipe.microbatch.draws import (
    BatchDraws,
    continued_random_numbers,
    generator_state,
    seed_generators,
    set_generator_state,
)
from lightning_fxpipe.rng import isolated_rng, rng_state, same_rng, set_rng_state
from lightning_fxpipe.runtime.replay import watched_step

# What blake2b gives for the key (42, "training_step", 10, 3, 1).
FROZEN_SEED = 1282889949952987779


def draw() -> tuple[list[float], list[float], list[float]]:
    """A few numbers from each default generator: torch's, Python's and numpy's."""
    return torch.rand(3).tolist(), [random.random() for _ in range(3)], numpy.random.rand(3).tolist()


def drawn_under(*key: int | str) -> tuple[list[float], list[float], list[float]]:
    with isolated_rng():
        seed_generators(*key)
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
        ((5, "training_step", 0, 1, 0), (5, "training_step", 0, 1, 1)),
        ((5, "training_step", 0, 1, 0), (5, "training_step", 0, 0, 0)),
        ((1, 23), (12, 3)),
        ((1, 2), ("1", "2")),
        ((1,), (1, 0)),
    ],
    ids=["seed", "step", "microbatch and stage swapped", "stage", "microbatch", "digits", "type", "length"],
)
def test_similar_keys_draw_different_numbers(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert drawn_under(*one)[0] != drawn_under(*other)[0]


@given(keys=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(0, 20)), min_size=2, max_size=6))
def test_no_two_keys_give_the_same_seed(keys: set[tuple[int, int, int]]) -> None:
    seeds = set()
    for key in keys:
        seed_generators(*key)
        seeds.add(torch.initial_seed())
    assert len(seeds) == len(keys)


def test_the_seed_of_a_key_is_the_same_in_every_process_and_release() -> None:
    """A resumed run is another process, maybe after an update: ``hash()`` would give it other numbers."""
    seed_generators(42, "training_step", 10, 3, 1)
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
        with continued_random_numbers(None, torch.device("cpu")):
            draw()
            raise KeyError

    seed_everything(4)
    expected = draw()
    seed_everything(4)
    with pytest.raises(KeyError):
        fail()
    assert draw() == expected


def test_dropout_repeats_under_its_key() -> None:
    dropout, x = nn.Dropout(0.5), torch.ones(64)
    seed_generators(0, 0)
    first = dropout(x)
    seed_generators(0, 1)
    other = dropout(x)
    seed_generators(0, 0)
    again = dropout(x)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert not torch.equal(other, first)


# --------------------------------------------------------------------------------------------- draws for a whole batch

BATCH_SIZE = 12

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(len(x), 3),
    "rand sizes": lambda x: torch.rand((len(x), 2), dtype=torch.float64),
    "randn": lambda x: torch.randn(x.shape[0], 5),
    "randn size": lambda x: torch.randn(size=(x.shape[0],)),
    "randint": lambda x: torch.randint(0, 100, (len(x),)),
    "randint high": lambda x: torch.randint(50, size=(len(x), 4)),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 3, 90),
    "normal": lambda x: torch.normal(2.0, 0.5, (len(x), 3)),
    "normal of tensors": lambda x: torch.normal(x, x.abs() + 1),
    "normal of a tensor": lambda x: torch.normal(x, 0.5),
    "normal by keywords": lambda x: torch.normal(mean=x, std=x.abs() + 1),
    "normal of a deviation": lambda x: torch.normal(0.0, x.abs() + 1),
    "normal_": lambda x: torch.empty_like(x).normal_(1.0, 2.0),
    "uniform_": lambda x: x.new_empty(len(x), 7).uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "bernoulli of tensors": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli of a number": lambda x: torch.bernoulli(x, 0.3) if len(x) == BATCH_SIZE else torch.bernoulli(x, p=0.3),
    "coin flips": lambda x: torch.distributions.Bernoulli(logits=x).sample(),
    "distribution": lambda x: torch.distributions.Normal(x, 2.0).sample(),
    "of no sample": lambda x: torch.rand(()),
    "of other size": lambda x: torch.randn(7, 2),
    "beta": lambda x: torch.distributions.Beta(1.0, 1.0).sample(),
    "normal of other size": lambda x: torch.normal(torch.full((7,), 2.0), 4.0),
    "bernoulli of other size": lambda x: torch.bernoulli(torch.full((7,), 0.5)),
}


def whole_batch() -> Tensor:
    return torch.randn(BATCH_SIZE, 3, generator=torch.Generator().manual_seed(1))


def in_microbatches(draw: Callable[[Tensor], Any], sizes: list[int]) -> list[Any]:
    """What each microbatch gets of a draw; the generators go on as after the first, which draws for all."""
    draws, before = BatchDraws(sum(sizes)), rng_state()
    parts, start = [], 0
    for index, size in enumerate(sizes):
        draws.begin_microbatch(start, size)
        with isolated_rng() if index else nullcontext(), watched_step(nn.Identity(), draws):
            if index:
                set_rng_state(before)
            parts.append(draw(whole_batch()[start : start + size]))
        start += size
    return parts


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("sizes", [[12], [4, 4, 4], [6, 6], [5, 5, 2]], ids=str)
def test_microbatches_share_the_draw_of_one_device(name: str, sizes: list[int]) -> None:
    def draw(x: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.randn_like(x)  # draws before and after must not move it
        drawn = DRAWS[name](x)
        return drawn, torch.rand(len(x)) + first[:, 0]

    seed_everything(5)
    expected, after = draw(whole_batch())
    state = torch.get_rng_state()
    seed_everything(5)
    parts = in_microbatches(draw, sizes)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.cat([part[1] for part in parts]), after)
    if name in ("of no sample", "of other size", "beta", "normal of other size", "bernoulli of other size"):
        for part, _ in parts:
            assert torch.equal(part, expected)
    else:
        assert torch.equal(torch.cat([part for part, _ in parts]), expected)


def test_python_and_numpy_give_each_microbatch_the_same_numbers() -> None:
    def draw(x: Tensor) -> tuple[float, float]:
        return random.random(), float(numpy.random.beta(1.0, 1.0))

    seed_everything(3)
    expected, following = draw(whole_batch()), draw(whole_batch())
    seed_everything(3)
    assert in_microbatches(draw, [4, 4, 4]) == [expected] * 3
    assert draw(whole_batch()) == following


def test_a_permutation_is_one_of_the_microbatch() -> None:
    parts = in_microbatches(lambda x: torch.randperm(len(x)), [4, 4, 4])
    assert [sorted(part.tolist()) for part in parts] == [[0, 1, 2, 3]] * 3


def test_each_generator_is_used_once_for_the_batch() -> None:
    def drawn(sizes: list[int]) -> Tensor:
        generator = torch.Generator().manual_seed(8)
        return torch.cat(in_microbatches(lambda x: torch.rand(len(x), generator=generator), sizes))

    assert torch.equal(drawn([3, 3, 3, 3]), drawn([12]))


def draw_from_all() -> list[float]:
    """Draws from each generator; normal numbers, of which generators make two at once, in an odd number."""
    numbers = [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), numpy.random.randn()]
    return [*map(float, numbers), numpy.random.randn(), random.gauss(0, 1), *torch.rand(2).tolist()]


def test_generator_state_goes_on_where_another_stopped() -> None:
    device = torch.device("cpu")
    seed_everything(1)
    draw_from_all()
    state = generator_state(device)
    expected = draw_from_all()
    seed_everything(2)
    before = rng_state()
    with continued_random_numbers(state, device):
        assert draw_from_all() == expected
    assert same_rng(before, rng_state())
    set_generator_state(state, device)
    assert draw_from_all() == expected


def test_another_generator_of_numpys_keeps_its_state() -> None:
    usual = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(3))
    try:
        state = generator_state(torch.device("cpu"))
        expected = random.random()
        before = numpy.random.get_state(legacy=False)
        set_generator_state(state, torch.device("cpu"))
        assert random.random() == expected
        assert numpy.random.get_state(legacy=False) == before
    finally:
        numpy.random.set_bit_generator(usual)


@pytest.mark.parametrize(("num_samples", "replacement"), [(1, True), (1, False), (3, False)])
def test_samples_of_a_microbatch_are_those_of_the_batch(num_samples: int, replacement: bool) -> None:
    weights = torch.rand(6, 5) + 0.1
    torch.manual_seed(3)
    expected = torch.multinomial(weights, num_samples, replacement)
    torch.manual_seed(3)
    draws = BatchDraws(6)
    found = []
    for start in (0, 2, 4):
        draws.begin_microbatch(start, 2)
        found.append(draws.call(torch.multinomial, (weights[start : start + 2], num_samples, replacement), {}))
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=0)
    assert draws.own == set()


def test_draws_that_cannot_be_those_of_the_batch_are_named() -> None:
    draws = BatchDraws(6)
    draws.begin_microbatch(0, 2)
    draws.call(torch.multinomial, (torch.ones(2, 5), 3, True), {})
    draws.call(torch.randperm, (2,), {})
    assert draws.own == {"multinomial", "randperm"}


def test_a_part_that_is_changed_in_place_does_not_change_the_draw() -> None:
    """A draw without a batch dimension is the same for all microbatches, whatever one of them makes of its own."""
    draws = BatchDraws(6)
    draws.begin_microbatch(0, 2)
    first = draws.call(torch.randn, (3,), {})
    before = first.clone()
    first.zero_()
    draws.begin_microbatch(2, 2)
    assert torch.equal(draws.call(torch.randn, (3,), {}), before)
