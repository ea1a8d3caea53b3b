"""Collections while a plan is made go through what it makes; what was there before is frozen, and free again afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fxpipe import FxPipeStrategy, make_plan
from lightning_fxpipe.planner import step_plan
from lightning_fxpipe.strategy import run_plan
from lightning_fxpipe.tracing.discovery import first_regions, regions
from lightning_fxpipe.tracing.garbage import collecting_what_is_new
from tests.lit import make_trainer
from tests.ranks.runs import Net


class Node:
    """Something that Python's collector has to find."""


def is_collected(node: Any) -> bool:
    """Whether a collection would go through it."""
    return any(one is node for one in gc.get_objects())


@pytest.fixture(autouse=True)
def _unfrozen() -> Iterator[None]:
    assert gc.get_freeze_count() == 0
    yield
    gc.unfreeze()


def test_a_collection_leaves_out_what_was_there_and_takes_what_is_new() -> None:
    old = Node()
    with collecting_what_is_new():
        new = Node()
        assert not is_collected(old)
        assert is_collected(new)
        ring: list[Any] = [Node()]
        ring.append(ring)
        before = gc.collect()
        del ring
        assert gc.collect() >= 1, before
    assert is_collected(old)
    assert gc.get_freeze_count() == 0


def test_an_error_leaves_nothing_frozen() -> None:
    with pytest.raises(ValueError, match="why not"), collecting_what_is_new():
        raise ValueError("why not")
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_has_frozen_stays_so() -> None:
    old = Node()
    gc.freeze()
    with collecting_what_is_new(), collecting_what_is_new():
        pass
    assert gc.get_freeze_count()
    assert not is_collected(old)


def test_a_plan_is_made_so(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        frozen.append(gc.get_freeze_count())
        return regions(*args, **kwargs)

    monkeypatch.setattr(step_plan, "regions", noted)
    make_plan(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(2, 4), num_stages=2)
    assert len(frozen) == 1
    assert frozen[0]
    assert gc.get_freeze_count() == 0


def test_the_strategy_plans_so(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        frozen.append(gc.get_freeze_count())
        return first_regions(*args, **kwargs)

    monkeypatch.setattr(run_plan, "first_regions", noted)
    make_trainer(strategy=FxPipeStrategy(num_stages=2), devices=1, fast_dev_run=True).fit(Net())
    assert len(frozen) == 1
    assert frozen[0]
    assert gc.get_freeze_count() == 0
