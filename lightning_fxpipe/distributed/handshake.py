"""Connects each rank with rank 0, or none, within a time that no unauthenticated peer can prolong; all ranks agree."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_fxpipe.reporting.messages import warn

SETUP_SECONDS = 30.0
# Of those that have not said who they are. Ranks do so at once, so that it is never one of them that has waited longest.
_MAX_STRANGERS = 64
_BACKLOG = 256
_HELLO_BYTES = 64
_WELCOME = b"+"

Gather = Callable[[Any], list[Any]]
"""Gives every rank the small values of all ranks, by rank. Called by every rank."""


@dataclass(frozen=True, kw_only=True)
class _Offer:
    """Addresses on which rank 0 listens, and the secret that proves a peer to be a rank: any process may reach the port."""

    hosts: tuple[str, ...]
    port: int
    token: bytes


def connect_with_first(rank: int, world_size: int, address: str, gather: Gather) -> dict[int, socket.socket] | None:
    """Connects. Called by every rank.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        address: Of rank 0's machine.
        gather: As it says.

    Returns:
        On rank 0 a socket to each other rank, by rank; elsewhere one to rank 0. None on every rank where any lacks its own.
    """
    machines = gather(_machine())
    is_local = all(machine == machines[0] for machine in machines)
    listener = _listen(address, is_local=is_local) if rank == 0 else None
    offer: _Offer | None = gather(None if listener is None else _offer(listener, address, is_local=is_local))[0]
    found: dict[int, socket.socket] = {}
    if listener is not None and offer is not None:
        with listener:
            found = _Reception(listener, offer.token, world_size).sockets()
    elif offer is not None:
        found = _dial(offer, rank)
    votes = gather(len(found) == (world_size - 1 if rank == 0 else 1))
    if all(votes):
        return found
    for connection in found.values():
        connection.close()
    missing = [rank for rank, has_connection in enumerate(votes) if not has_connection]
    where = "without a port to listen on" if offer is None else f"at port {offer.port} of {' or '.join(offer.hosts)}"
    warn(
        f"Ranks {missing} could not connect to rank 0, {where}, to exchange failure reports. If a rank fails, dies or hangs, "
        "the others notice only when a collective with it reaches `timeout`."
    )
    return None


def _machine() -> tuple[str, ...]:
    """Equal for processes that reach each other by the loopback interface: host, boot and network namespace."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):  # elsewhere than on Linux the name must do
        found += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/net")]
    return tuple(found)


def _listen(address: str, *, is_local: bool) -> socket.socket | None:
    for family, where in _places(address, is_local=is_local):
        with contextlib.suppress(OSError):
            return socket.create_server(where, family=family, backlog=_BACKLOG)
    return None


def _places(address: str, *, is_local: bool) -> Iterator[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """Yields addresses on which rank 0 may listen, best first: those that only the ranks can reach, if there are any."""
    if is_local:
        yield socket.AF_INET, ("127.0.0.1", 0)
        yield socket.AF_INET6, ("::1", 0)
        return
    with contextlib.suppress(OSError):
        for family, _, _, _, where in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
            # Some machines give their own name a loopback address, and others know them by another one.
            if not str(where[0]).startswith("127.") and where[0] != "::1":
                yield family, where
    yield socket.AF_INET, ("", 0)  # the address is that of something before the machine, such as a service


def _offer(listener: socket.socket, address: str, *, is_local: bool) -> _Offer:
    host, port = listener.getsockname()[:2]
    hosts = (host,) if is_local else (address, socket.gethostname())
    return _Offer(hosts=hosts, port=port, token=secrets.token_hex(16).encode())


# ---------------------------------------------------------------------------------------------------- rank 0


class _Reception:
    """Hears all who come at the same time, until every rank is there or time is up."""

    def __init__(self, listener: socket.socket, token: bytes, world_size: int) -> None:
        self._listener, self._token, self._world_size = listener, token, world_size
        self._said: dict[socket.socket, bytes] = {}  # by those that have not said all yet
        self._found: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()

    def sockets(self) -> dict[int, socket.socket]:
        """To other ranks, by rank: to all that have come."""
        deadline = time.monotonic() + SETUP_SECONDS
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        with self._selector:
            while len(self._found) < self._world_size - 1 and (left := deadline - time.monotonic()) > 0:
                for key, _ in self._selector.select(left):
                    if key.fileobj is self._listener:
                        self._admit()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._said:  # not sent away since
                        self._hear(key.fileobj)
        for peer in self._said:
            peer.close()
        return self._found

    def _admit(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            time.sleep(0.05)  # no descriptor is left, for one; one may be given back
            return
        connection.setblocking(False)
        self._said[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._said) > _MAX_STRANGERS:
            self._release(next(iter(self._said))).close()

    def _hear(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._said[connection] += data
        said = self._said[connection]
        if data and b"\n" not in said and len(said) < _HELLO_BYTES:
            return
        self._release(connection)
        rank = self._rank_of(said)
        if rank is None or not _welcomed(connection):
            connection.close()
            return
        if rank in self._found:
            self._found[rank].close()
        self._found[rank] = connection

    def _rank_of(self, hello: bytes) -> int | None:
        """The rank that says so and is still missing. One that has hung up may come again."""
        parts = re.fullmatch(rb"(\w+) (\d{1,9})\n", hello)
        if parts is None or not secrets.compare_digest(parts[1], self._token):
            return None
        rank = int(parts[2])
        is_missing = rank not in self._found or not _is_open(self._found[rank])
        return rank if 0 < rank < self._world_size and is_missing else None

    def _release(self, connection: socket.socket) -> socket.socket:
        del self._said[connection]
        self._selector.unregister(connection)
        return connection


def _welcomed(connection: socket.socket) -> bool:
    try:
        return connection.send(_WELCOME) == 1
    except OSError:
        return False


def _is_open(connection: socket.socket) -> bool:
    """Returns True if the other end has neither hung up nor gone; it says nothing before all are connected."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------------- other ranks


def _dial(offer: _Offer, rank: int) -> dict[int, socket.socket]:
    """The socket to rank 0; none where it cannot be reached in time, by any of its names."""
    begin = time.monotonic()
    for attempt, host in enumerate(offer.hosts, start=1):
        deadline = begin + SETUP_SECONDS * attempt / len(offer.hosts)
        with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
            connection = socket.create_connection((host, offer.port), max(0.01, deadline - time.monotonic()))
            closing.callback(connection.close)
            connection.sendall(b"%s %d\n" % (offer.token, rank))
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            if connection.recv(1) == _WELCOME:
                closing.pop_all()
                return {0: connection}
    return {}
