"""Models that number the samples of a batch, or go by their place or number: as on one device, in microbatches or not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ranks.pool import RankPool
from tests.ranks.runs import Net, Run, assert_as_on_one_device, go

BATCH = WIDTH = 12  # as many samples as features, which are not to be taken for each other


class Numbers(Net):
    """Something with the numbers of the samples between the backbone and the head."""

    def __init__(self, between: Callable[[Numbers, Tensor], Tensor]) -> None:
        super().__init__()
        self.batch_size = BATCH
        self.table = nn.Parameter(torch.zeros(40, WIDTH))  # zeros at first, when microbatches are tried
        self._between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self._between(self, self.backbone(x)) + self.table[0])


def numbers(h: Tensor) -> Tensor:
    return torch.arange(len(h), device=h.device)


def with_items(_: Any, h: Tensor) -> Tensor:
    h = h.clone()
    h[numbers(h), h.argmax(1)] = 0.5
    return h


def halves(_: Any, h: Tensor) -> Tensor:
    first = len(h) // 2
    return torch.cat([h[:first] * 2, h[first:]])


PIPELINED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "an item of each": lambda _, h: h * h[numbers(h), h.argmax(1)][:, None],
    "a grid": lambda _, h: h[numbers(h)[:, None], torch.arange(WIDTH)[None].flip(1)],
    "items set": with_items,
    "views side by side": lambda _, h: torch.cat([h[:, :5], h[:, 5:].sin()], 1)[numbers(h)],
    "twice the batch": lambda _, h: (both := torch.cat([h, h.sin()]))[torch.arange(len(both))].chunk(2)[1],
    "a token for each": lambda m, h: h + m.table[1].expand(len(h), -1),
}
WHOLE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "flipped": lambda _, h: h + h[numbers(h).flip(0)].sin(),
    "halved": lambda _, h: h + h[numbers(h) // 2].sin(),
    "every second of twice the batch": lambda _, h: torch.cat([h, h.sin()])[torch.arange(0, 2 * len(h), 2)],
    "of the features": lambda _, h: h + h.T[numbers(h)].sum(1)[:WIDTH] if len(h) == WIDTH else h,
    "of a table": lambda m, h: h + m.table[numbers(h)],
    "the first of a table": lambda m, h: h + m.table[: len(h)],
    "of classes": lambda _, h: h + F.one_hot(numbers(h) % WIDTH, WIDTH),
    "gathered": lambda _, h: h + h.gather(0, (numbers(h)[:, None] + torch.arange(WIDTH)) % len(h)),
    "scattered": lambda _, h: torch.zeros_like(h).scatter(0, (len(h) - 1 - numbers(h))[:, None].expand(-1, WIDTH), h),
    "of the tokens": lambda _, h: h + h.flatten()[numbers(h)][:, None],
    "picked by what they hold": lambda _, h: h + h[h.argmax(1) % len(h)],
    "halves": halves,
    "divided by their number": lambda _, h: h / len(h),
    "a mask that all share": lambda _, h: h * (h > 0.2).any(0),
}
CASES = PIPELINED | WHOLE


def do_all(folder: str, stages: int, microbatches: int, names: tuple[str, ...]) -> dict[str, tuple[Any, list[str]]]:
    """The results of each, and what was said of batches that run as one microbatch."""
    found = {}
    for name in names:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run = Run(
                module=lambda name=name: Numbers(CASES[name]),  # type: ignore[misc]
                options={"max_epochs": 1},
                strategy={"num_microbatches": microbatches},
            )
            result = go(run, Path(folder), stages)
        found[name] = result, [str(warning.message) for warning in told if "microbatch" in str(warning.message)]
    return found


def check(pool: RankPool, folder: str, microbatches: int, names: tuple[str, ...]) -> None:
    expected = do_all(folder, 0, microbatches, names)
    ranks = pool.run(do_all, folder, pool.world_size, microbatches, names, timeout_seconds=30 + 20 * len(names))
    for name in names:
        assert_as_on_one_device([rank[name][0] for rank in ranks], expected[name][0], name)
        if name in PIPELINED:
            assert all(rank[name][1] == [] for rank in ranks), name


@pytest.mark.parametrize("names", [tuple(PIPELINED), tuple(WHOLE)], ids=["pipelined", "whole"])
def test_numbers_of_samples_are_those_of_one_device(
    ranks: Callable[[int], RankPool], tmp_path: Path, names: tuple[str, ...]
) -> None:
    check(ranks(2), str(tmp_path), 3, names)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_numbers_of_samples_in_microbatches_of_one(ranks: Callable[[int], RankPool], tmp_path: Path, name: str) -> None:
    check(ranks(2), str(tmp_path), BATCH, (name,))
