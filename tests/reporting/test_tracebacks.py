"""What a user sees of a refusal, and of an error of their own code: the frames of that code."""

from __future__ import annotations

import gc
import logging
import sys
import traceback
import weakref
from typing import Any

import pytest
import torch

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.launch.launcher import run_to_the_end
from lightning_fxpipe.reporting.tracebacks import shorten
from lightning_fxpipe.rng import isolated_rng
from lightning_fxpipe.tracing.signals import RecordError


def refuse() -> None:
    def of_user() -> None:
        try:
            raise RecordError("what the package uses to find its way")
        except RecordError as signal:
            raise UnsupportedError("This cannot be.", todo="Something else.") from signal

    with isolated_rng():  # a frame of the package
        torch.utils.checkpoint.checkpoint(of_user, use_reentrant=False)


def mistake() -> None:
    with isolated_rng():
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 5))


def test_a_refusal_shows_the_users_frames_only(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.DEBUG, logger="lightning_fxpipe"),
        pytest.raises(UnsupportedError) as caught,
    ):
        run_to_the_end(refuse)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    # The first three are left again between here and where the program would end.
    assert names[-2:] == ["refuse", "of_user"]
    assert "checkpoint" not in names
    text = "".join(traceback.format_exception(caught.value))
    assert "find its way" not in text
    assert "torch/utils/checkpoint.py" in caplog.text  # all of it at DEBUG


def test_a_refusal_that_is_raised_again_from_what_it_led_to_comes_out() -> None:
    """Its causes form a circle, and who follows them would never come to an end."""

    def refuse_again() -> None:
        refusal = UnsupportedError("This cannot be.")
        try:
            try:
                raise RecordError("on the way") from refusal
            except RecordError as signal:
                raise refusal from signal
        finally:
            pass

    with pytest.raises(UnsupportedError, match="This cannot be"):
        run_to_the_end(refuse_again)


def test_a_refusal_that_ends_the_program_is_printed_without_machinery(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        run_to_the_end(refuse)
    sys.excepthook(type(caught.value), caught.value, caught.value.__traceback__)
    printed = capsys.readouterr().err
    assert "lightning_fxpipe/" not in printed
    assert "in refuse" in printed
    assert printed.endswith("UnsupportedError: This cannot be.\n  What to do: Something else.\n")


def test_a_refusal_that_is_caught_is_kept_by_nobody() -> None:
    """As in a notebook, or where a script tries other settings: its frames hold the model."""
    refused = []
    for _ in range(3):
        with pytest.raises(UnsupportedError) as caught:
            run_to_the_end(refuse)
        refused.append(weakref.ref(caught.value))
        hook: Any = sys.excepthook
        del caught
    gc.collect()
    assert [each() for each in refused] == [None] * 3
    assert hook.args[0] is sys.__excepthook__  # and not one around another for each


def test_an_error_of_user_code_shows_the_users_frames_only(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's code runs within Lightning's, and calls torch's, which raises."""

    def of_lightning() -> None:
        torch.utils.checkpoint.checkpoint(mistake, use_reentrant=False)

    with caplog.at_level(logging.DEBUG, logger="lightning_fxpipe"), pytest.raises(RuntimeError) as caught:
        run_to_the_end(of_lightning)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-2:] == ["of_lightning", "mistake"]
    assert "torch/utils/checkpoint.py" in caplog.text
    sys.excepthook(type(caught.value), caught.value, caught.value.__traceback__)
    printed = capsys.readouterr().err
    assert "lightning_fxpipe/" not in printed
    assert printed.splitlines()[-1].endswith("shows them at level DEBUG.")


def test_an_error_of_the_package_itself_keeps_all_frames() -> None:
    with pytest.raises(TypeError) as caught:
        run_to_the_end(lambda: isolated_rng(1))  # type: ignore[call-arg]
    assert "<lambda>" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_an_error_that_cannot_be_assigned_to_is_shortened() -> None:
    """Its traceback was assigned, which a frozen dataclass refuses: that refusal came out in its place."""

    class Unchanging(ValueError):
        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError(name)

    with pytest.raises(Unchanging, match="the original") as caught:
        raise Unchanging("the original")
    shorten(caught.value)
