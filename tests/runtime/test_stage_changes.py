"""What a forward changes by itself: with each call, once, or never; and whether it can be put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_fxpipe.errors import UnsupportedError
from lightning_fxpipe.runtime.stage_changes import StageChanges


class Layer(nn.Module):
    def __init__(self, num_trained: int = 4) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.ones(num_trained))
        self.frozen = nn.Parameter(torch.arange(4.0), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.calls, self._calls, self.length, self.has_run = 0, 0, 0, False
        self.results: list[int] = []

    def change(self, what: str) -> None:
        """As a forward would."""
        if what == "data":
            self.frozen.data.mul_(0.9)
        elif what == "buffer":
            self.seen += 1
        elif what == "norm":
            self.norm.running_mean.add_(1)
        elif what == "list":
            self.results.append(1)
        elif what == "flag":
            self.has_run = True
        elif what == "length":
            self.length = 7
        elif what == "nan":
            self.frozen.data.fill_(float("nan"))
        elif what == "decay":
            self.trained.data.mul_(0.999)
        elif what == "renorm":
            self.trained.data = torch.renorm(self.trained.data[None], p=2, dim=0, maxnorm=0.3)[0]
        else:
            setattr(self, what, getattr(self, what) + 1)


def seen_after(what: str, layer: Layer) -> StageChanges:
    """Two microbatches."""
    changes = StageChanges(nn.Sequential(layer))
    layer.change(what)
    changes.note_first(nn.Module())
    layer.change(what)
    return changes


@pytest.mark.parametrize(
    ("what", "name"), [("calls", "0.calls"), ("_calls", "0._calls"), ("list", "0.results"), ("data", "0.frozen")]
)
def test_what_each_call_changes_is_a_reason_and_is_put_back(what: str, name: str) -> None:
    layer = Layer()
    changes = seen_after(what, layer)
    assert name in str(changes.reason())
    changes.restore()
    assert (layer.calls, layer._calls, layer.results) == (0, 0, [])
    assert layer.frozen.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("what", ["flag", "length", "buffer", "norm", "renorm"])
def test_what_changes_once_and_buffers_are_none(what: str) -> None:
    changes = seen_after(what, Layer())
    assert changes.reason() is None
    assert changes.changed() == (["0.seen"] if what == "buffer" else [])


@pytest.mark.parametrize("what", ["calls", "decay"])
def test_what_counts_in_one_of_several_stages_is_seen(what: str) -> None:
    """All microbatches go through a rank's stage before the next of its stages gets any."""
    first, second = Layer(), Layer()
    changes = StageChanges(nn.Sequential(first, second))
    for layer, other, change in ((first, second, what), (second, first, "flag")):
        layer.change(change)
        changes.note_first(layer, [other])
        layer.change(change)
    if what == "calls":
        assert "0.calls" in str(changes.reason())
    else:
        with pytest.raises(UnsupportedError, match=r"(?s)changes parameters.*0\.trained"):
            changes.reason()


def test_what_begins_in_a_later_stage_of_a_rank_is_none() -> None:
    first, second = Layer(), Layer()
    changes = StageChanges(nn.Sequential(first, second))
    changes.note_first(first, [second])
    second.change("flag")
    changes.note_first(second, [first])
    second.change("flag")
    assert changes.reason() is None


def test_buffers_are_put_back() -> None:
    layer = Layer()
    changes = seen_after("buffer", layer)
    changes.restore()
    assert layer.seen.tolist() == [0, 0]


def test_frozen_parameters_of_which_there_are_no_copies_are_an_error() -> None:
    """What adapters are put around can be all memory there is."""
    changes = seen_after("data", Layer(num_trained=1))
    with pytest.raises(UnsupportedError, match=r"(?s)The model's forward changes parameters.*0\.frozen"):
        changes.reason()


def test_parameters_that_train_and_are_moved_with_each_call_are_an_error() -> None:
    changes = seen_after("decay", Layer())
    with pytest.raises(UnsupportedError, match=r"(?s)The model's forward changes parameters.*0\.trained.*num_microbatches=1"):
        changes.reason()


def test_rows_of_an_embedding_are_bounded_by_each_microbatch() -> None:
    """Each looks up rows of its own."""
    embedding = nn.Embedding(6, 4, max_norm=0.1)
    changes = StageChanges(nn.Sequential(embedding))
    embedding(torch.arange(3))
    changes.note_first(nn.Module())
    embedding(torch.arange(3, 6))
    assert changes.reason() is None


def test_parameters_that_are_no_numbers_before_and_after_have_not_changed() -> None:
    layer: Any = Layer()
    layer.change("nan")
    assert seen_after("nan", layer).reason() is None
