"""Messages between ranks over the lifeline: a line of JSON each. An empty line is a heartbeat."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import TypeAlias, get_type_hints

# Longer than any traceback that is sent, with every character escaped.
_MAX_LINE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank stops.

    Attributes:
        rank: The global rank.
        run: Number of the run in which it happened, counted alike on every rank; the last there can be for a rank that is lost.
        summary: What happened, one line.
        traceback: The whole of it, as Python prints it; empty where there is none.
        is_interrupt: Whether it is a KeyboardInterrupt.
        exit_code: The code of a ``sys.exit`` by user code; None for anything else.
        is_silence: Whether others have found that the rank does not answer.
    """

    rank: int
    run: int
    summary: str
    traceback: str = ""
    is_interrupt: bool = False
    exit_code: int | None = None
    is_silence: bool = False

    @property
    def is_loss(self) -> bool:
        """True if others have found it: the rank has died, or does not answer."""
        return self.run == sys.maxsize

    @property
    def sentence(self) -> str:
        """Describes the event and its place."""
        return f"rank {self.rank} {'' if self.is_silence else 'failed: '}{self.summary}"


def death(rank: int) -> Failure:
    """The failure of a rank whose connection is closed without a word."""
    why = "the process died (killed by a signal, out of memory, or os._exit)"
    return Failure(rank=rank, run=sys.maxsize, summary=why)


def silence(rank: int, seconds: float) -> Failure:
    """The failure of a rank that has not been heard of for a time."""
    why = f"has not answered for {seconds:g} s: it is stopped (SIGSTOP) or its machine is unreachable"
    return Failure(rank=rank, run=sys.maxsize, summary=why, is_silence=True)


@dataclass(frozen=True)
class Done:
    """A rank has told the user why it stops."""

    rank: int


@dataclass(frozen=True)
class Left:
    """A rank ends its program in order."""

    rank: int


@dataclass(frozen=True)
class Decision:
    """A rank records a step anew in a batch, or has a graph of it; see ``distributed.decisions``."""

    rank: int
    batch: int
    records: bool


News: TypeAlias = Failure | Done | Left | Decision
_TYPES = {kind.__name__: (kind, get_type_hints(kind)) for kind in (Failure, Done, Left, Decision)}


def encode(news: News) -> bytes:
    """The line that says it."""
    return json.dumps({type(news).__name__: dataclasses.asdict(news)}).encode() + b"\n"


def decode(line: bytes) -> News | None:
    """Parses a line; returns None if it is no message."""
    try:
        ((name, values),) = json.loads(line).items()
        kind, types = _TYPES[name]
        found: News = kind(**values)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # other JSON, or none
        return None
    return found if all(isinstance(value, types[key]) for key, value in values.items()) else None


class Lines:
    """Puts what arrives in pieces together to lines. One that does not end is left out: memory does."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_left_out = False

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are whole with this piece."""
        *lines, rest = (self._rest + data).split(b"\n")
        if lines and self._is_left_out:
            del lines[0]
            self._is_left_out = False
        self._is_left_out = self._is_left_out or len(rest) > _MAX_LINE_BYTES
        self._rest = b"" if self._is_left_out else rest
        return lines
