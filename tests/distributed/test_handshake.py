"""How the ranks find rank 0 among strangers, and what they do where one does not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from lightning_fxpipe.distributed import handshake
from lightning_fxpipe.distributed.handshake import Gather, connect_with_first
from tests.thread_ranks import ThreadRanks

WORLD = 3
Sockets = dict[int, socket.socket] | None


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connected(
    closing: ExitStack,
    on_offer: Callable[[Any], None] = lambda offer: None,
    *,
    others: dict[int, Callable[[Gather], Any]] | None = None,
) -> list[Sockets]:
    """What each rank gets; with ``others`` these do something else than to connect.

    Args:
        closing: Closes all in the end.
        on_offer: Called with what rank 0 offers, before any rank knows it.
        others: By rank.
    """

    def on_values(values: list[Any]) -> None:
        if hasattr(values[0], "port"):
            on_offer(values[0])

    ours = [partial(connect_with_first, rank, WORLD, "127.0.0.1") for rank in range(WORLD)]
    found = ThreadRanks(WORLD, on_values).run([(others or {}).get(rank, ours[rank]) for rank in range(WORLD)])
    for sockets in found:
        for connection in (sockets or {}).values():
            closing.enter_context(connection)
            connection.settimeout(10)
    return found


def dial(closing: ExitStack, offer: Any, said: bytes) -> socket.socket:
    """A connection of somebody who says something, and goes on listening."""
    connection = closing.enter_context(socket.create_connection((offer.hosts[0], offer.port), 20))
    connection.sendall(said)
    return connection


def check_pairs(found: list[Sockets]) -> None:
    """That each rank talks with whom it means."""
    first = found[0]
    assert first is not None
    assert set(first) == {1, 2}
    for rank in (1, 2):
        theirs = found[rank]
        assert theirs is not None
        theirs[0].sendall(b"%d" % rank)
        assert first[rank].recv(10) == b"%d" % rank


STRANGERS = {
    "silent": b"",
    "first letter": b"x",
    "no words": b"\n",
    "no text": b"\xff\x00\n",
    "endless": b"x" * 100_000,
    "http": b"GET / HTTP/1.1\r\n\r\n",
}


def test_strangers_hold_up_no_rank(closing: ExitStack) -> None:
    """Each was heard in its turn, for five seconds; a byte every few seconds held up the ranks for ever."""

    def come(offer: Any) -> None:
        for said in [*STRANGERS.values()] * 5 + [b""] * (handshake._MAX_STRANGERS + 5):
            dial(closing, offer, said)

    begin = time.monotonic()
    check_pairs(connected(closing, come))
    assert time.monotonic() - begin < handshake.SETUP_SECONDS / 2


def test_who_says_too_much_or_waits_longest_among_many_is_sent_away(closing: ExitStack) -> None:
    def come(gather: Gather) -> Sockets:
        gather(handshake._machine())
        offer = gather(None)[0]
        assert answer(dial(closing, offer, b"x" * 1000)) == b""
        silent = [dial(closing, offer, b"") for _ in range(handshake._MAX_STRANGERS + 1)]
        assert answer(silent[0]) == b""
        connection = dial(closing, offer, offer.token + b" 1\n")
        assert answer(connection) == b"+"
        gather(True)
        return {0: connection}

    check_pairs(connected(closing, others={1: come}))


@pytest.mark.parametrize(
    "hello",
    [b"%s 0\n", b"%s 3\n", b"%s -1\n", b"%s 99999999999999999999\n", b"%s one\n", b"%s\n", b"%s 1 1\n", b"%s 1\nand more\n"],
    ids=repr,
)
def test_a_hello_of_no_rank_is_refused(closing: ExitStack, hello: bytes) -> None:
    strangers: list[socket.socket] = []
    check_pairs(connected(closing, lambda offer: strangers.append(dial(closing, offer, hello % offer.token))))
    assert answer(strangers[0]) == b""


def test_a_wrong_token_is_refused(closing: ExitStack) -> None:
    strangers: list[socket.socket] = []

    def come(offer: Any) -> None:
        wrong = bytes(reversed(offer.token))
        for said in (wrong + b" 1\n", offer.token[:-1] + b" 2\n", offer.token + b"0 1\n"):
            strangers.append(dial(closing, offer, said))

    check_pairs(connected(closing, come))
    assert [answer(stranger) for stranger in strangers] == [b"", b"", b""]


def answer(connection: socket.socket) -> bytes:
    """What rank 0 answers; nothing where it hangs up."""
    try:
        return connection.recv(10)
    except ConnectionResetError:
        return b""


def test_of_two_that_claim_to_be_the_same_rank_the_first_stays_while_it_is_there(closing: ExitStack) -> None:
    """One that has hung up, since the answer was late, comes again."""
    offers: list[Any] = []
    told: list[bytes] = []

    def come_twice(gather: Gather) -> Sockets:
        gather(handshake._machine())
        gather(None)
        gone = dial(closing, offers[0], offers[0].token + b" 1\n")
        told.append(answer(gone))
        told.append(answer(dial(closing, offers[0], offers[0].token + b" 1\n")))
        gone.shutdown(socket.SHUT_RDWR)
        last = dial(closing, offers[0], offers[0].token + b" 1\n")
        told.append(answer(last))
        offers.append(None)
        gather(True)
        return {0: last}

    def come_last(gather: Gather) -> Sockets:
        gather(handshake._machine())
        offer = gather(None)[0]
        while len(offers) < 2:  # rank 0 does not listen any more when all are there
            time.sleep(0.01)
        connection = dial(closing, offer, offer.token + b" 2\n")
        assert answer(connection) == b"+"
        gather(True)
        return {0: connection}

    check_pairs(connected(closing, offers.append, others={1: come_twice, 2: come_last}))
    assert told == [b"+", b"", b"+"]


def test_a_rank_that_does_not_come_ends_the_setup_in_time_on_all(closing: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "SETUP_SECONDS", 0.5)
    over = threading.Event()

    def drip(connection: socket.socket) -> None:
        while not over.wait(0.05):
            connection.send(b"x")

    def come(offer: Any) -> None:
        threading.Thread(target=drip, args=(dial(closing, offer, b""),), daemon=True).start()

    def stay_away(gather: Gather) -> None:
        gather(handshake._machine())
        gather(None)
        gather(False)

    with pytest.warns(UserWarning, match=r"Ranks \[0, 2\] could not connect"):
        assert connected(closing, come, others={2: stay_away}) == [None, None, None]
    over.set()


def test_there_is_no_lifeline_where_one_rank_alone_believes_so(closing: ExitStack) -> None:
    """Rank 0 had reached all, and another rank had given up: that one was then told dead."""
    offers: list[Any] = []

    def give_up(gather: Gather) -> None:
        gather(handshake._machine())
        gather(None)
        dial(closing, offers[0], offers[0].token + b" 1\n")
        gather(False)

    with pytest.warns(UserWarning, match=r"Ranks \[1\] could not connect"):
        assert connected(closing, offers.append, others={1: give_up}) == [None, None, None]


def test_without_a_port_on_rank_0_there_is_no_lifeline(closing: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_places", lambda address, is_local: iter(()))
    with pytest.warns(UserWarning, match="without a port"):
        assert connected(closing) == [None, None, None]


def test_ranks_of_one_machine_meet_on_its_loopback_interface(closing: ExitStack) -> None:
    offers: list[Any] = []
    found = connected(closing, offers.append)
    check_pairs(found)
    assert offers[0].hosts == ("127.0.0.1",)
    assert found[0] is not None
    assert found[0][1].getsockname()[0] == "127.0.0.1"


def test_ranks_of_several_machines_meet_at_the_address_of_rank_0() -> None:
    places = list(handshake._places("192.0.2.7", is_local=False))
    assert places[0][1][:2] == ("192.0.2.7", 0)
    # A name that means the loopback interface on its own machine means another one elsewhere.
    assert [where for _, where in handshake._places("127.0.1.1", is_local=False)] == [("", 0)]


def test_ranks_of_several_machines_try_all_names_of_rank_0(closing: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "_machine", lambda: (threading.current_thread().name,))
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    jobs = [partial(connect_with_first, rank, WORLD, "nowhere.invalid") for rank in range(WORLD)]
    found = ThreadRanks(WORLD).run(jobs)
    for sockets in found:
        for connection in (sockets or {}).values():
            closing.enter_context(connection)
            connection.settimeout(10)
    check_pairs(found)
