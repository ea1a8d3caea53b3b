"""Fixtures that all tests share."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Iterator
from datetime import date
from typing import Any

import pytest
import torch
import torch.distributed as dist
from xdist.scheduler import LoadScopeScheduling

from tests.distributed.pool import RankPool

pytest.register_assert_rewrite("tests.staging")
torch.set_num_threads(1)


# These start processes. They run one after the other: more ranks than cores would only wait for each other.
_WITH_RANKS = ("tests/distributed/", "tests/zoo/test_steps.py", "tests/test_launching.py", "tests/test_readme.py")


# Each change runs another part of the slow tests, so that all have run in so many days, and not only at night.
_SLOW_PARTS = 20


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Today's part of the slow tests is not called slow. With a torch that runs one process only, tests that start ranks are
    skipped."""
    today = date.today().toordinal() % _SLOW_PARTS
    for item in items:
        if item.get_closest_marker("slow") and zlib.crc32(item.nodeid.encode()) % _SLOW_PARTS == today:
            item.own_markers = [marker for marker in item.own_markers if marker.name != "slow"]
    if torch.__version__ < (2, 13):
        for item in items:
            if item.nodeid.startswith(_WITH_RANKS):
                item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__} runs one process"))


class _RanksApart(LoadScopeScheduling):
    """One worker has all tests that start ranks, the others share the rest."""

    def _split_scope(self, nodeid: str) -> str:
        return "ranks" if nodeid.startswith(_WITH_RANKS) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Which worker runs which test."""
    return _RanksApart(config, log)


@pytest.fixture(autouse=True)
def same_excepthook() -> Iterator[None]:
    """Each start of a process group, and each refusal, puts a function of its own around the one that prints errors."""
    before = sys.excepthook
    yield
    sys.excepthook = before


@pytest.fixture(autouse=True)
def no_run_left() -> Iterator[None]:
    """A run in this process leaves its process group, and the rendezvous' port in the environment, for runs that follow.

    The next test may make a group of its own, and a script that it starts would take the port for that of its ranks.
    """
    before, had_group = dict(os.environ), dist.is_initialized()
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    if dist.is_initialized() and not had_group:
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(world_size)``: the session's processes, started when first asked for, anew after a failure."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        pool = pools.get(world_size)
        if pool is None or not pool.is_alive:
            pool = pools[world_size] = RankPool(world_size)
        return pool

    yield get
    for pool in pools.values():
        pool.kill()
