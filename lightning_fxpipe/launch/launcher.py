"""Starts the other ranks unless torchrun or the like does, runs a Trainer's function, and leaves no process behind."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.distributed_c10d as dist

from lightning_fxpipe._compat.lightning import checkpoint_folders
from lightning_fxpipe.checkpoint.atomic import recover_all
from lightning_fxpipe.distributed.failure import current_watch, failures_reach_every_rank
from lightning_fxpipe.reporting.tracebacks import shorten

_POLL_SECONDS = 0.2
# Seconds that a failure has to reach all ranks in order, before a launcher ends what is left.
_END_SECONDS = 4.0
_INTERPRETER_SECONDS = 0.5


def run_to_the_end(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs ``function``, on every rank, so that it ends on all when it fails on one."""
    with failures_reach_every_rank():
        try:
            result = function(*args, **kwargs)
            # A run has ended when it has on every rank: none leaves with success while the last hooks of another fail.
            if dist.is_initialized():
                dist.barrier()
        except Exception as error:
            shorten(error)
            raise
        return result


def _requested_checkpoint(trainer: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The ``ckpt_path`` of a call, of which the Trainer tells its strategy only when it is loaded.

    The folder where the Trainer will look for its last checkpoint is brought in order.
    """
    for folder in [] if trainer is None else checkpoint_folders(trainer):
        recover_all(Path(folder))
    return inspect.signature(function).bind(*args, **kwargs).arguments.get("ckpt_path")


class ForkingLauncher:
    """Runs a Trainer's function in processes that end with it.

    Args:
        inner: Starts them, and brings their results back.

    Attributes:
        requested: The ``ckpt_path`` that the function is called with.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.requested: Any = None

    @property
    def is_interactive_compatible(self) -> bool:
        """True if a notebook can use it."""
        return bool(self._inner.is_interactive_compatible)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Runs ``function`` on every rank."""
        self.requested = _requested_checkpoint(trainer, function, args, kwargs)
        return self._inner.launch(run_to_the_end, function, *args, trainer=trainer, **kwargs)

    def kill(self, signum: int) -> None:
        """Sends a signal to the processes."""
        self._inner.kill(signum)


class Launcher:
    """Launcher that Lightning runs ``fit`` and the like through.

    Args:
        start: Starts the other ranks as processes of this one and returns them; None where something else has started them.

    Attributes:
        requested: The ``ckpt_path`` that the function is called with.
    """

    def __init__(self, start: Callable[[], Sequence[subprocess.Popen[Any]]] | None = None) -> None:
        self._start = start
        self._children: Sequence[subprocess.Popen[Any]] = ()
        self._have_met = False  # all ranks, in a process group
        self.requested: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Launcher:
        """One that looks after no processes: those of this one are looked after by it."""
        return Launcher(self._start)

    @property
    def is_interactive_compatible(self) -> bool:
        """True if a notebook can use it: there is no script to start once more."""
        return self._start is None

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Runs ``function`` on every rank."""
        self.requested = _requested_checkpoint(trainer, function, args, kwargs)
        if self._start is not None:
            start, self._start = self._start, None
            self._children = start()
            if self._children:
                atexit.register(self._end_children)
                threading.Thread(target=self._observe, name="fxpipe-children", daemon=True).start()
        result = run_to_the_end(function, *args, **kwargs)
        self._have_met = True
        return result

    def kill(self, signum: int) -> None:
        """Sends a signal to the processes that this one started."""
        for child in self._children:
            with contextlib.suppress(OSError):
                child.send_signal(signum)

    # ------------------------------------------------------------------ children

    def _observe(self) -> None:
        """Ends this process where a child has failed that could not tell why: it was not connected yet, or not any more."""
        while not (failed := self._failed_processes()):
            time.sleep(_POLL_SECONDS)
        time.sleep(_END_SECONDS)  # a main thread that knows is on its way out
        for child in self._children:
            child.kill()
        ranks = ", ".join(f"rank {rank} with exit status {code}" for rank, code in failed)
        print(f"[rank 0] stopped because another process exited: {ranks}", file=sys.stderr, flush=True)
        if not self._have_met and all(code == 0 for _, code in failed):
            print(
                "It exited before it reached this call of the Trainer. Does the script exit early if LOCAL_RANK is set?",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)

    def _failed_processes(self) -> list[tuple[int, int]]:
        codes = [child.poll() for child in self._children]
        self._have_met = self._have_met or dist.is_initialized()
        # Before the ranks have met, one that ends well is waited for as well, and in vain.
        return [(rank, code) for rank, code in enumerate(codes, start=1) if code or (code == 0 and not self._have_met)]

    def _end_children(self) -> None:
        """At the end of this process: after a failure the others have a moment to end by themselves.

        A failure, too: this process ends without having met them. They would wait for it until the rendezvous times out.
        """
        watch = current_watch()
        failed = bool(self._failed_processes()) or (not self._have_met if watch is None else watch.knows_failure)
        if not failed:
            return
        deadline = time.monotonic() + _END_SECONDS
        left = None  # since when all that is left of the others is the end of their interpreters, which may take seconds
        while time.monotonic() < min(deadline, (left or deadline) + _INTERPRETER_SECONDS):
            running = [rank for rank, child in enumerate(self._children, start=1) if child.poll() is None]
            if not running:
                return
            if left is None and watch is not None and all(watch.has_left(rank) for rank in running):
                left = time.monotonic()
            time.sleep(0.02)
        self.kill(signal.SIGKILL)
