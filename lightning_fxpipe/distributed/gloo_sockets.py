"""Frees a main thread that waits for another rank which will not answer.

A rank inside a gloo collective cannot be interrupted: Python's signal handlers run when the call returns, and gloo returns when
its connection breaks or after half an hour. So the sockets that a process group opens are noted, and shut where the run has
failed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import torch.distributed.distributed_c10d as dist

from lightning_fxpipe._compat.torch import abort_process_groups

_FOLDER = Path("/proc/self/fd")  # of this process's open files; elsewhere than on Linux nothing is noted


class Connections:
    """The sockets of this process's process groups."""

    def __init__(self) -> None:
        self._found: set[tuple[int, str]] = set()
        self.are_shut = False

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Notes what the block opens."""
        before = _open_sockets()
        try:
            yield
        finally:
            self._found |= _open_sockets() - before

    def add(self, others: Connections) -> None:
        """Notes what others have noted."""
        self._found |= others._found

    def shut(self) -> None:
        """Breaks all connections: calls that wait for other ranks raise, in this process and in theirs."""
        self.are_shut = True
        for descriptor, _ in self._found & _open_sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                # One that listens must go on: gloo ends the process when it cannot accept.
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)
        if dist.is_initialized() and dist.get_backend() != "gloo":
            # NCCL waits on the device. Aborting may take its time.
            threading.Thread(target=abort_process_groups, daemon=True).start()


def _open_sockets() -> set[tuple[int, str]]:
    """(descriptor, what the system calls it) of each open socket."""
    found = set()
    for name in os.listdir(_FOLDER) if _FOLDER.is_dir() else ():
        with contextlib.suppress(OSError):
            target = os.readlink(_FOLDER / name)
            if target.startswith("socket:"):
                found.add((int(name), target))
    return found
