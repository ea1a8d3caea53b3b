"""States of the default random generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from lightning_fxpipe import rng


def test_python_rng_sees_draws_of_python_and_numpy_but_not_of_torch() -> None:
    before = rng.python_rng()
    torch.rand(3)
    assert rng.python_rng() == before
    random.random()
    between = rng.python_rng()
    assert between != before
    numpy.random.rand()
    assert rng.python_rng() != between


def draw() -> tuple[float, float, float]:
    return random.random(), float(torch.rand(())), float(numpy.random.rand())


def test_isolated_rng_restores_all_generators_also_after_an_exception() -> None:
    def fail() -> None:
        with rng.isolated_rng():
            draw()
            torch.manual_seed(1)
            raise KeyError

    state = rng.rng_state()
    expected = draw()
    rng.set_rng_state(state)
    with pytest.raises(KeyError):
        fail()
    assert draw() == expected


@pytest.mark.parametrize("advance", [lambda: torch.rand(1), random.random, numpy.random.rand], ids=["torch", "python", "numpy"])
def test_states_are_the_same_until_one_generator_has_drawn(advance: Callable[[], Any]) -> None:
    with rng.isolated_rng():
        before = rng.rng_state()
        assert rng.same_rng(before, rng.rng_state())
        advance()
        assert not rng.same_rng(before, rng.rng_state())
        rng.set_rng_state(before)
        assert rng.same_rng(before, rng.rng_state())


def test_states_differ_in_a_single_word_of_many() -> None:
    """Printed, numpy's 624 words are shortened to the first and last few."""
    state = rng.rng_state()
    name, words, *rest = state["numpy"]
    changed = words.copy()
    changed[300] ^= 1
    assert not rng.same_rng(state, state | {"numpy": (name, changed, *rest)})
    assert rng.same_rng(state, state | {"numpy": (name, words.copy(), *rest)})


def test_a_device_whose_generator_has_moved_is_seen() -> None:
    # Dropout in the stages moves the device's generator on the last rank alone, so the others must be told.
    state = rng.rng_state()
    there, moved = {"cuda": torch.zeros(4)}, {"cuda": torch.ones(4)}
    assert rng.same_rng(state | there, state | there)
    assert not rng.same_rng(state | there, state | moved)


@pytest.mark.parametrize("advance", [random.random, numpy.random.rand], ids=["python", "numpy"])
def test_python_rng_changes_when_python_or_numpy_draw_and_not_with_torch(advance: Callable[[], Any]) -> None:
    with rng.isolated_rng():
        before = rng.python_rng()
        torch.rand(1)
        assert rng.python_rng() == before
        advance()
        assert rng.python_rng() != before


def test_states_of_another_generator_than_numpys_usual_one() -> None:
    usual = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(3))
    try:
        state = rng.rng_state()
        assert rng.same_rng(state, rng.rng_state())
        numpy.random.rand()
        assert not rng.same_rng(state, rng.rng_state())
        rng.set_rng_state(state)
        assert rng.same_rng(state, rng.rng_state())
    finally:
        numpy.random.set_bit_generator(usual)


def test_the_device_s_generator_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_rng_state", given.append)
    of_device = torch.arange(4)
    rng.set_rng_state(rng.rng_state() | {"cuda": of_device})
    assert given == [of_device]


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(1),
    "python": random.random,
    "numpy": numpy.random.rand,
    "numpy, a normal number": numpy.random.randn,
    "numpy, seeded": lambda: numpy.random.seed(987654321),
}


@pytest.mark.parametrize("draw_one", DRAWS.values(), ids=DRAWS)
def test_each_draw_is_seen_and_taken_back(draw_one: Callable[[], Any]) -> None:
    with rng.isolated_rng():
        start = rng.rng_state()
        rng.set_rng_state(start)
        expected = draw()
        for _ in range(3):  # numpy's memory is known from the second time on
            rng.set_rng_state(start)
            assert rng.same_rng(start, rng.rng_state())
            draw_one()
            assert not rng.same_rng(start, rng.rng_state())
            rng.set_rng_state(start)
            assert draw() == expected


def test_no_normal_number_is_left_waiting() -> None:
    """numpy draws normal numbers in pairs; the second waits beside the generator's memory."""
    with rng.isolated_rng():
        start = rng.rng_state()
        rng.set_rng_state(start)
        expected = [numpy.random.randn() for _ in range(3)]
        rng.set_rng_state(start)
        assert [numpy.random.randn() for _ in range(3)] == expected


def test_a_normal_number_that_waits_comes_back() -> None:
    """To draw it leaves the generator's memory as it is."""
    with rng.isolated_rng():
        numpy.random.randn()
        start = rng.rng_state()
        for _ in range(2):
            rng.set_rng_state(start)
            first = numpy.random.randn()
            assert not rng.same_rng(start, rng.rng_state())
            rng.set_rng_state(start)
            assert numpy.random.randn() == first


def test_another_generator_than_numpys_usual_one() -> None:
    usual = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(3))
    try:
        start = rng.rng_state()
        for _ in range(2):
            rng.set_rng_state(start)
            assert rng.same_rng(start, rng.rng_state())
            first = numpy.random.rand()
            assert not rng.same_rng(start, rng.rng_state())
            rng.set_rng_state(start)
            assert numpy.random.rand() == first
    finally:
        numpy.random.set_bit_generator(usual)


def test_states_of_numpy_are_those_that_numpy_gives() -> None:
    with rng.isolated_rng():
        for advance in (
            lambda: numpy.random.seed(5),
            numpy.random.rand,
            numpy.random.randn,
            numpy.random.randn,
            numpy.random.rand,
        ):
            advance()
            for _ in range(2):
                name, words, *rest = rng.rng_state()["numpy"]
                expected_name, expected_words, *expected_rest = numpy.random.get_state()
                assert (name, rest) == (expected_name, expected_rest)
                assert (words == expected_words).all()


def test_a_waiting_normal_number_is_seen_again_where_it_was_put_back() -> None:
    """The generator's memory is the same with it and without it."""
    with rng.isolated_rng():
        numpy.random.randn()
        waiting = rng.rng_state()
        numpy.random.randn()
        assert rng.rng_state()["numpy"][3] == 0
        rng.set_rng_state(waiting)
        assert rng.rng_state()["numpy"][3] == 1
