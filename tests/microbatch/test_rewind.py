"""The generators go back to one state again and again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from lightning_fxpipe import rng
from lightning_fxpipe.microbatch.rewind import Rewind


def draw() -> tuple[float, float, float]:
    return random.random(), float(torch.rand(())), float(numpy.random.rand())


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(1),
    "python": random.random,
    "numpy": numpy.random.rand,
    "numpy, a normal number": numpy.random.randn,
    "numpy, seeded": lambda: numpy.random.seed(987654321),
}


@pytest.mark.parametrize("draw_one", DRAWS.values(), ids=DRAWS)
def test_a_rewind_sees_each_draw_and_takes_it_back(draw_one: Callable[[], Any]) -> None:
    with rng.isolated_rng():
        rewind = Rewind(rng.rng_state())
        rewind.rewind()
        expected = draw()
        for _ in range(3):  # from the second time on it works on numpy's memory
            rewind.rewind()
            assert not rewind.have_drawn()
            draw_one()
            assert rewind.have_drawn()
            rewind.rewind()
            assert draw() == expected


def test_a_rewind_leaves_no_normal_number_waiting() -> None:
    """numpy draws normal numbers in pairs; the second waits beside the generator's memory."""
    with rng.isolated_rng():
        rewind = Rewind(rng.rng_state())
        rewind.rewind()
        expected = [numpy.random.randn() for _ in range(3)]
        rewind.rewind()
        assert [numpy.random.randn() for _ in range(3)] == expected


def test_a_rewind_to_a_normal_number_that_waits() -> None:
    """To draw it leaves the generator's memory as it is."""
    with rng.isolated_rng():
        numpy.random.randn()
        rewind = Rewind(rng.rng_state())
        for _ in range(2):
            rewind.rewind()
            first = numpy.random.randn()
            assert rewind.have_drawn()
            rewind.rewind()
            assert numpy.random.randn() == first


def test_a_rewind_of_another_generator_than_numpys_usual_one() -> None:
    usual = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(3))
    try:
        rewind = Rewind(rng.rng_state())
        for _ in range(2):
            rewind.rewind()
            assert not rewind.have_drawn()
            first = numpy.random.rand()
            assert rewind.have_drawn()
            rewind.rewind()
            assert numpy.random.rand() == first
    finally:
        numpy.random.set_bit_generator(usual)


def test_a_rewind_knows_whether_it_is_at_a_state() -> None:
    with rng.isolated_rng():
        rewind = Rewind(rng.rng_state())
        assert rewind.is_at(rng.rng_state())
        random.random()
        assert not rewind.is_at(rng.rng_state())
