"""Text tables and the human forms of counts and bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fxpipe.reporting.table import human_bytes, human_count, human_seconds, render_table

HEADERS = ("Name", "Count")


def lines(text: str) -> list[str]:
    return text.splitlines()


def test_table_is_exactly_this() -> None:
    table = render_table("Title", HEADERS, [("a", "1"), ("bcd", "1000")], right_aligned=("Count",), caption="Below")
    assert lines(table) == [
        "Title",
        " Name   Count",
        "──────────────",
        " a          1",
        " bcd     1000",
        "Below",
    ]


def test_columns_not_listed_as_right_aligned_are_left_aligned() -> None:
    table = render_table("T", HEADERS, [("a", "1")])
    assert lines(table)[3] == " a      1"


def test_square_brackets_are_text_not_markup() -> None:
    table = render_table("[bold]T", HEADERS, [("layers[0]", "[1]")], caption="[red]c :smile:")
    for text in ("[bold]T", "layers[0]", "[1]", "[red]c :smile:"):
        assert text in table


def test_terminal_settings_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ranks, log files and tests must print the same characters.
    def draw() -> str:
        return render_table("T", HEADERS, [("x" * 70, "1"), ("y y " * 30, "2")], caption="c " * 90)

    before = draw()
    for name, value in {"COLUMNS": "40", "FORCE_COLOR": "1", "TERM": "dumb", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    assert draw() == before
    assert "\x1b" not in before


def test_long_cell_is_folded_and_nothing_is_lost() -> None:
    cell = "".join(f"layer{i}." for i in range(60))
    table = render_table("T", HEADERS, [(cell, "123456789")], right_aligned=("Count",))
    assert max(map(len, lines(table))) <= 80
    rows = lines(table)[3:]
    assert "".join(row.split()[0] for row in rows if row.strip()) == cell
    assert "123456789" in rows[0]


def test_a_line_is_broken_between_words_and_not_inside_a_number() -> None:
    cell = ", ".join(f"option{index}=0.001" for index in range(9))
    table = render_table("T", HEADERS, [(cell, "1")], right_aligned=("Count",))
    assert len(lines(table)) > 4
    assert table.count("=0.001") == 9


def test_numbers_are_never_cut_off() -> None:
    numbers = [f"{index}" * 9 for index in range(1, 10)]
    table = render_table("T", ("Name", *numbers), [("a", *numbers)], right_aligned=numbers)
    assert all(table.count(number) == 2 for number in numbers)


def test_long_caption_keeps_every_word() -> None:
    words = [f"word{i}" for i in range(60)]
    table = render_table("T", HEADERS, [("a", "1")], caption=" ".join(words) + "\nlast line")
    assert table.split()[-62:] == [*words, "last", "line"]


def test_no_line_ends_with_a_space() -> None:
    table = render_table("T", HEADERS, [("a", "1"), ("", "")], caption="c")
    assert all(line == line.rstrip() for line in lines(table))


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (10 * 1024**2, "10.0 MiB"),
        (3 * 1024**3 + 512 * 1024**2, "3.5 GiB"),
        (2 * 1024**4, "2.0 TiB"),
        (5000 * 1024**4, "5000.0 TiB"),
    ],
)
def test_human_bytes(num_bytes: int, text: str) -> None:
    assert human_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1 K"),
        (1536, "1.54 K"),
        (11_689_512, "11.7 M"),
        (123_400_000, "123 M"),
        (7_000_000_000, "7 B"),
        # Rounding up must reach the next unit, not turn into an exponent.
        (999_499, "999 K"),
        (999_999, "1 M"),
        (999_999_999, "1 B"),
        # The largest unit goes on counting.
        (1_600_000_000_000, "1600 B"),
    ],
)
def test_human_count(count: int, text: str) -> None:
    assert human_count(count) == text


UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}


@given(st.integers(0, 1024**5))
def test_human_bytes_is_within_five_percent_and_below_the_next_unit(num_bytes: int) -> None:
    number, unit = human_bytes(num_bytes).split()
    # One decimal: half a tenth of at least one unit.
    assert abs(float(number) * UNITS[unit] - num_bytes) <= 0.05 * UNITS[unit] + 0.5
    assert float(number) < 1024 or unit == "TiB"


@given(st.integers(0, 10**11))
def test_human_count_is_a_plain_number_within_half_a_percent(count: int) -> None:
    number, _, unit = human_count(count).partition(" ")
    assert "e" not in number
    factor = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}[unit]
    assert abs(float(number) * factor - count) <= 0.005 * count


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12.34, "12.3 s"),
        (1, "1 s"),
        (0.9999, "1 s"),
        (0.999, "999 ms"),
        (12345, "12345 s"),
        (0.0123, "12.3 ms"),
        (0.001, "1 ms"),
        (0.00002, "20 us"),
        (0, "0 us"),
    ],
)
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text
