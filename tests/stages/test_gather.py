"""Whether there is room for whole copies of a module."""

from __future__ import annotations

import pytest
import torch

from lightning_fxpipe.distributed.topology import Topology
from lightning_fxpipe.stages import gather


def alone() -> Topology:
    return Topology(group=None, control_group=None, stage_index=0, num_stages=1, device=torch.device("cpu"))


def test_copies_are_made_where_most_of_the_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "available_memory", lambda: 700)
    assert gather.has_room_for_copies(280, 2, alone())
    assert not gather.has_room_for_copies(281, 2, alone())


def test_where_nobody_says_how_much_there_is_copies_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "available_memory", lambda: None)
    assert gather.has_room_for_copies(2**60, 8, alone())
