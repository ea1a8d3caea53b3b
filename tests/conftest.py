"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.distributed.pool import RankPool

pytest.register_assert_rewrite("tests.staging")
torch.set_num_threads(1)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that start processes run one after the other: more ranks than cores would only wait for each other."""
    if "distributed" in item.path.parts or "ranks" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.xdist_group("ranks"))


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
