"""Spellings of a name, and the nearest name to a wrong one."""

from __future__ import annotations

import pytest

from lightning_fxpipe.reporting.names import canonical_name, suggestion

NAMES = ("1f1b", "zero_bubble", "zero_bubble_v")


@pytest.mark.parametrize("text", ["zero_bubble_v", "ZeroBubbleV", "zero-bubble-V"])
def test_case_underscores_and_hyphens_do_not_count(text: str) -> None:
    assert canonical_name(text, NAMES) == "zero_bubble_v"


@pytest.mark.parametrize("text", ["zero_bubbles", "", "2f1b"])
def test_another_name_is_none(text: str) -> None:
    assert canonical_name(text, NAMES) is None


@pytest.mark.parametrize(
    ("text", "words"), [("2F1B", "; did you mean '1f1b'?"), ("ZeroBubles", "; did you mean 'zero_bubble'?"), ("gpipe", "")]
)
def test_the_nearest_name_is_suggested_if_one_is_near(text: str, words: str) -> None:
    assert suggestion(text, NAMES) == words
