"""How much memory there is for whole copies of a module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_fxpipe import gather
from lightning_fxpipe.topology import Topology


def alone() -> Topology:
    return Topology(group=None, control_group=None, stage_index=0, num_stages=1, device=torch.device("cpu"))


def test_the_smaller_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_of_machine", lambda: 1000)
    monkeypatch.setattr(gather, "_of_container", lambda: 700)
    assert gather.available_memory() == 700
    assert gather.has_room_for_copies(280, 2, alone())
    assert not gather.has_room_for_copies(281, 2, alone())


def test_where_nobody_says_how_much_there_is_copies_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "available_memory", lambda: None)
    assert gather.has_room_for_copies(2**60, 8, alone())


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs Linux")
def test_the_machine_says_what_is_free() -> None:
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    found = gather._of_machine()
    assert found is not None
    assert 0 < found < int(total.split()[1]) * 1024
