"""Two hosts: network namespaces of this machine, joined by a pair of virtual cables. Needs root and the command ``ip``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ADDRESSES = ("10.231.77.1", "10.231.77.2")


def can_make_hosts() -> bool:
    """Whether there may be namespaces here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"fxp{os.getpid()}t"
    made = _ip("netns", "add", name, check=False).returncode == 0
    if made:
        _ip("netns", "del", name)
    return made


class TwoHosts:
    """In the block there are two hosts, each with one address; afterwards nothing is left of them."""

    def __init__(self) -> None:
        self.names = [f"fxp{os.getpid()}{letter}" for letter in "ab"]
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> TwoHosts:
        first, second = self.names
        try:
            for name in self.names:
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            _ip("link", "add", "cable0", "netns", first, "type", "veth", "peer", "name", "cable0", "netns", second)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable0")
                _ip("-n", name, "link", "set", "cable0", "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for host, name in enumerate(self.names):
            self.kill_all(host)
            _ip("netns", "del", name, check=False)

    def kill_all(self, host: int) -> None:
        """Ends all processes of a host at once, as when it loses its power."""
        for pid in _ip("netns", "pids", self.names[host], check=False).stdout.split():
            subprocess.run(["kill", "-9", pid], check=False)  # Lightning traps SIGTERM

    def start(self, host: int, command: Sequence[str], output: Path, **environment: Any) -> subprocess.Popen[str]:
        """Starts a program on a host, which writes to a file.

        Args:
            host: 0 or 1.
            command: What Python runs.
            output: The file.
            **environment: Variables besides this process's.
        """
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": "cable0", "OMP_NUM_THREADS": "1"}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR", "NODE_RANK"):
            variables.pop(name, None)
        variables |= {name: str(value) for name, value in environment.items()}
        with output.open("w") as stream:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], sys.executable, *command],
                env=variables,
                stdout=stream,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._processes.append(process)
        return process

    def cut(self) -> None:
        """Nothing goes from host to host any more, and nobody is told."""
        _ip("-n", self.names[0], "link", "set", "cable0", "down")


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)
