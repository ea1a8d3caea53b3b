"""Whether there is room for whole copies of a module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_fxpipe.distributed.topology import Placement, Topology
from lightning_fxpipe.stages import gather, memory


def alone() -> Topology:
    return Topology(group=None, control_group=None, rank=0, placement=Placement(num_ranks=1), device=torch.device("cpu"))


def test_copies_are_made_where_most_of_the_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 700)
    assert gather.has_room_for_copies(280, 2, alone())
    assert not gather.has_room_for_copies(281, 2, alone())


def test_where_nobody_says_how_much_there_is_copies_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    assert gather.has_room_for_copies(2**60, 8, alone())


def test_a_parameter_comes_back_as_frozen_as_its_placeholder() -> None:
    """A callback freezes and thaws what it finds, which on this rank is the placeholder."""
    for requires_grad in (True, False):
        placeholder = nn.Parameter(torch.empty(2, device="meta"), requires_grad=requires_grad)
        parameter = nn.Parameter(torch.empty(2), requires_grad=not requires_grad)
        filled = gather._fill(placeholder, parameter, torch.ones(2))
        assert filled is parameter
        assert filled.requires_grad is requires_grad
        assert filled.tolist() == [1, 1]
