"""Passes that go one way: what is received, computed and sent when. ``tests/ranks/test_schedule.py`` has them on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fxpipe.schedules import one_way
from lightning_fxpipe.schedules.one_way import OneWay
from lightning_fxpipe.schedules.places import Place
from lightning_fxpipe.stages.build import TensorSpec

SPEC = TensorSpec(shape=(2,), dtype=torch.float32, requires_grad=False)


class Messages:
    """In place of ``torch.distributed``: notes who does what; each message brings its number."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._num_asked = 0

    def irecv(self, tensor: Tensor, *, group: Any, group_src: int) -> Ending:
        index, self._num_asked = self._num_asked, self._num_asked + 1
        self.events.append(f"ask {group_src} for {index}")
        return Ending(self, f"{index} is here", lambda: tensor.fill_(index))

    def isend(self, tensor: Tensor, *, group: Any, group_dst: int) -> Ending:
        name = f"{int(tensor[0])} to {group_dst}"
        self.events.append(f"send {name}")
        return Ending(self, f"{name} has left")


class Ending:
    def __init__(self, messages: Messages, words: str, happen: Any = lambda: None) -> None:
        self._messages, self._words, self._happen = messages, words, happen

    def wait(self) -> None:
        self._happen()
        self._messages.events.append(self._words)


def events_of(
    monkeypatch: pytest.MonkeyPatch, device: str, *, index: int = 1, is_last: bool = False, ahead_bytes: int = 0
) -> list[str]:
    """What happens on a rank of a pass of three microbatches, of eight bytes each."""
    messages = Messages()
    monkeypatch.setattr(one_way, "AHEAD_BYTES", ahead_bytes)
    monkeypatch.setattr(one_way, "dist", messages)
    received = (SPEC,) if index else ()
    place = Place(stage=7, index=index, received=received, sent=None if is_last else (SPEC,))

    def run(stage: int, number: int, tensors: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        messages.events.append(f"compute {number}")
        assert stage == 7
        assert [tensor.tolist() for tensor in tensors if not tensor.is_meta] == (
            [[number] * 2] if index and device == "cpu" else []
        )
        return torch.zeros(()) if is_last else (torch.full((2,), 10.0 + number),)

    OneWay(place, num_microbatches=3, device=torch.device(device), group=None, noting=None).step(run)
    return messages.events


def test_between_cpus_the_next_message_arrives_while_one_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert events_of(monkeypatch, "cpu") == [
        *("ask 0 for 0", "ask 0 for 1", "0 is here", "compute 0", "send 10 to 2"),
        *("ask 0 for 2", "1 is here", "compute 1", "send 11 to 2"),
        *("2 is here", "compute 2", "send 12 to 2"),
        *("10 to 2 has left", "11 to 2 has left", "12 to 2 has left"),
    ]


@pytest.mark.parametrize(("ahead_bytes", "num_asked"), [(15, 2), (16, 3), (1000, 3)])
def test_between_cpus_small_messages_are_asked_for_long_before(
    monkeypatch: pytest.MonkeyPatch, ahead_bytes: int, num_asked: int
) -> None:
    """Their sender need not wait to hear that they may come."""
    events = events_of(monkeypatch, "cpu", ahead_bytes=ahead_bytes)
    assert events[: num_asked + 1] == [*(f"ask 0 for {number}" for number in range(num_asked)), "0 is here"]
    assert [event for event in events if event.startswith("ask")] == ["ask 0 for 0", "ask 0 for 1", "ask 0 for 2"]


def test_between_other_devices_messages_are_in_the_order_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a message that is sent would wait for one that was asked for before, which may be a microbatch away."""
    assert events_of(monkeypatch, "meta", ahead_bytes=1000)[:6] == [
        *("ask 0 for 0", "0 is here", "compute 0", "send 10 to 2"),
        *("ask 0 for 1", "1 is here"),
    ]


def test_the_first_place_receives_nothing_and_the_last_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = events_of(monkeypatch, "cpu", index=0)
    last = events_of(monkeypatch, "cpu", index=2, is_last=True)
    assert first[:4] == ["compute 0", "send 10 to 1", "compute 1", "send 11 to 1"]
    assert last == [*("ask 1 for 0", "ask 1 for 1", "0 is here", "compute 0", "ask 1 for 2"), *last[5:]]
    assert not [event for event in last if event.startswith("send")]
