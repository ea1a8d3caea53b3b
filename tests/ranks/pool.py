"""Ranks for tests: processes that start once, run many jobs, and are killed hard when one of them hangs.

The processes of a pool live for the whole test session, or until a job has failed; they are forked from one that has imported
what they need. A job is a function named by its module and name; every rank calls it with the same arguments and its results
come back in rank order.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from tests.ports import free_port


class RankFailed(AssertionError):
    """A rank raised, died or did not answer in time."""


class RankPool:
    """``world_size`` processes that form one process group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.ranks.imported"])
        port = free_port()
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            log = Path(self._folder.name) / f"rank{rank}.log"
            process = context.Process(target=_serve, args=(theirs, rank, world_size, port, str(log)), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self.run(_ready, timeout_seconds=150)  # imports take long on a busy machine, and are no job's fault

    def run(
        self,
        job: Callable[..., Any],
        *args: Any,
        timeout_seconds: float = 90.0,
        grace_seconds: float = 5.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls ``job(*args, **kwargs)`` on every rank; returns the results in rank order.

        Args:
            job: A function of a module that ranks can import.
            *args: Its arguments.
            timeout_seconds: When ranks that do not answer have failed.
            grace_seconds: How long, once a rank has failed, the next ones have to tell why they fail.
            **kwargs: Keyword arguments.

        Raises:
            RankFailed: With the tracebacks and the end of the logs; the pool is then dead.
        """
        request = (job.__module__, job.__qualname__, args, kwargs)
        deadline = time.monotonic() + timeout_seconds
        failures: list[str] = []
        results: list[Any] = [None] * self.world_size
        for pipe in self._pipes:
            pipe.send(request)
        waiting = dict(zip(self._pipes, range(self.world_size), strict=True))
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in ready or list(waiting):
                rank = waiting.pop(pipe)
                ok, results[rank] = self._answer(rank) if ready else self._silence(rank)
                if not ok:
                    deadline = min(deadline, time.monotonic() + grace_seconds)
                    failures.append(f"--- rank {rank}: {results[rank]}\n{self._log(rank)}")
        if failures:
            self.kill()
            raise RankFailed("\n".join(failures))
        return results

    def _answer(self, rank: int) -> tuple[bool, Any]:
        """Whether the rank's job went well, and its result or traceback."""
        try:
            ok, value = self._pipes[rank].recv()
            return bool(ok), value
        except (EOFError, ConnectionError) as error:
            return False, f"{type(error).__name__}: {error}"

    def _silence(self, rank: int) -> tuple[bool, Any]:
        """The failure of a rank that did not answer in time; where it stands is in its log."""
        process = self._processes[rank]
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.2)  # the handler writes when the interpreter next runs
        return False, "TimeoutError: no answer in time"

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        """Ends the ranks. Lightning traps SIGTERM, so nothing short of SIGKILL is sure."""
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()

    def _log(self, rank: int) -> str:
        log = Path(self._folder.name) / f"rank{rank}.log"
        return log.read_text(errors="replace")[-3000:] if log.exists() else ""


def _ready() -> None:
    """The first job: once it is done, the rank is there."""


def _serve(pipe: Connection, rank: int, world_size: int, port: int, log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        NODE_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    torch.set_num_threads(1)
    while True:
        try:
            module, name, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(*args, **kwargs)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        gc.collect()  # threads and connections of a run that is over would slow down all that follow
