"""The connection that tells of failures, and the breaking of connections, without a pipeline around them."""

from __future__ import annotations

import queue
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from lightning_fxpipe.distributed.gloo_sockets import Connections
from lightning_fxpipe.distributed.lifeline import Failure, Lifeline, connect

WORLD = 3


class Told:
    """What rank 0 shares, and the failures that each rank has heard of."""

    def __init__(self) -> None:
        self._shared = [queue.Queue[Any]() for _ in range(WORLD)]
        self.heard = [queue.Queue[Failure]() for _ in range(WORLD)]
        self.lifelines: list[Lifeline | None] = [None] * WORLD

    def share(self, rank: int, value: Any) -> Any:
        if rank == 0:
            for other in self._shared[1:]:
                other.put(value)
            return value
        return self._shared[rank].get(timeout=20)

    def connect(self, rank: int) -> None:
        share = lambda value: self.share(rank, value)  # noqa: E731
        self.lifelines[rank] = connect(rank, WORLD, "127.0.0.1", share, self.heard[rank].put)

    def lifeline(self, rank: int) -> Lifeline:
        found = self.lifelines[rank]
        assert found is not None
        return found


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    threads = [threading.Thread(target=told.connect, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    yield told
    for rank in reversed(range(WORLD)):
        told.lifeline(rank).leave()
        told.lifeline(rank).close_in_fork()


def failure(rank: int) -> Failure:
    return Failure(rank=rank, run=1, summary=f"of {rank}", traceback="line 1\nline 2\n")


def test_all_ranks_hear_of_failures_in_the_same_order(told: Told) -> None:
    reporters = [threading.Thread(target=told.lifeline(rank).report, args=(failure(rank),)) for rank in range(WORLD)]
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
    told.lifeline(0).report(failure(0))
    assert told.heard[1].get(timeout=10).rank == 0


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
