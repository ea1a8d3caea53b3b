"""The errors' messages (four labelled parts), their attributes, and their way through pickle between processes."""

from __future__ import annotations

import copy
import pickle

import pytest

import lightning_fxpipe
from lightning_fxpipe.errors import (
    BatchError,
    FxPipeError,
    PartitionError,
    PeerError,
    TraceError,
    UnsupportedError,
)

KINDS = [FxPipeError, TraceError, PartitionError, BatchError, UnsupportedError, PeerError]


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
