"""The errors' messages (four labelled parts), their attributes, and their way through pickle between processes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import traceback
from typing import Any

import pytest

import lightning_fxpipe
from lightning_fxpipe.errors import (
    BatchError,
    FxPipeError,
    PartitionError,
    PeerError,
    ScheduleError,
    TraceError,
    UnsupportedError,
    add_note,
    chain_of,
    set_interpreters,
    text_of,
)

KINDS = [FxPipeError, TraceError, PartitionError, BatchError, ScheduleError, UnsupportedError, PeerError]


def complete(kind: type[FxPipeError]) -> FxPipeError:
    return kind("It broke.", where="stage 1", observed="two", expected="one", todo="Use one.")


def test_message_has_all_parts_in_reading_order() -> None:
    assert str(complete(FxPipeError)) == (
        "It broke.\n  Where: stage 1\n  Observed: two\n  Expected: one\n  What to do: Use one."
    )


def test_part_that_is_absent_or_empty_leaves_no_line() -> None:
    assert str(FxPipeError("It broke.")) == "It broke."
    assert str(FxPipeError("It broke.", observed="two", todo="")) == "It broke.\n  Observed: two"


def test_parts_are_kept_as_attributes() -> None:
    error = complete(TraceError)
    assert (error.what, error.where, error.observed, error.expected, error.todo) == (
        "It broke.",
        "stage 1",
        "two",
        "one",
        "Use one.",
    )


def test_parts_other_than_what_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        FxPipeError("It broke.", "stage 1")  # type: ignore[misc]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_caught_as_the_base_error(kind: type[FxPipeError]) -> None:
    with pytest.raises(FxPipeError, match="It broke"):
        raise complete(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("through", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_pickle_and_copy_keep_kind_message_and_parts(kind: type[FxPipeError], through: object) -> None:
    error = complete(kind)
    back = through(error)  # type: ignore[operator]
    assert type(back) is kind
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_kinds_do_not_catch_each_other() -> None:
    for kind in KINDS[1:]:
        others = tuple(other for other in KINDS[1:] if other is not kind)
        assert not issubclass(kind, others)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_public(kind: type[FxPipeError]) -> None:
    assert getattr(lightning_fxpipe, kind.__name__) is kind
    assert kind.__name__ in lightning_fxpipe.__all__


# ---------------------------------------------------------------------------------------------------- errors of user code


def saying(method: Any) -> BaseException:
    """An error whose ``__str__`` is something."""
    return type("Odd", (Exception,), {"__str__": method})()


class _Words(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise ValueError

    def __format__(self, spec: str) -> str:
        raise ValueError


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (lambda self: _raise(ValueError()), "(no text: its __str__ raised ValueError)"),
        (lambda self: _raise(KeyboardInterrupt()), "(no text: its __str__ raised KeyboardInterrupt)"),
        (lambda self: None, "(no text: its __str__ raised TypeError)"),
        (lambda self: _Words("words"), "words"),
        (lambda self: "half \ud800 a character", "half \\ud800 a character"),
    ],
)
def test_an_error_is_told_of_whatever_its_class_does(method: Any, text: str) -> None:
    told = text_of(saying(method))
    assert told == text
    assert type(told) is str
    told.encode()


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Which cannot be assigned to."""

    what: str = "frozen"


@pytest.mark.parametrize("before", [None, "a note", ("a note",), ["a note"]], ids=str)
def test_a_note_is_added_to_any_error(before: Any) -> None:
    for kind in (Frozen, type("Mute", (Exception,), {"add_note": None})):
        error = kind()
        if before is not None:
            vars(error)["__notes__"] = before
        add_note(error, "another")
        assert vars(error)["__notes__"] == ["a note", "another"][before is None :]
        assert traceback.format_exception_only(error)[-1] == "another\n"


def test_the_chain_of_an_error_is_the_interpreters() -> None:
    """An error may be false, as one that is a container, and its class may have something else for a cause."""
    hiding = property(lambda self: _raise(ValueError()))
    kind = type("Hiding", (Exception,), {"__cause__": hiding, "__context__": hiding, "__len__": lambda self: 0})
    first, second, third = kind("first"), kind("second"), kind("third")
    set_interpreters(second, "__cause__", first)
    set_interpreters(third, "__context__", second)
    set_interpreters(first, "__context__", third)
    assert list(map(id, chain_of(third))) == list(map(id, [third, second, first]))
