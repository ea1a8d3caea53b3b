"""An error is told as this package's own where its code has raised it, and as the user's where it has only passed a call on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fxpipe.errors import TraceError
from lightning_fxpipe.reporting.own_faults import is_own_fault, own_fault_words
from lightning_fxpipe.tracing.graph_writer import GraphWriter
from tests.traces import batch, trace

_OF_PACKAGE: dict[str, Any] = {"__name__": "lightning_fxpipe.somewhere"}
exec(
    """
def looks_up(*unused):
    return {}["a node"]
def passes_on(function, *args):
    return function(*args)
""",
    _OF_PACKAGE,
)


def mistaken(*args: Any) -> None:
    raise KeyError("of the user")


def error_of(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # what is raised is the question
        call()
    return caught.value


def test_what_the_package_raises_is_its_own() -> None:
    error = error_of(_OF_PACKAGE["looks_up"])
    assert is_own_fault(error)
    words = own_fault_words(error)
    assert "<string>:3 (looks_up)" in str(words["observed"])
    assert f"torch {torch.__version__.split('+')[0]}" in str(words["todo"])


def test_what_the_users_code_raises_is_not_even_if_the_package_calls_it() -> None:
    assert not is_own_fault(error_of(lambda: _OF_PACKAGE["passes_on"](mistaken)))


def test_what_torch_raises_in_a_call_that_the_package_passes_on_is_the_users() -> None:
    """torch's functions of C have no frame: the last one is this package's."""
    assert not is_own_fault(error_of(lambda: _OF_PACKAGE["passes_on"](torch.mm, torch.ones(2, 3), torch.ones(2, 3))))


def test_a_fault_of_the_recorder_is_not_told_as_one_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x)

    monkeypatch.setattr(GraphWriter, "_append", _OF_PACKAGE["looks_up"])
    with pytest.raises(TraceError, match="Internal error of lightning_fxpipe") as caught:
        trace(Model(), batch())
    assert "test_own_faults.py" in str(caught.value.where)
    assert "KeyError" in str(caught.value.observed)
    assert "graph_writer.py" in str(caught.value.observed) or "record.py" in str(caught.value.observed)
