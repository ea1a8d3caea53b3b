"""A connection between the ranks that says at once when one of them has failed or died, and in time when one has stopped.

Each rank holds a socket to rank 0, on which little travels while all is well: a thread sleeps on it, and says now and then that
the rank is there (``heartbeat``). A rank that fails sends what happened; the system closes the socket of one that dies, however
it dies. Rank 0 passes everything on, to the sender as well, so that all ranks hear the same in the same order, and agree on who
failed first.

What is no news is left out and noted for debugging, and its sender stays: only ranks are connected, so it is a slip, such as a
descriptor that user code writes to by mistake, and no reason to end a run. News that it has destroyed is not lost for long: the
end of a rank closes its socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Callable
from typing import cast

from lightning_fxpipe.distributed.handshake import Gather, connect_with_first
from lightning_fxpipe.distributed.heartbeat import Heartbeat
from lightning_fxpipe.distributed.news import Decision, Done, Failure, Left, Lines, News, death, decode, encode, silence

_logger = logging.getLogger("lightning_fxpipe")
# How long a rank may take to accept what it is sent: one that is stopped accepts little.
_SEND_SECONDS = 5.0


class Lifeline:
    """This rank's end.

    Args:
        rank: This rank.
        sockets: On rank 0 a socket to each other rank, by rank; elsewhere one to rank 0.
        on_failure: Called in the lifeline's thread with each failure of any rank, this one included, in the order of all ranks.
        silence_seconds: How long another rank may be silent, the same on every rank; infinity for any time. A rank's thread
            answers whatever its main thread does, unless that holds Python's lock, as an extension may do for a minute.
    """

    def __init__(
        self, rank: int, sockets: dict[int, socket.socket], on_failure: Callable[[Failure], None], silence_seconds: float
    ) -> None:
        self._rank = rank
        self._sockets = sockets
        self._on_failure = on_failure
        self._heartbeat = Heartbeat(sockets, silence_seconds)
        self._lock = threading.RLock()
        self._changed = threading.Condition()
        self.done: set[int] = set()  # ranks that have told the user why they stop
        self.left: set[int] = set()  # ranks that have ended their program in order, or are lost
        self.on_decision: Callable[[Decision], None] = lambda decision: None  # called as `on_failure`
        for connection in sockets.values():
            connection.settimeout(_SEND_SECONDS)
        # A process that a rank has forked, such as a worker of a dataloader, must not keep the connection of a dead rank open.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(this()))
        threading.Thread(target=self._listen, name="fxpipe-lifeline", daemon=True).start()

    def tell_done(self) -> None:
        """Tells every rank that the user has been told of this rank's failure."""
        self.tell(Done(self._rank))

    def leave(self) -> None:
        """Tells every rank that this one ends its program in order."""
        self.tell(Left(self._rank))

    def wait_done(self, rank: int, seconds: float) -> bool:
        """Waits until another rank has told the user why it stops, or has gone; returns whether it told."""
        with self._changed:
            self._changed.wait_for(lambda: rank in self.done or rank in self.left, seconds)
            return rank in self.done

    # ------------------------------------------------------------------ news

    def tell(self, news: News) -> None:
        """Tells every rank, this one included."""
        with self._lock:
            if self._rank == 0:
                self._take(news)
            elif 0 in self._sockets:
                _send(self._sockets[0], encode(news))

    def _take(self, news: News) -> None:
        """Acts on news; rank 0 passes it on first."""
        with self._lock:
            if self._rank == 0:
                for other in self._sockets.values():
                    _send(other, encode(news))
            with self._changed:
                if isinstance(news, Done):
                    self.done.add(news.rank)
                elif isinstance(news, Left) or (isinstance(news, Failure) and news.is_loss):
                    self.left.add(news.rank)
                    self._heartbeat.forget(news.rank)
                self._changed.notify_all()
            if isinstance(news, Failure):
                self._on_failure(news)
            elif isinstance(news, Decision):
                self.on_decision(news)

    def _listen(self) -> None:
        lines = {rank: Lines() for rank in self._sockets}
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._sockets.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select(self._heartbeat.seconds_left()):
                    if not self._hear(key.data, cast(socket.socket, key.fileobj), lines[key.data]):
                        selector.unregister(key.fileobj)
                        self._note_end(key.data)
                if self._heartbeat.seconds_left() == 0:
                    self._beat()

    def _hear(self, rank: int, connection: socket.socket, lines: Lines) -> bool:
        """Acts on what a rank says; returns whether its connection is still open."""
        try:
            data = connection.recv(65536)
        except TimeoutError:  # it is there, and says nothing
            return True
        except OSError:
            data = b""
        self._heartbeat.hear(rank)
        for line in filter(None, lines.feed(data)):
            news = decode(line)
            if news is not None and self._may_say(rank, news):
                self._take(news)
            else:
                _logger.debug("Rank %d sent an invalid message: %r", rank, line[:200])
        return bool(data)

    def _may_say(self, rank: int, news: News) -> bool:
        """Returns True if news is of the rank itself; but rank 0 speaks for all, and the others find out that it has
        stopped.
        """
        return rank in (0, news.rank) or (isinstance(news, Failure) and news.is_silence and news.rank == 0)

    # ------------------------------------------------------------------ ranks that are lost

    def _beat(self) -> None:
        with self._lock:
            for connection in self._sockets.values():
                _send(connection, b"\n")
            for rank in self._heartbeat.beat():
                failure = silence(rank, self._heartbeat.seconds)
                self._take(failure)
                if rank == 0:  # it hears of it when it goes on
                    self.tell(failure)

    def _note_end(self, rank: int) -> None:
        with self._lock:
            connection = self._sockets.pop(rank, None)
        if connection is not None:
            connection.close()
        self._heartbeat.forget(rank)
        if rank not in self.left:
            self._take(death(rank))

    def close_in_fork(self) -> None:
        """In a forked process: lets go of the connections without a word."""
        self._lock = threading.RLock()  # a thread that is not here may have held it
        self._changed = threading.Condition()
        connections, self._sockets = self._sockets, {}
        for connection in list(connections.values()):  # a thread may be taking one out
            connection.close()
        self._rank = -1


def _forget(lifeline: Lifeline | None) -> None:
    if lifeline is not None:
        lifeline.close_in_fork()


def _send(connection: socket.socket, line: bytes) -> None:
    try:
        connection.sendall(line)
    except TimeoutError:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # half a line may have been sent, after which nothing can be
    except OSError as error:  # it has gone, which the listening thread sees as well
        _logger.debug("A rank disconnected: %s", error)


def connect(
    rank: int,
    world_size: int,
    address: str,
    gather: Gather,
    on_failure: Callable[[Failure], None],
    silence_seconds: float,
) -> Lifeline | None:
    """Connects all ranks. Called by every rank.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        address: Of rank 0's machine.
        gather: Gives every rank the values of all ranks, by rank.
        on_failure, silence_seconds: See :class:`Lifeline`.

    Returns:
        The lifeline; None on every rank, and the user warned, where a rank cannot reach rank 0.
    """
    sockets = connect_with_first(rank, world_size, address, gather)
    return None if sockets is None else Lifeline(rank, sockets, on_failure, silence_seconds)
