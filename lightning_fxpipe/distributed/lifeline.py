"""A connection between the ranks that says at once when one of them has failed or died.

Each rank holds a socket to rank 0, on which nothing travels while all is well: a thread sleeps on it. A rank that fails sends
what happened; the system closes the socket of one that dies, however it dies. Rank 0 passes everything on, to the sender as
well, so that all ranks hear the same in the same order, and agree on who failed first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

_CONNECT_SECONDS = 5.0
_ACCEPT_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank stops.

    Attributes:
        rank: The global rank.
        run: Number of the run in which it happened, counted alike on every rank; the last there can be for a rank that died.
        summary: What happened, one line.
        traceback: The whole of it, as Python prints it; empty where there is none.
        is_interrupt: Whether it is a KeyboardInterrupt.
        exit_code: The code of a ``sys.exit`` by user code; None for anything else.
    """

    rank: int
    run: int
    summary: str
    traceback: str = ""
    is_interrupt: bool = False
    exit_code: int | None = None


class Lifeline:
    """This rank's end.

    Args:
        rank: This rank.
        sockets: On rank 0 a socket to each other rank, by rank; elsewhere one to rank 0.
        on_failure: Called in the lifeline's thread with each failure of any rank, this one included, in the order of all ranks.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket], on_failure: Callable[[Failure], None]) -> None:
        self._rank = rank
        self._sockets = sockets
        self._on_failure = on_failure
        self._lock = threading.RLock()
        self._changed = threading.Condition()
        self._owner = os.getpid()
        self.done: set[int] = set()  # ranks that have told the user why they stop, or have gone
        self.left: set[int] = set()  # ranks that have ended their program in order
        # A process that a rank has forked, such as a worker of a dataloader, must not keep the connection of a dead rank open.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(this()))
        threading.Thread(target=self._listen, name="fxpipe-lifeline", daemon=True).start()

    def report(self, failure: Failure) -> None:
        """Tells every rank, this one included."""
        self._send({"failure": dataclasses.asdict(failure)})

    def tell_done(self) -> None:
        """Tells every rank that the user has been told of this rank's failure."""
        self._send({"done": self._rank})

    def leave(self) -> None:
        """Tells every rank that this one ends its program in order."""
        if os.getpid() == self._owner:
            self._send({"left": self._rank})

    def wait_done(self, rank: int, seconds: float) -> bool:
        """Waits until another rank has told the user why it stops, or has gone; returns whether it told."""
        with self._changed:
            self._changed.wait_for(lambda: rank in self.done or rank in self.left, seconds)
            return rank in self.done

    # ------------------------------------------------------------------ messages

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            if self._rank == 0:
                self._take(message)
            elif 0 in self._sockets:
                _write(self._sockets[0], message)

    def _take(self, message: dict[str, Any]) -> None:
        """Handles a message; rank 0 passes it on first."""
        with self._lock:
            if self._rank == 0:
                for other in self._sockets.values():
                    _write(other, message)
            with self._changed:
                if "done" in message:
                    self.done.add(message["done"])
                if "left" in message:
                    self.left.add(message["left"])
                self._changed.notify_all()
            if "failure" in message:
                self._on_failure(Failure(**message["failure"]))

    def _listen(self) -> None:
        selector = selectors.DefaultSelector()
        unread = dict.fromkeys(self._sockets, b"")
        for rank, connection in self._sockets.items():
            selector.register(connection, selectors.EVENT_READ, rank)
        while selector.get_map():
            for key, _ in selector.select():
                rank, connection = key.data, cast(socket.socket, key.fileobj)
                data = b""  # also of one that the system has closed
                with contextlib.suppress(OSError):
                    data = connection.recv(65536)
                *lines, unread[rank] = (unread[rank] + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))
                if not data:
                    selector.unregister(connection)
                    self._note_loss(rank)

    def _note_loss(self, rank: int) -> None:
        with self._lock:
            connection = self._sockets.pop(rank, None)
        if connection is not None:
            connection.close()
        if rank not in self.left:
            died = Failure(rank=rank, run=sys.maxsize, summary="the process died (killed by a signal, or out of memory)")
            self._take({"failure": dataclasses.asdict(died)})
        self._take({"left": rank})

    def close_in_fork(self) -> None:
        """In a forked process: lets go of the connections without a word."""
        connections, self._sockets = self._sockets, {}
        for connection in list(connections.values()):  # a thread may be taking one out
            connection.close()
        self._rank = -1


def _forget(lifeline: Lifeline | None) -> None:
    if lifeline is not None:
        lifeline.close_in_fork()


def _write(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it has gone, which the listening thread sees as well
        connection.sendall(json.dumps(message).encode() + b"\n")


def connect(
    rank: int, world_size: int, address: str, share: Callable[[Any], Any], on_failure: Callable[[Failure], None]
) -> Lifeline | None:
    """Connects all ranks. Called by every rank.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        address: Of rank 0's machine.
        share: Gives every rank the argument of rank 0.
        on_failure: See :class:`Lifeline`.

    Returns:
        The lifeline; None where a rank cannot reach rank 0, on every rank.
    """
    listener = socket.create_server(("", 0), backlog=world_size) if rank == 0 else None
    token = secrets.token_hex(16)  # not every process that can reach the port is a rank
    offer = (listener.getsockname()[1], [address, socket.gethostname()], token) if listener is not None else None
    port, hosts, token = share(offer)
    if listener is not None:
        with listener:
            sockets = _accept(listener, world_size, token)
    else:
        sockets = _dial(hosts, port, token, rank)
    if share(len(sockets) == world_size - 1):  # rank 0 has reached all
        return Lifeline(rank, sockets, on_failure)
    for connection in sockets.values():
        connection.close()
    return None


def _accept(listener: socket.socket, world_size: int, token: str) -> dict[int, socket.socket]:
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _ACCEPT_SECONDS
    while len(found) < world_size - 1 and time.monotonic() < deadline:
        listener.settimeout(max(0.1, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            connection.settimeout(_CONNECT_SECONDS)
            hello = connection.makefile("rb").readline(200).split()
            if len(hello) == 2 and secrets.compare_digest(hello[0], token.encode()):
                connection.sendall(b"+")
                found[int(hello[1])] = _kept_open(connection)
            else:
                connection.close()
    return found


def _dial(hosts: Sequence[str], port: int, token: str, rank: int) -> dict[int, socket.socket]:
    for host in hosts:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, port), _CONNECT_SECONDS)
            connection.sendall(f"{token} {rank}\n".encode())
            if connection.recv(1) == b"+":
                return {0: _kept_open(connection)}
            connection.close()
    return {}


def _kept_open(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that is gone closes nothing
    return connection
