"""The connection that tells of failures, and the breaking of connections, without a pipeline around them."""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from lightning_fxpipe.distributed import lifeline
from lightning_fxpipe.distributed.gloo_sockets import Connections
from lightning_fxpipe.distributed.handshake import Gather
from lightning_fxpipe.distributed.lifeline import Lifeline, connect
from lightning_fxpipe.distributed.news import Failure, Left, decode, encode, silence
from tests.thread_ranks import ThreadRanks

WORLD = 3


class Told:
    """The ranks' ends, and the failures that each rank has heard of."""

    def __init__(self) -> None:
        self.heard = [queue.Queue[Failure]() for _ in range(WORLD)]
        self.lifelines: list[Lifeline | None] = ThreadRanks(WORLD).run([partial(self._connect, rank) for rank in range(WORLD)])

    def _connect(self, rank: int, gather: Gather) -> Lifeline | None:
        return connect(rank, WORLD, "127.0.0.1", gather, self.heard[rank].put, 120.0)

    def lifeline(self, rank: int) -> Lifeline:
        found = self.lifelines[rank]
        assert found is not None
        return found


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    yield told
    for rank in reversed(range(WORLD)):
        told.lifeline(rank).leave()
        told.lifeline(rank).close_in_fork()


class OneEnd:
    """A rank's end, and the sockets of the ranks at the other ends, which are the test.

    Args:
        rank: The rank with a lifeline.
        others: The ranks that it is connected with.
        silence_seconds: How long each of these may be silent.
    """

    def __init__(self, rank: int, others: list[int], silence_seconds: float = 120.0) -> None:
        pairs = {other: socket.socketpair() for other in others}
        self.heard = queue.Queue[Failure]()
        self.others = {other: pair[1] for other, pair in pairs.items()}
        for connection in self.others.values():
            connection.settimeout(30)
        self.lifeline = Lifeline(rank, {other: pair[0] for other, pair in pairs.items()}, self.heard.put, silence_seconds)

    def close(self) -> None:
        """Closes all."""
        for rank, connection in self.others.items():
            with connection:
                connection.sendall(encode(Left(rank)))


def failure(rank: int) -> Failure:
    return Failure(rank=rank, run=1, summary=f"of {rank}", traceback="line 1\nline 2\n")


def test_all_ranks_hear_of_failures_in_the_same_order(told: Told) -> None:
    reporters = [threading.Thread(target=told.lifeline(rank).tell, args=(failure(rank),)) for rank in range(WORLD)]
    for thread in reporters:
        thread.start()
    orders = [[heard.get(timeout=10) for _ in range(WORLD)] for heard in told.heard]
    assert orders[0] == orders[1] == orders[2]
    assert sorted(failure.rank for failure in orders[0]) == [0, 1, 2]


def test_a_rank_tells_that_it_is_done(told: Told) -> None:
    assert not told.lifeline(2).wait_done(1, 0.01)
    told.lifeline(1).tell_done()
    assert told.lifeline(2).wait_done(1, 10)


def test_a_closed_connection_is_a_death(told: Told) -> None:
    for connection in list(told.lifeline(2)._sockets.values()):  # its own thread takes them out
        connection.shutdown(socket.SHUT_RDWR)
    for rank in (0, 1):
        found = told.heard[rank].get(timeout=10)
        assert (found.rank, found.run) == (2, sys.maxsize)


def test_a_rank_that_leaves_in_order_has_not_died(told: Told) -> None:
    told.lifeline(2).leave()
    for connection in list(told.lifeline(2)._sockets.values()):  # its own thread takes them out
        connection.shutdown(socket.SHUT_RDWR)
    told.lifeline(0).tell(failure(0))
    assert told.heard[1].get(timeout=10).rank == 0


def test_what_is_no_news_ends_neither_the_thread_nor_the_run(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "lightning_fxpipe")
    own_words = told.lifeline(1)._sockets[0]
    for line in (b"garbage", b"[[[[", b"[" * 100_000, b'{"Failure": {"rank": 1}}', b"\xff" * 1000):
        own_words.sendall(line + b"\n")
    own_words.sendall(encode(failure(2)))  # nobody speaks for another
    told.lifeline(1).tell(failure(1))
    for heard in told.heard:
        assert heard.get(timeout=10) == failure(1)
        assert heard.empty()
    assert "an invalid message: b'garbage'" in caplog.text


# --------------------------------------------------------------------------- ranks that are stopped


