"""Whatever a LightningModule logs, and however, is on every rank of a pipeline what it is on one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from lightning_fxpipe import FxPipeStrategy
from tests.distributed.pool import RankPool
from tests.logmodules import VARIANTS, run_variant

Ranks = Callable[[int], RankPool]


def piped_variants(names: list[str], microbatches: int, stages: int) -> dict[str, Any]:
    """One job for several runs; a run that fails is the reason of its own test only."""
    return {name: run_variant(name, strategy=FxPipeStrategy(num_microbatches=microbatches), devices=stages) for name in names}


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Where two records differ."""
    if isinstance(expected, dict):
        if list(found) != list(expected):
            return [f"{path}: keys {list(found)} instead of {list(expected)}"]
        return [line for key in expected for line in differences(found[key], expected[key], f"{path}.{key}")]
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return [f"{path}: {len(found)} entries instead of {len(expected)}"]
        return [line for i in range(len(expected)) for line in differences(found[i], expected[i], f"{path}[{i}]")]
    if isinstance(expected, float) and isinstance(found, float):
        same = math.isclose(found, expected, abs_tol=1e-5) or (math.isnan(found) and math.isnan(expected))
        return [] if same else [f"{path}: {found} instead of {expected}"]
    return [] if found == expected else [f"{path}: {found!r} instead of {expected!r}"]


@pytest.mark.parametrize("microbatches", [1, 3, 4])
def test_variants(ranks: Ranks, microbatches: int) -> None:
    for name in VARIANTS:
        expected = run_variant(name)
        for rank, result in enumerate(ranks(2).run(piped_variants, [name], microbatches, 2)):
            del result[name]["history"][:]
            assert differences(result[name], {**expected, "history": []}) == [], (name, rank)
