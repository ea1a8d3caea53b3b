"""A call is recorded twice before its graph is used; an earlier trace of the call does for one of the recordings."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_fxpipe.errors import TraceError
from lightning_fxpipe.tracing import trace as trace_module
from lightning_fxpipe.tracing.signals import Learned, MustStayWhole
from lightning_fxpipe.tracing.trace import TracedRegion, trace_region
from tests.traces import TwoLayers, batch, call_of, names
from tests.tracing.test_trace_refuses import Around, Gate


class Scaled(Around):
    """Has a number that is a constant of the graph, a flag that decides a branch, and a module that cannot be opened."""

    def __init__(self) -> None:
        super().__init__(Gate())
        self.scale, self.is_doubled = 2.0, False

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x) * self.scale
        return h + h if self.is_doubled else h


@pytest.fixture
def count_recordings(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns how many there have been."""
    record, made = trace_module._record, []

    def counted(*args: Any, **options: Any) -> TracedRegion:
        made.append(args)
        return record(*args, **options)

    monkeypatch.setattr(trace_module, "_record", counted)
    return lambda: len(made)


def test_what_was_learned_need_not_be_found_out_again(count_recordings: Callable[[], int]) -> None:
    """A step whose state has changed is traced again: one recording, in place of two and those that ended before their time."""
    model, call = Scaled(), call_of(batch())
    earlier = trace_region(model, call, opened=("inner",))
    assert count_recordings() == 3
    again = trace_region(model, call, opened=("inner",), earlier=earlier)
    assert count_recordings() == 4
    assert names(again) == names(earlier)
    assert again.kept_whole == earlier.kept_whole != {}


@pytest.mark.parametrize(("name", "value"), [("scale", 3.0), ("is_doubled", True)])
def test_a_graph_that_is_not_the_earlier_one_is_recorded_twice(
    count_recordings: Callable[[], int], name: str, value: Any
) -> None:
    model, call = Scaled(), call_of(batch())
    earlier = trace_region(model, call, opened=("inner",))
    before = count_recordings()
    setattr(model, name, value)
    again = trace_region(model, call, opened=("inner",), earlier=earlier)
    assert count_recordings() == before + 2
    assert again.recording.calls == trace_region(model, call, opened=("inner",)).recording.calls != earlier.recording.calls


def test_an_earlier_trace_of_another_signature_is_not_used(count_recordings: Callable[[], int]) -> None:
    model, call = Scaled(), call_of(batch())
    earlier = trace_region(model, call, opened=("inner",))
    before = count_recordings()
    trace_region(model.eval(), call, opened=("inner",), earlier=earlier)
    assert count_recordings() == before + 3


def test_chance_is_found_where_an_earlier_trace_was_without_it() -> None:
    class Later(TwoLayers):
        noise = 0

        def between(self, h: Tensor) -> Tensor:
            return h * (1 + secrets.randbelow(10**12) * self.noise)

    model, call = Later(), call_of(batch())
    earlier = trace_region(model, call, opened=())
    model.noise = 1
    with pytest.raises(TraceError, match="a different path each time"):
        trace_region(model, call, opened=(), earlier=earlier)


def test_modules_of_a_class_that_were_opened_together_are_kept_whole_together() -> None:
    """Each would end a recording of its own."""
    model = nn.ModuleDict({"a": Gate(), "b": Gate(), "c": TwoLayers(), "d": Gate()})
    learned = Learned()
    learned.open(["a", "b", "c"])
    learned.keep_whole(MustStayWhole("a", "its Python reads a value", "line 1"), model)
    assert learned.kept_whole == dict.fromkeys("ab", "its Python reads a value, line 1")
    learned.keep_whole(MustStayWhole("d", "another reason", None), model)
    assert learned.kept_whole["d"] == "another reason"


def test_what_made_no_difference_in_another_state_may_make_one_now() -> None:
    learned = Learned(harmless=frozenset({(("self",), "b")}), settled={("self",): 1}, kept_whole={"a": "a reason"})
    same, other = (learned.known_again(set(), has_same_state=is_same) for is_same in (True, False))
    assert (same.harmless, same.settled) == (learned.harmless, learned.settled)
    assert (other.harmless, other.settled) == (frozenset(), {})
    assert same.kept_whole == other.kept_whole == learned.kept_whole
