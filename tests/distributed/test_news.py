"""What is said in a line, and what is none of it."""

from __future__ import annotations

import json
import sys

import pytest

from lightning_fxpipe.distributed.news import Done, Failure, Left, Lines, News, death, decode, encode, silence

FAILURE = Failure(rank=1, run=2, summary="what \ud800 happened", traceback="line 1\nline 2\n", exit_code=3)


@pytest.mark.parametrize("news", [FAILURE, death(2), silence(0, 120.0), Done(1), Left(0)], ids=str)
def test_news_arrive_as_they_were(news: News) -> None:
    line = encode(news)
    assert line.count(b"\n") == 1
    assert decode(line) == news


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"\xff\xfe", b"GET / HTTP/1.1", b"1", b"null", b"[]", b"{}", b'"Left"', b"[" * 100_000, b"1" * 10_000),
        *(b'{"Left": 1}', b'{"Left": {}}', b'{"Left": {"rank": "1"}}', b'{"Left": {"rank": 1, "more": 1}}'),
        *(b'{"Left": {"rank": 1}, "Done": {"rank": 1}}', b'{"Other": {"rank": 1}}', b'{"Failure": {"rank": 1}}'),
        json.dumps({"Failure": {"rank": 1, "run": 1, "summary": None}}).encode(),
        json.dumps({"Failure": {"rank": 1, "run": 1, "summary": "", "exit_code": "no"}}).encode(),
    ],
    ids=lambda line: repr(line[:40]),
)
def test_anything_else_is_no_news(line: bytes) -> None:
    assert decode(line) is None


def test_lines_are_put_together_from_pieces() -> None:
    lines = Lines()
    assert lines.feed(b"a") == []
    assert lines.feed(b"b\nc\n\nd") == [b"ab", b"c", b""]
    assert lines.feed(b"\n") == [b"d"]


def test_a_line_that_does_not_end_takes_no_memory() -> None:
    lines, piece = Lines(), b"x" * (1 << 20)
    for _ in range(20):
        assert lines.feed(piece) == []
    assert sys.getsizeof(lines._rest) < 5 << 20
    assert lines.feed(b"its end\nnext\n") == [b"next"]
    assert lines.feed(b"one more\n") == [b"one more"]


def test_the_longest_traceback_is_not_left_out() -> None:
    failure = Failure(rank=0, run=1, summary="\N{PILE OF POO}" * 300, traceback="\N{PILE OF POO}" * 100_010)
    lines, sent = Lines(), encode(failure)
    found = [line for start in range(0, len(sent), 65536) for line in lines.feed(sent[start : start + 65536])]
    assert [decode(line) for line in found] == [failure]


def test_a_sentence_says_whether_a_rank_failed_died_or_was_stopped() -> None:
    assert FAILURE.sentence.startswith("rank 1 failed: what")
    assert death(2).sentence.startswith("rank 2 failed: the process died")
    assert silence(3, 120.0).sentence.startswith("rank 3 has not answered for 120 s: it is stopped (SIGSTOP)")
