"""Ends the run on every rank when one fails, and lets the user see why: once, and first of all.

A rank that fails tells the others over the ``Lifeline``. Each of them gives its own code a
moment to fail by itself, since an error of the user's code is often one of every rank, then raises in the main thread what
fits: a ``PeerError``, or the ``KeyboardInterrupt`` or ``SystemExit`` of the other rank. Lightning's ``on_exception`` and
teardown hooks run as they do for any error. A main thread that does not come round is ended with its process.

The rank that failed first prints its traceback, the others a line. They wait for it before they end: launchers kill what is
left once one process has gone.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache, partial
from itertools import takewhile
from types import FrameType, TracebackType
from typing import Any

import torch.distributed.distributed_c10d as dist
from torch.distributed import DistBackendError, DistNetworkError

from lightning_fxpipe.distributed.agreement import gather_values
from lightning_fxpipe.distributed.gloo_sockets import Connections
from lightning_fxpipe.distributed.lifeline import Lifeline, connect
from lightning_fxpipe.distributed.news import Failure
from lightning_fxpipe.errors import FxPipeError, PeerError, chain_of, interpreters, printable, text_of
from lightning_fxpipe.reporting.tracebacks import without_shortening

# Seconds after the news: when a main thread that waits is interrupted, when one that computes, when the process ends.
_WAITING_SECONDS, _BUSY_SECONDS, _LAST_SECONDS = 1.0, 2.0, 4.0
_HANDLING_SECONDS = 3.0  # when one that handles an error: it may be on its way out, and would be lost
_TOLD_SECONDS = 2.5  # how long another rank has to tell the user
_ORDER_SECONDS = 1.0  # how long rank 0 has to say who failed first
_MEETING_SECONDS = 2.0  # how long ranks that have failed wait for each other to save a checkpoint
_MAX_TRACEBACK = 100_000
# Ignored unless it is handled, so that one that comes too late does nothing.
_WAKE = getattr(signal, "SIGURG", None)


@contextlib.contextmanager
def failures_reach_every_rank() -> Iterator[None]:
    """Around a whole run: reports an error of the block to the other ranks, or raises theirs in its place.

    Raises:
        PeerError: Another rank failed first.
    """
    try:
        yield
    except BaseException as error:
        watch = current_watch()
        if watch is not None:
            watch.take_over_hook()
        raised = error if watch is None else watch.conclude(error)
        if raised is error:
            raise
        raise raised from None


def current_watch() -> FailureWatch | None:
    """This process's watch; None where there is one rank only, or no process group."""
    return _watch_of(dist.group.WORLD) if dist.is_initialized() and dist.get_world_size() > 1 else None


def begin_run(start: Callable[[], None], address: str, heartbeat_timeout: timedelta | None) -> None:
    """Starts the process group, where there is none yet, and watches over a new run. Called by every rank.

    Args:
        start: Starts the default process group.
        address: Of rank 0's machine.
        heartbeat_timeout: How long a rank may be silent before the others give it up; None for any time. The process's first
            run decides, since all ranks must change it at the same moment.
    """
    connections = Connections()
    with connections.noting():
        start()
    watch = current_watch()
    if watch is not None:
        watch.connections.add(connections)
        watch.begin_run(address, math.inf if heartbeat_timeout is None else heartbeat_timeout.total_seconds())


def end_run() -> None:
    """The run is over, with its hooks, in whatever way."""
    watch = current_watch()
    if watch is not None:
        watch.end_run()


def has_failed() -> bool:
    """Returns True if this rank is on its way out of a run that failed: the others do not answer any more."""
    watch = current_watch()
    return watch is not None and watch.has_failed


def num_failed_runs() -> int:
    """How many runs of the process group have failed on this rank."""
    watch = current_watch()
    return 0 if watch is None else watch.num_failed_runs


def have_all_stopped_at(progress: Any, group: dist.ProcessGroup | None) -> bool:
    """Returns True if all ranks have come here after a failure, and have made the same progress.

    So it is where each has failed by itself, or all were interrupted. Where one has failed while others waited for it, the
    connections between them are broken.
    """
    watch = current_watch()
    if watch is None:
        return True
    if group is None or watch.connections.are_shut:
        return False
    try:
        dist.monitored_barrier(group, timeout=timedelta(seconds=_MEETING_SECONDS))
        found = gather_values(group, progress)
    except RuntimeError:
        return False
    return all(other == found[0] for other in found)


