"""Messages speak of the user's code: no nodes, symbols or names of torch's inner errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from lightning_fxpipe.errors import FxPipeError
from lightning_fxpipe.planner.step_plan import make_plan
from lightning_fxpipe.reporting.wording import argument_words, node_words, without_symbols


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("shapes (s97x5 and 32x32)", "shapes (2x5 and 32x32)"),
        ("size=(s97, 32)", "size=(2, 32)"),
        ("2*s97 + u0", "2*2 + ?"),
        ("s3 of layers1 and s97s", "? of layers1 and 2s"),
        ("/tmp/runs97/us0.py", "/tmp/runs97/us0.py"),
    ],
)
def test_symbols_are_the_sizes_of_the_example(text: str, expected: str) -> None:
    assert without_symbols(text, {"s97": 2}) == expected


def test_a_node_is_the_call_that_it_was_recorded_from() -> None:
    graph = fx.Graph()
    x = graph.placeholder("region_input_0")
    view = graph.call_method("view", (x, -1))
    view.meta["source"] = "net.py:3"
    assert node_words(x) == "an input of the pipelined call"
    assert node_words(view) == "the result of view (net.py:3)"
    assert node_words(graph.call_function(torch.add, (x, x))) == "the result of add"
    assert node_words(graph.call_module("net.0", (x,))) == "net.0"


def test_arguments_are_short() -> None:
    assert argument_words(torch.ones(3)) == "a tensor"
    assert argument_words(None) == "None"
    assert argument_words(list(range(100))) == "a list"


class Blocks(nn.Module):
    """Two blocks, and code between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.between(self.blocks[0](x)))


def looks(x: Tensor) -> Tensor:
    return x * x.sum().item()


def branches(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def selects(x: Tensor) -> Tensor:
    return x[x[:, 0] > 0]


def mismatches(x: Tensor) -> Tensor:
    return x @ torch.ones(5, 6)


def lists(x: Tensor) -> Tensor:
    return x * sum(x.tolist()[0])


def counts(x: Tensor) -> Tensor:
    return x[: int((x > 0).sum())]


_INNER = re.compile(
    r"(?<![\w/])[su]\d+\b|TensorKey|Template\(|StructureSpec|FakeTensor|DataDependent|GuardOn|Node\(|region_input"
)


@pytest.mark.parametrize("between", [looks, branches, selects, mismatches, lists, counts])
def test_refusals_name_nothing_of_the_machinery(between: Any) -> None:
    with pytest.raises(FxPipeError) as caught:
        make_plan(Blocks(between), torch.randn(7, 6), num_stages=7)
    assert not _INNER.search(str(caught.value)), caught.value
    assert re.search(r"/test_wording.py|blocks|place", str(caught.value))
