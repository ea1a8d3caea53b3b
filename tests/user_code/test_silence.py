"""Nothing that user code says in a dry run is heard, and nothing of it is lost for the real run."""

from __future__ import annotations

import logging
import sys
import threading
import warnings

import pytest
import torch

from lightning_fxpipe.user_code.silence import silencing


def speak() -> None:
    print("printed")
    print("complained", file=sys.stderr)
    sys.stdout.write("written\n")
    logging.getLogger("users").warning("logged")
    warnings.warn("warned", stacklevel=1)


def test_neither_prints_nor_records_nor_warnings_come_out(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    with silencing():
        speak()
    assert capsys.readouterr() == ("", "")
    assert not caplog.records
    assert not recwarn.list


def test_what_was_silenced_is_said_when_it_really_runs(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        with silencing():
            speak()
        speak()
        with silencing():
            speak()
        speak()
    assert capsys.readouterr() == ("printed\nwritten\n" * 2, "complained\n" * 2)
    assert caplog.messages == ["logged"] * 2
    assert [str(warning.message) for warning in shown] == ["warned"]  # as often as without dry runs


def test_a_warning_made_an_error_is_one_in_the_real_run_only() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with silencing():
            speak()
        with pytest.raises(UserWarning, match="warned"):
            speak()


def test_what_torch_says_only_once_is_left_for_the_real_run() -> None:
    code = (
        "import torch, warnings\n"
        "from lightning_fxpipe.user_code.silence import silencing\n"
        "def speak(): float(torch.ones((), requires_grad=True))\n"
        "with warnings.catch_warnings(record=True) as shown:\n"
        "    warnings.simplefilter('always')\n"
        "    with silencing(): speak()\n"
        "    assert not shown, shown\n"
        "    speak(); speak()\n"
        "assert len(shown) == 1, shown\n"
    )
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_all_is_put_back() -> None:
    before = sys.stdout, sys.stderr, logging.Logger.handle, list(warnings.filters), torch.is_warn_always_enabled()
    with silencing(), silencing():
        pass
    assert (sys.stdout, sys.stderr, logging.Logger.handle, warnings.filters, torch.is_warn_always_enabled()) == before


def test_filters_that_user_code_sets_stay() -> None:
    with warnings.catch_warnings():
        with silencing():
            warnings.filterwarnings("ignore", message="of the user's")
        assert any(entry[1] is not None and entry[1].pattern == "of the user's" for entry in warnings.filters)


def test_other_threads_are_heard(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    def draw() -> None:
        print("progress")
        logging.getLogger("users").warning("alive")

    with silencing():
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
    assert capsys.readouterr().out == "progress\n"
    assert caplog.messages == ["alive"]


def test_what_the_package_decides_in_a_dry_run_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    with silencing(), caplog.at_level(logging.DEBUG, logger="lightning_fxpipe"):
        logging.getLogger("lightning_fxpipe").debug("kept whole")
    assert caplog.messages == ["kept whole"]


def test_an_error_brings_what_was_printed_before_it() -> None:
    def fail() -> None:
        with silencing():
            print("the cause of it")
            raise ValueError("a mistake")

    with pytest.raises(ValueError, match="mistake") as caught:
        fail()
    assert any("the cause of it" in note for note in caught.value.__notes__)