def noted_connections() -> contextlib.AbstractContextManager[None]:
    """Around what makes process groups: their connections are broken where the run fails."""
    watch = current_watch()
    return contextlib.nullcontext() if watch is None else watch.connections.noting()


@cache  # the process group is the process's, and so are signals and the hook for uncaught errors
def _watch_of(world: dist.ProcessGroup) -> FailureWatch:
    return FailureWatch(dist.get_rank(world))


class FailureWatch:
    """Failures that a rank knows of: its own and those of others."""

    def __init__(self, rank: int) -> None:
        self.connections = Connections()
        self._rank = rank
        self._lifeline: Lifeline | None = None
        self._is_connected = False
        self._run = 0
        self._in_run = False
        self._failures: list[Failure] = []
        self._news = threading.Condition()
        self._ended = threading.Event()  # the main thread has an error, of its own or of another rank
        self.num_failed_runs = 0
        self._own: Failure | None = None
        self._pending: Failure | None = None
        self._was_stopped = False  # the main thread, for another rank's failure
        self._handled_until = 0.0  # how long an error that is being handled may keep the main thread from another rank's
        self._owner = os.getpid()
        self._first_hook: Callable[..., Any] = sys.excepthook
        self._users_hook: Callable[..., Any] | None = None  # that was put in the place of this watch's
        self._is_telling = self._has_told = False

    @property
    def knows_failure(self) -> bool:
        """True if any rank has failed in the current or last run."""
        return self._own is not None or self._first() is not None

    @property
    def lifeline(self) -> Lifeline | None:
        """Connects the ranks; None where they could not be connected."""
        return self._lifeline

    def has_left(self, rank: int) -> bool:
        """Returns True if a rank has ended its program, or is about to."""
        return self._lifeline is not None and rank in self._lifeline.left

    @property
    def has_failed(self) -> bool:
        """True if this rank is on its way out of a run that failed: the others do not answer any more."""
        return self._in_run and self._ended.is_set()

    def begin_run(self, address: str, silence_seconds: float) -> None:
        """Begins a new run; the arguments are those of the function. Called by every rank."""
        if self.connections.are_shut:
            raise FxPipeError(
                "The ranks of the pipeline were disconnected by an earlier failed run.",
                todo="Restart the program and resume from a checkpoint.",
            )
        self._run += 1
        self._ended.clear()
        self._own = self._pending = None
        self._has_told = self._was_stopped = False
        self._in_run = True
        if not self._is_connected:
            self._is_connected = True
            gather = partial(gather_values, dist.group.WORLD)
            self._lifeline = connect(self._rank, dist.get_world_size(), address, gather, self._hear, silence_seconds)
            self._take_over_process()

    def end_run(self) -> None:
        """The run is over, with its hooks, in whatever way."""
        self._in_run = False

    def conclude(self, error: BaseException) -> BaseException:
        """The main thread has an error; returns it, or the one of another rank that it follows from."""
        self.num_failed_runs += 1
        self._ended.set()  # from here on nothing is raised in the main thread
        chain = list(chain_of(error))
        peer = next((e for e in chain if isinstance(e, PeerError)), None)
        if peer is not None:
            return peer
        pending = self._pending
        if pending is not None and isinstance(error, (KeyboardInterrupt, SystemExit)):
            return error
        if pending is not None and self._was_stopped:  # and code has caught that, such as a dry run
            return _raised_for(pending, self._rank)
        if any(_is_lost_connection(e) for e in chain):
            other = self._failure_of_others(_ORDER_SECONDS)
            if other is not None:
                return _raised_for(other, self._rank)
        self._report(error)
        return error

    # ------------------------------------------------------------------ news

    def _report(self, error: BaseException) -> None:
        self._own = Failure(
            rank=self._rank,
            run=self._run + (not self._in_run),  # between two runs: the others may have begun the next
            summary=_summary(error),
            traceback=_shorten(_traceback_of(error)[0]),
            is_interrupt=isinstance(error, KeyboardInterrupt),
            exit_code=_exit_code(error),
        )
        if self._lifeline is not None:
            self._lifeline.tell(self._own)

    def _hear(self, failure: Failure) -> None:
        """A rank has failed, this one or another; this one, too, may hear that it is lost, when it goes on."""
        with self._news:
            is_first = not any(known.run == failure.run for known in self._failures)
            self._failures.append(failure)
            self._news.notify_all()
        if is_first and self._is_news(failure) and failure.run >= self._run:
            threading.Thread(target=self._stop_main, args=(failure,), name="fxpipe-failure", daemon=True).start()

    def _first(self) -> Failure | None:
        """The run's first failure of all ranks."""
        return next((failure for failure in self._failures if failure.run >= self._run), None)

    def _is_news(self, failure: Failure) -> bool:
        """Returns True if this rank did not know."""
        return failure.rank != self._rank or failure.is_loss

    def _failure_of_others(self, seconds: float) -> Failure | None:
        with self._news:
            self._news.wait_for(lambda: self._first() is not None, seconds)
            first = self._first()
        return first if first is not None and self._is_news(first) else None

    # ------------------------------------------------------------------ stopping the main thread

    def _stop_main(self, failure: Failure) -> None:
        heard = time.monotonic()
        main = threading.main_thread().ident
        self._let_it_fail(failure, heard)
        self._handled_until = heard + _HANDLING_SECONDS
        self._pending = failure
        while time.monotonic() < heard + _LAST_SECONDS and not self._ended.is_set() and self._run <= failure.run:
            if _WAKE is not None and main is not None:
                signal.pthread_kill(main, _WAKE)
            if not self._ended.wait(0.2) and not self.connections.are_shut:
                self.connections.shut()
        # Hooks that other ranks' failure has called may wait for those ranks.
        while time.monotonic() < heard + _LAST_SECONDS:
            if self._own is not None or not self._in_run or self._run > failure.run:
                return
            time.sleep(0.1)
        self._print_consequence(failure)
        _end_workers()
        os._exit(1)

    def _let_it_fail(self, failure: Failure, heard: float) -> None:
        """Waits while the main thread may be about to fail by itself, from the same cause."""
        if failure.rank == self._rank:
            return  # it was stopped, and the others have gone long ago
        if failure.is_interrupt:
            self._ended.wait(0.3)
            return
        before = _main_thread_seconds()
        while time.monotonic() < heard + _BUSY_SECONDS and not self._ended.wait(0.25):
            now = _main_thread_seconds()
            if time.monotonic() > heard + _WAITING_SECONDS and now - before < 0.02:
                return
            before = now

    def _wake(self, signum: int, frame: FrameType | None) -> None:
        """Raises in the main thread what another rank's failure means here."""
        # What a finalizer raises is printed and forgotten; the next signal finds the thread elsewhere.
        in_finalizer = frame is not None and (frame.f_code.co_name == "__del__" or frame.f_code.co_filename == weakref.__file__)
        is_handling = sys.exception() is not None and time.monotonic() < self._handled_until
        if self._pending is not None and not self._ended.is_set() and not in_finalizer and not is_handling:
            self._was_stopped = True
            raise _raised_for(self._pending, self._rank)

    def _leave(self) -> None:
        """At the end of the process."""
        if os.getpid() != self._owner:
            return
        # What has ended the program came by a hook of the user's that does not lead here.
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        if error is not None and self._own is None:
            self.conclude(error)
        if error is not None and self._own is not None:
            self._tell_done()
        if self.knows_failure:
            _end_workers()
        if self._lifeline is not None:
            self._lifeline.leave()

    # ------------------------------------------------------------------ what the user sees

    def _take_over_process(self) -> None:
        self._first_hook, sys.excepthook = sys.excepthook, self._uncaught
        if _WAKE is not None and threading.current_thread() is threading.main_thread():
            signal.signal(_WAKE, self._wake)
        if self._lifeline is not None:
            atexit.register(self._leave)

    def take_over_hook(self) -> None:
        """Has uncaught errors come here first, also where user code has put a hook in this one's place."""
        if self._is_connected and without_shortening(sys.excepthook) != self._uncaught:
            self._users_hook, sys.excepthook = sys.excepthook, self._uncaught

    def _uncaught(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        """In place of ``sys.excepthook``: an error that ends the program."""
        if self._is_telling or os.getpid() != self._owner:  # the user's hook passes it on; or it is a forked process's
            self._first_hook(kind, error, where)
            return
        last = error
        if not isinstance(error, PeerError) and self._own is None:
            error = self.conclude(error)  # outside a run
        first = self._first()
        if isinstance(error, PeerError) and first is not None:
            self._print_consequence(first, f"stopped because {first.sentence}{_afterwards(last, first)}")
            return
        other = self._failure_of_others(_ORDER_SECONDS)
        if other is not None and self._own is not None and other.summary == self._own.summary:
            self._print_consequence(other, f"the same error{_afterwards(last, other)}")
            return
        self._is_telling = True
        try:
            self._print(error, where)
        finally:
            self._is_telling = False
            self._tell_done()
        # Launchers kill what is left, and others may have errors of their own to tell.
        for rank in {failure.rank for failure in self._failures if failure.run >= self._run and failure.traceback}:
            if self._lifeline is not None and rank != self._rank:
                self._lifeline.wait_done(rank, _TOLD_SECONDS)

    def _print(self, error: BaseException, where: TracebackType | None) -> None:
        text, can_be_printed = _traceback_of(error)
        if can_be_printed:
            (self._users_hook or self._first_hook)(type(error), error, where)
        else:  # Python's own hook would stop in the middle
            print(text, file=sys.stderr)
        sys.stderr.flush()

    def _tell_done(self) -> None:
        if self._lifeline is not None and not self._has_told:
            self._has_told = True
            self._lifeline.tell_done()

    def _print_consequence(self, failure: Failure, what: str | None = None) -> None:
        told = self._lifeline is not None and self._lifeline.wait_done(failure.rank, _TOLD_SECONDS)
        speaker = 0 if failure.rank != 0 else 1  # one of those that are left
        lines = [] if told or not failure.traceback or self._rank != speaker else [f"[rank {failure.rank}] {failure.traceback}"]
        what = what or f"stopped because {failure.sentence}"
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            print("".join(lines) + f"[rank {self._rank}] {what}", file=sys.stderr, flush=True)


def _end_workers() -> None:
    """Ends the workers of a dataloader, which would outlive this process if it is killed."""
    if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises that a worker was killed
    for child in multiprocessing.active_children():
        child.kill()


def _raised_for(failure: Failure, rank: int) -> BaseException:
    """Returns the exception to raise on a rank for another's failure, or for the loss of its own connection."""
    if failure.is_interrupt:
        return KeyboardInterrupt()
    if failure.exit_code is not None:
        return SystemExit(failure.exit_code)
    what = "Another rank of the pipeline failed." if failure.rank != rank else "The other ranks have exited without this one."
    error = PeerError(what, where=f"rank {failure.rank}", observed=failure.summary)
    if failure.traceback:
        error.add_note(f"Its traceback:\n{failure.traceback.rstrip()}")
    return error


def _summary(error: BaseException) -> str:
    lines = text_of(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _afterwards(error: BaseException, failure: Failure) -> str:
    """Describes further failures after the first one, such as of a hook for exceptions."""
    own = takewhile(lambda one: not isinstance(one, PeerError) and _summary(one) != failure.summary, chain_of(error))
    return "".join(f"; then {_summary(one)}" for one in reversed(list(own)) if not _is_lost_connection(one))


def _traceback_of(error: BaseException) -> tuple[str, bool]:
    """An error as Python prints it; and whether it does, or fails in what the error's class has made of itself."""
    try:
        return printable("".join(traceback.format_exception(error))), True
    except BaseException as why:
        frames = "".join(traceback.format_tb(interpreters(error, "__traceback__")))
        said = f"{type(error).__name__}: {text_of(error)} (the traceback could not be printed: {type(why).__name__})"
        return f"Traceback (most recent call last):\n{printable(frames)}{said}\n", False


def _shorten(text: str) -> str:
    half = _MAX_TRACEBACK // 2
    return text if len(text) <= 2 * half else f"{text[:half]}\n...\n{text[-half:]}"


def _exit_code(error: BaseException) -> int | None:
    if not isinstance(error, SystemExit):
        return None
    return 0 if error.code is None else error.code if isinstance(error.code, int) else 1


def _is_lost_connection(error: BaseException) -> bool:
    """Returns True if the error only says that a neighbour has gone; torch has no type for that with gloo."""
    if isinstance(error, (DistBackendError, DistNetworkError)):
        return True
    return type(error) is RuntimeError and any(
        word in text_of(error) for word in ("Connection closed by peer", "Connection reset", "Broken pipe", "gloo")
    )


def _main_thread_seconds() -> float:
    """Processor time of the main thread, to tell one that computes from one that waits."""
    main = threading.main_thread().ident
    clock = getattr(time, "pthread_getcpuclockid", None)
    return 0.0 if clock is None or main is None else time.clock_gettime(clock(main))
