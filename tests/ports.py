"""Free ports for the meetings of ranks."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def free_port() -> int:
    """A port of this machine that nobody takes by chance before the ranks listen at it.

    They do so only once they have imported what they need. In the meantime the system may give any port of its range for
    outgoing connections to one of those that other tests make; so the port is one below that range, where that has room.
    It is drawn by the system's randomness: processes forked from one another would draw the same ones.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = random.SystemRandom().sample(range(10_000, first), 100) if first > 20_000 else []
    for port in (*below, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise AssertionError("port 0 is any free port")
