"""Sets of numbers travel with a command as bits of numbers that a float represents exactly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_fxpipe.distributed.commands import MAX_NUMBERS, as_bits, from_bits


@given(st.sets(st.integers(0, 48 * (MAX_NUMBERS - 1) - 1)))
def test_a_set_arrives_as_it_was_sent(numbers: set[int]) -> None:
    words = as_bits(numbers)
    assert len(words) < MAX_NUMBERS
    assert from_bits([float(word) for word in words]) == numbers