def test_a_rank_that_is_silent_is_given_up_and_hears_so_when_it_goes_on() -> None:
    end = OneEnd(0, [1, 2], silence_seconds=0.6)
    talker = threading.Thread(target=_talk_until, args=(end.others[2], silence(1, 0.6)))
    talker.start()
    assert end.heard.get(timeout=30) == silence(1, 0.6)
    assert 1 in end.lifeline.left  # nobody waits for what it has to tell
    talker.join()
    assert _next_news(end.others[1]) == silence(1, 0.6)
    end.close()
    assert end.heard.empty(), "it is given up once, and the other one is not"


def _talk_until(connection: socket.socket, news: Failure) -> None:
    """Answers each beat, until there is news."""
    for line in connection.makefile("rb"):
        if line != b"\n":
            assert decode(line) == news
            return
        connection.sendall(b"\n")


def _next_news(connection: socket.socket) -> object:
    return next(decode(line) for line in connection.makefile("rb") if line != b"\n")


def test_a_silent_rank_0_is_given_up_by_each_and_hears_so_when_it_goes_on() -> None:
    end = OneEnd(2, [0], silence_seconds=0.6)
    assert end.heard.get(timeout=30) == silence(0, 0.6)
    assert _next_news(end.others[0]) == silence(0, 0.6)
    end.close()


def test_rank_0_hears_that_it_was_stopped() -> None:
    end = OneEnd(0, [1])
    end.others[1].sendall(encode(silence(0, 60.0)))
    assert end.heard.get(timeout=30) == silence(0, 60.0)
    end.close()


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    """The end of an interpreter may take long, in which no thread runs."""
    end = OneEnd(0, [1, 2], silence_seconds=0.6)
    end.others[1].sendall(encode(Left(1)))
    assert end.heard.get(timeout=30).rank == 2
    end.close()
    assert end.heard.empty()


def test_without_a_limit_news_arrive_and_no_rank_beats() -> None:
    end = OneEnd(0, [1, 2], silence_seconds=math.inf)
    end.others[1].sendall(encode(failure(1)))
    assert end.heard.get(timeout=30) == failure(1)
    assert decode(next(iter(end.others[2].makefile("rb")))) == failure(1)
    end.close()


def test_a_rank_that_takes_nothing_is_lost_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "_SEND_SECONDS", 0.2)
    end = OneEnd(0, [1])
    long = Failure(rank=0, run=1, summary="", traceback="x" * 1_000_000)
    end.lifeline.tell(long)
    assert end.heard.get(timeout=30) == long
    assert end.heard.get(timeout=30).summary.startswith("the process died")
    end.others[1].close()


# --------------------------------------------------------------------------- forked processes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_forked_process_neither_keeps_nor_uses_the_connection(rank: int) -> None:
    """A dataloader's worker outlives its rank for seconds: others must hear of the death at once, and nothing of the worker."""
    end = OneEnd(rank, [1 - rank])
    mine, other = end.lifeline._sockets[1 - rank], end.others[1 - rank]
    life, held, forked = socket.socketpair(), threading.Event(), threading.Event()

    def hold() -> None:
        with end.lifeline._lock:  # as the thread that a fork leaves behind
            held.set()
            forked.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(30)
    child = os.fork()
    if child == 0:
        try:
            life[0].close()
            end.lifeline.tell(failure(rank))
            end.lifeline.leave()
            life[1].sendall(b"+" if not end.lifeline._sockets else b"-")
            life[1].recv(1)  # till the test is over
        finally:
            os._exit(0)
    forked.set()
    holder.join()
    try:
        with life[0], other:
            life[1].close()
            life[0].settimeout(10)
            assert life[0].recv(1) == b"+", "the forked process waits for a lock, or keeps the connection"
            mine.close()
            assert other.recv(100) == b""
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# --------------------------------------------------------------------------- what waits is broken off


@pytest.mark.skipif(sys.platform != "linux", reason="open files are listed in /proc")
def test_only_connections_that_were_noted_are_shut() -> None:
    connections = Connections()
    with ExitStack() as stack:
        before = [stack.enter_context(end) for end in socket.socketpair()]
        with connections.noting():
            after = [stack.enter_context(end) for end in socket.socketpair()]
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        connections.shut()
        assert after[0].recv(1) == b""
        before[0].send(b"x")
        assert before[1].recv(1) == b"x"
        stack.enter_context(socket.create_connection(listener.getsockname()))
        stack.enter_context(listener.accept()[0])
